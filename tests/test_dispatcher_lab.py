"""The dispatcher's benchmark measures what it says, on a small layer."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from cluster_lab import ClusterLab, LabError, require_rights
from dispatcher_lab import judge, measure_moe, plan_cell, profile_of

SMALL = {"experts": 8, "topk": 4, "hidden": 256, "tokens": 64}


@pytest.fixture(scope="module")
def rights():
    try:
        require_rights()
        with ClusterLab(hosts=1, ranks_per_host=1):
            pass
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.rights
def test_rows_that_cross_once_a_host_are_bytes_saved(rights):
    with ClusterLab(hosts=2, ranks_per_host=2, mbit=1000) as lab:
        before = lab.crossed_bytes()
        result = measure_moe(lab, ("megatron", "flat", "rail"), SMALL, repeats=1)
        crossed_bytes = lab.crossed_bytes() - before
    megatron, flat, rail = (result["ways"][way] for way in ("megatron", "flat", "rail"))
    rows = result["rows_between_hosts"]
    row_bytes = 4 * SMALL["hidden"]
    # 8 experts on 2 hosts, 4 chosen: 2 on the other host, which has one of them almost always
    assert rows["once_an_expert"] / rows["once_a_host"] == pytest.approx(2 / 0.986, rel=0.1)
    # there and back; the rest is probabilities, headers and acknowledgements
    assert flat["crossed_bytes"] == pytest.approx(2 * rows["once_an_expert"] * row_bytes, rel=0.1)
    assert rail["crossed_bytes"] == pytest.approx(2 * rows["once_a_host"] * row_bytes, rel=0.1)
    assert megatron["crossed_bytes"] == pytest.approx(flat["crossed_bytes"], rel=0.05)
    # each way ran twice: counted, then timed
    counted = sum(2 * way["crossed_bytes"] for way in result["ways"].values())
    assert crossed_bytes == pytest.approx(counted, rel=0.1)
    assert megatron["messages_between"] == flat["messages_between"] > rail["messages_between"]


def test_auto_is_chosen_by_one_pass_and_judged_by_the_other():
    lab = ClusterLab(2, 4)
    first = cell(flat=[3.0, 2.0, 9.0], two=[4.0], halo=[2.9])
    profile = profile_of(lab, (1024, 4096), (first, first))
    judged = judge(profile, 1024, cell(flat=[2.0], two=[4.0], halo=[2.5]))
    assert judged["auto"] == "halo"
    assert judged["auto_over_best"] == 1.25
    assert judged["over_flat"] == {"flat": 1.0, "2dh": 2.0, "halo": 1.25}
    assert profile.seconds["halo"] == (5.8, 5.8)  # there and back


def cell(flat: list[float], two: list[float], halo: list[float]) -> dict:
    return {name: {"seconds": s} for name, s in (("flat", flat), ("2dh", two), ("halo", halo))}


def test_short_cells_are_measured_more_often():
    lab = ClusterLab(2, 4)
    cells = [plan_cell(lab, 1024 * 4**i) for i in range(7)]
    assert [cell["repeats"] for cell in cells] == sorted(
        (cell["repeats"] for cell in cells), reverse=True
    )
    assert cells[0]["calls"] > cells[-1]["calls"] == 1
