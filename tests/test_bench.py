"""The measurement itself, on real ranks over gloo: what it writes, and that it goes on."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from piper_megatron.bench.plan import (
    QUICK_CPU,
    compute_points,
    dispatch_points,
    effort,
    link_points,
)
from piper_megatron.bench.points import Measured, Point, PointFile
from piper_megatron.cli.main import main
from piper_megatron.errors import PiperError
from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.estimate import estimate
from piper_megatron.workload.arguments import read_arguments

TINY = replace(
    QUICK_CPU,
    rows=(16, 64),
    widths=(32,),
    groups=(2,),
    heads=(2,),
    channels=(16,),
    sequences=(16, 32),
    elements=(2048, 8192),
    messages=(1024, 16384),
    tokens=(2048, 8192),
    layers=((1, 2),),
    compute_turn_s=0.002,
    network_turn_s=0.002,
    turns=2,
)
TWO_HOSTS = ("a", "a", "b", "b")
JOB = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 64 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
    --global-batch-size 8 --vocab-size 128 --swiglu --disable-bias-linear --transformer-impl local
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
"""


def bench_here(argv: list[str]) -> tuple[int, int]:
    """On a rank: the command with tiny sizes; exit code, and points that were measured."""
    from piper_megatron.bench import run

    measured = []
    of_session = run._Session._measure

    def counting(session: run._Session, point: Point) -> None:
        measured.append(point)
        of_session(session, point)

    with (
        patch.object(run, "effort", lambda **_: TINY),
        patch.object(run._Session, "_measure", counting),
    ):
        return main(["bench", *argv]), len(measured)


def points_of(path: Path) -> list[Measured]:
    lines = path.with_suffix(".points.jsonl").read_text().splitlines()
    return [Measured.model_validate_json(line) for line in lines[1:]]


def test_two_hosts_of_two_ranks(ranks, tmp_path):
    out = tmp_path / "Our Lab.yaml"
    argv = ["--out", str(out), "--quick"]
    run = ranks.call(bench_here, argv, world=4, hosts=TWO_HOSTS).check()
    platform = load_platform(str(out))
    assert platform.name == "our-lab"
    assert platform.ranks_per_node == 2
    assert [level.name for level in platform.levels] == ["node", "machine"]
    for level in platform.levels:
        assert level.evidence == "measured"
        assert level.transfer is not None
        assert level.transfer.evidence == "measured"
        assert "2 x 2 ranks over gloo; torch" in level.source
    device = platform.need_accelerator()
    for part in ("memory", "tflops", "hbm", "kernels", "gemm", "attention"):
        assert device.evidence()[part] == "measured", part
    assert device.evidence()["overheads"] == "assumed"  # most of it is not measured
    assert 0.1 < device.overheads.context_gib < 5
    assert "step_s, tensor_s, link_gbps as before" in device.host.source

    dispatch = [profile.shape for profile in platform.dispatch]
    assert dispatch == [(2, 2, 4, 2)]
    assert set(platform.dispatch[0].seconds) == {"flat", "2dh", "halo", "rail", "rbd"}

    points = points_of(out)
    planned = [
        *compute_points(TINY, gpu=False),
        *link_points(TINY, "node", 2, 2, 1),
        *link_points(TINY, "machine", 2, 4, 2),
        *dispatch_points(TINY, 4, 2),
    ]
    assert {each.point.key for each in points} == {point.key for point in planned}
    assert all(0 < each.low <= each.seconds <= each.high for each in points)
    report = run.outputs[0]
    for text in ("matrix products", "machine all to all whole", "90th percentile", "our-lab"):
        assert text in report
    assert not run.outputs[1]
    assert run.values == [(0, len(planned))] * 4

    found = estimate(job_of(read_arguments(JOB.split()).values, 4), platform)
    assert found.time.step_s > 0
    assert found.memory.fits

    again = ranks.call(bench_here, argv, world=4, hosts=TWO_HOSTS).check()
    assert again.values == [(0, 0)] * 4
    assert points_of(out) == points


def test_it_goes_on_where_it_was_killed(ranks, tmp_path):
    out = tmp_path / "mine.yaml"
    argv = ["--out", str(out), "--platform", "cpu-lab"]
    (whole,) = ranks.call(bench_here, argv, world=1).check().values
    finished = out.with_suffix(".points.jsonl")
    lines = finished.read_text().splitlines(keepends=True)
    finished.write_text("".join(lines[:11]) + lines[11][:40])
    (rest,) = ranks.call(bench_here, argv, world=1).check().values
    assert rest == (0, whole[1] - 10)
    assert len(points_of(out)) == whole[1]
    # no network in one process: what the base says, with its label
    platform = load_platform(str(out))
    assert platform.levels == load_platform("cpu-lab").levels
    assert platform.description.startswith("CPU (")


def test_points_of_another_machine_are_refused_by_all_ranks(ranks, tmp_path):
    out = tmp_path / "mine.yaml"
    PointFile(out.with_suffix(".points.jsonl"), "a faster machine")
    run = ranks.call(bench_here, ["--out", str(out)], world=2).check()
    assert [code for code, _ in run.values] == [2, 2]
    assert "was measured on a faster machine, and this is CPU" in run.outputs[1]
    assert not out.exists()


def test_point_file(tmp_path):
    path = tmp_path / "points.jsonl"
    point = Point(kind="memory", what="copy", dtype="fp32", size={"rows": 2, "width": 3})
    measured = Measured(point=point, seconds=2, low=1, high=2, turns=5)
    PointFile(path, "here").add(measured)
    again = PointFile(path, "here")
    assert again.of([point]) == (measured,)
    assert again.of([point.model_copy(update={"dtype": "bf16"})]) == ()
    assert measured.spread == 0.25
    path.write_text(json.dumps({"machine": "here"}) + '\n{"point": 1}\n')
    with pytest.raises(PiperError, match=r"points.jsonl: .*; remove the file"):
        PointFile(path, "here")
    path.write_text("a shopping list\n")
    with pytest.raises(PiperError, match="does not hold measured points"):
        PointFile(path, "here")


def test_every_effort_plans_distinct_points():
    for quick in (True, False):
        for gpu in (True, False):
            sizes = effort(quick=quick, gpu=gpu)
            points = [
                *compute_points(sizes, gpu=gpu),
                *link_points(sizes, "node", 8, 8, 1),
                *link_points(sizes, "machine", 2, 16, 8),
                *dispatch_points(sizes, 16, 2),
            ]
            assert len({point.key for point in points}) == len(points)
            assert {p.size["pairs"] for p in points if "pairs" in p.size} == {1, 4, 8}
    assert dispatch_points(QUICK_CPU, 8, 1) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "mine.json"], "--out takes a file *.yaml, got 'mine.json'"),
        (["--out", "/nowhere/mine.yaml"], "there is no folder /nowhere"),
        (
            ["--out", "mine.yaml", "--name", "My Lab"],
            "small letters, digits, - and _, got 'My Lab'",
        ),
        ([], "the following arguments are required: --out"),
    ],
)
def test_what_cannot_be_written_is_refused(argv, message, capsys):
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_base_is_refused(ranks, tmp_path):
    argv = ["--out", str(tmp_path / "mine.yaml"), "--platform", "dgx-h10"]
    run = ranks.call(bench_here, argv, world=1).check()
    assert run.values == [(2, 0)]
    assert "unknown platform 'dgx-h10', did you mean dgx-h100" in run.outputs[0]


def test_a_module_starts_the_command(monkeypatch, capsys):
    import runpy

    monkeypatch.setattr("sys.argv", ["piper-megatron", "bench", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("piper_megatron", run_name="__main__")
    assert stop.value.code == 0
    assert "--quick" in capsys.readouterr().out
    assert os.environ.get("RANK") is None
