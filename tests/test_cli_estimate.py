"""`piper-megatron estimate` as a user runs it."""

import json

import pytest

from piper_megatron.cli.main import main

MODEL = ["--model", "deepseek-v2-lite"]
COMMAND = """
    --micro-batch-size 1 --global-batch-size 512 --seq-length 4096 --bf16
    --use-distributed-optimizer --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
""".split()
WHERE = ["--platform", "dgx-h100", "--gpus", "32"]


def run(capsys, *argv):
    code = main(["estimate", *argv])
    return code, *capsys.readouterr()


def as_json(capsys, *argv):
    code, out, err = run(capsys, "--json", *argv)
    assert err == ""
    return code, json.loads(out)


def test_json_is_the_contract(capsys):
    code, found = as_json(capsys, *WHERE, *MODEL, "--", *COMMAND)
    assert code == 0
    assert set(found) == {"parameters", "memory", "time", "assumptions", "evidence"}
    assert set(found["parameters"]) == {"total", "active", "per_stage"}
    assert found["parameters"]["total"] == pytest.approx(15.7e9, rel=0.01)
    assert set(found["memory"]) >= {"stages", "peak_gib", "worst_stage", "capacity_gib", "fits"}
    (stage,) = found["memory"]["stages"]
    for name in (
        *("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "logits_gib"),
        *("dispatch_gib", "communicators_gib", "peak_gib", "reserved_gib"),
    ):
        assert stage[name] >= 0
    time = found["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["step_s"])
    assert time["tokens_per_s_per_gpu"] == pytest.approx(512 * 4096 / time["step_s"] / 32)
    assert 0 < time["mfu"] < 1
    assert set(found["evidence"].values()) <= {"measured", "published", "fitted", "assumed"}


def test_text_says_first_whether_it_fits(capsys):
    code, out, _ = run(capsys, *WHERE, *MODEL, "--", *COMMAND)
    assert code == 0
    first, _, third, *_ = out.splitlines()
    assert first.startswith("fits: needs ")
    assert third.startswith("deepseek-v2-lite: 15.71B parameters")
    for word in ("weights", "dispatch", "part of the step", "assumed", "published"):
        assert word in out


def test_several_times_the_device_is_said_first(capsys):
    code, out, _ = run(capsys, "--platform", "dgx-h100", "--gpus", "8", "--model", "deepseek-v3",
                       "--", *COMMAND)  # fmt: skip
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("DOES NOT FIT: needs ")
    assert "times the 79.1 GiB that it has" in first


def test_what_is_no_option_of_megatron_is_listed(capsys):
    _, out, _ = run(capsys, *WHERE, *MODEL, "--", *COMMAND, "--my-own-option", "7")
    assert "--my-own-option 7: no option of Megatron's" in out


def test_imbalance_costs_memory_and_time(capsys):
    # enough rows that the device, and not the host that launches its kernels, takes longest
    command = ["--", *COMMAND, "--micro-batch-size", "4"]
    _, even = as_json(capsys, *WHERE, *MODEL, *command)
    _, hot = as_json(capsys, *WHERE, "--imbalance", "1.5", *MODEL, *command)
    assert hot["memory"]["peak_gib"] > even["memory"]["peak_gib"]
    assert hot["time"]["step_s"] > even["time"]["step_s"]


def test_a_picture(capsys, tmp_path):
    picture = tmp_path / "step.png"
    code, _, _ = run(capsys, *WHERE, "--plot", str(picture), *MODEL, "--", *COMMAND)
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpus", "8", *MODEL, "--", *COMMAND], "--platform dgx-h100"),
        (["--platform", "dgx-h10", "--gpus", "8", *MODEL, "--"], "did you mean dgx-h100"),
        (["--platform", "dgx-h100", *MODEL, "--", *COMMAND], "--gpus"),
        ([*WHERE, "--imbalance", "0.9", *MODEL, "--", *COMMAND], "--imbalance takes a number"),
        ([*WHERE, "--stack", "foo", *MODEL, "--", *COMMAND], "unknown software stack 'foo'"),
        ([*WHERE, *MODEL, "--", *COMMAND, "--hidden-size", "-5"], "--hidden-size must be"),
        (
            [*WHERE, *MODEL, "--", *COMMAND, "--moe-expert-capacity-factor", "1e9"],
            "--moe-expert-capacity-factor 1e+09 is more than all tokens on one expert",
        ),
        (
            [*WHERE, *MODEL, "--", *COMMAND, "--moe-router-topk", "100"],
            "--moe-router-topk 100 is more than the 64 experts",
        ),
        (
            [*WHERE, *MODEL, "--", *COMMAND, "--global-batch-size", "500"],
            "--global-batch-size 500 is not a multiple",
        ),
        ([*WHERE, "--plot", "/no/such/folder/x.png", *MODEL, "--", *COMMAND], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, says):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert says in err
    code, found = as_json(capsys, *argv)
    assert code == 2
    assert says in found["error"]
