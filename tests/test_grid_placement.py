"""How the benchmark reads Megatron's logs and what it concludes from them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from cluster_lab import RankResult
from grid_placement import BenchmarkError, Training, read_log, summarize

LOG = """\
 [2026-01-01 00:00:00.000000] iteration        1/       2 | consumed samples:           16 | \
elapsed time per iteration (ms): 4500.5 | learning rate: 1.000000E-03 | global batch size:    16 | \
lm loss: 7.012345E+00 | loss scale: 1.0 | grad norm: 2.345 |
 [2026-01-01 00:00:02.000000] iteration        2/       2 | consumed samples:           32 | \
elapsed time per iteration (ms): 2000.0 | learning rate: 1.000000E-03 | global batch size:    16 | \
lm loss: 6.543210E+00 | loss scale: 1.0 | grad norm: 1.234 |
"""


def results(*outputs: str) -> list[RankResult]:
    return [RankResult(rank, "host0", rank, 0, output) for rank, output in enumerate(outputs)]


def test_log_is_found_on_whichever_rank_printed_it():
    expected = ((4.5005, 2.0), ("7.012345E+00", "6.543210E+00"))
    assert read_log(results("", LOG, "other\n"), steps=2) == expected


@pytest.mark.parametrize("outputs", [("",), (LOG, LOG), (LOG[:200],)])
def test_incomplete_log_is_an_error(outputs):
    with pytest.raises(BenchmarkError, match="expected 2 steps"):
        read_log(results(*outputs), steps=2)


def trainings(pure: list[float], launcher: list[float], placed: list[float], losses="7.0 6.0 5.0"):
    def runs(step_s: list[float], losses: str) -> list[Training]:
        # the two warm-up steps are slow and must not count
        return [Training((99.0, 99.0, s), tuple(losses.split()), crossed_mb=60.0) for s in step_s]

    return {
        "pure EP": runs(pure, "7.1 6.1 5.1"),
        "launcher": runs(launcher, "7.0 6.0 5.0"),
        "placed": runs(placed, losses),
    }


def test_gains_are_ratios_within_a_round():
    summary = summarize(trainings([4.8, 6.0, 9.9], [4.0, 4.2, 9.0], [2.0, 2.0, 3.0]))
    assert summary["step_s"]["pure EP"] == {"median": 6.0, "min": 4.8, "max": 9.9}
    assert summary["crossed_mb_per_step"]["placed"]["median"] == 20.0
    assert summary["gains"] == {
        "grid over pure EP": pytest.approx({"median": 3.0, "min": 2.4, "max": 3.3}),
        "placement": pytest.approx({"median": 2.1, "min": 2.0, "max": 3.0}),
    }
    assert summary["losses_equal_with_and_without_placement"]


@pytest.mark.parametrize("losses", ["7.0 6.0 5.1", "7.1 6.0 5.0"])
def test_one_different_digit_is_noticed(losses):
    summary = summarize(trainings([1.0], [1.0], [1.0], losses))
    assert not summary["losses_equal_with_and_without_placement"]
