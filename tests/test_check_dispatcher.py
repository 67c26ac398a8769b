"""`check` and `estimate` know Piper's dispatchers, with the job's own words."""

import json

import pytest
from test_cli_check import EXPERTS, MODEL

from piper_megatron.cli.main import main

EP = "--expert-model-parallel-size"


def findings(capsys, *flags: str, gpus: int = 16, platform: str = "") -> dict[str, dict]:
    where = ["--platform", platform] if platform else []
    main(["check", "--json", "--gpus", str(gpus), *where, "--", *MODEL, *flags])
    found = json.loads(capsys.readouterr().out)["findings"]
    return {f["id"]: f for f in found if "piper" in f["message"] + f["fix"]}


@pytest.mark.parametrize(
    ("flags", "rule", "fix"),
    [
        ([*EXPERTS, EP, "8", "--piper-node-size", "3"], "dispatcher.piper", "1, 2, 4, 8"),
        (["--piper-dispatcher", "rail"], "dispatcher.piper", "add --num-experts"),
        (
            [*EXPERTS, EP, "8", "--piper-dispatcher", "x"],
            "arguments.unreadable",
            "legal are flat, 2dh, halo, rail, rbd, auto",
        ),
        (
            [*EXPERTS, "--moe-token-dispatcher-type", "flex", EP, "8", "--piper-dispatcher=rail"],
            "dispatcher.piper",
            "--moe-token-dispatcher-type alltoall, or drop --piper-dispatcher",
        ),
    ],
)
def test_what_a_job_refuses_is_found_before(capsys, flags, rule, fix):
    found = findings(capsys, *flags)
    assert found[rule]["severity"] == "error"
    assert fix in found[rule]["fix"]


def test_an_untyped_dispatcher_type_is_alltoall(capsys):
    untyped = [word for word in EXPERTS if word not in ("--moe-token-dispatcher-type", "alltoall")]
    assert not findings(capsys, *untyped, EP, "8", "--piper-dispatcher", "rail")


def test_nodes_of_the_platform_must_hold_equal_shares(capsys):
    flags = ("--num-experts", "12", EP, "6", "--piper-dispatcher", "rail")
    found = findings(capsys, *flags, gpus=48, platform="dgx-h100")
    assert "has 2 and 4 on nodes of 8" in found["dispatcher.piper-shares"]["message"]
    assert not findings(capsys, *flags, gpus=48)
    for legal in (("--piper-dispatcher", "auto"), (EP, "4")):
        assert not findings(capsys, *flags, *legal, gpus=48, platform="dgx-h100")


def test_pretended_nodes_must_lie_in_true_ones(capsys):
    flags = ("--num-experts", "48", EP, "12", "--piper-node-size", "6")
    found = findings(capsys, *flags, gpus=48, platform="dgx-h100")
    assert found["dispatcher.piper-nodes"]["fix"] == "--piper-node-size 4"
    assert not findings(capsys, *flags, gpus=48)


def estimate(capsys, *flags: str) -> dict:
    command = [*MODEL, *EXPERTS, EP, "16", "--use-distributed-optimizer", *flags]
    command[command.index("--num-experts") + 1] = "64"
    assert (
        main(["estimate", "--json", "--platform", "frontier", "--gpus", "16", "--", *command]) == 0
    )
    return json.loads(capsys.readouterr().out)


def test_an_estimate_prices_the_dispatcher(capsys):
    top8 = ("--moe-router-topk", "8", "--hidden-size", "2048", "--seq-length", "4096")
    top8 += ("--max-position-embeddings", "4096", "--global-batch-size", "16")
    megatron, flat, rail, auto = (
        estimate(capsys, *top8, *more)
        for more in (
            (),
            ("--piper-dispatcher", "flat"),
            ("--piper-dispatcher", "rail"),
            ("--piper-dispatcher", "auto"),
        )
    )
    assert flat["time"]["step_s"] == megatron["time"]["step_s"]
    assert rail["time"]["step_s"] < flat["time"]["step_s"]
    # which way it takes is left open: copies and memory are those of flat
    assert rail["time"]["step_s"] < auto["time"]["step_s"] < flat["time"]["step_s"]
    assert auto["memory"]["peak_gib"] == flat["memory"]["peak_gib"]
    assert rail["memory"]["peak_gib"] != flat["memory"]["peak_gib"]
