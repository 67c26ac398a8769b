"""`piper-megatron check` and the options that it shares with the other predictions."""

import json

import pytest

from piper_megatron.cli.main import main

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--vocab-size 1000 --disable-bias-linear --swiglu"
).split()
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall".split()
BALANCED = "--moe-aux-loss-coeff 1e-3".split()


def run(capsys, *argv):
    code = main(["check", *argv])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def run_json(capsys, *argv):
    code, out = run(capsys, "--json", *argv)
    return code, json.loads(out)


def test_a_sane_command_is_ok(capsys):
    code, content = run_json(capsys, "--gpus", "8", "--", *MODEL)
    assert (code, content["verdict"]) == (0, "ok")
    assert {finding["severity"] for finding in content["findings"]} == {"info"}
    effective = next(f for f in content["findings"] if f["id"] == "effective.sizes")
    assert "DP 8" in effective["message"]


def test_a_warning_exits_with_0(capsys):
    code, content = run_json(capsys, "--gpus", "8", "--", *MODEL, *EXPERTS)
    assert (code, content["verdict"]) == (0, "warning")
    first = content["findings"][0]
    assert set(first) == {"id", "severity", "message", "fix", "source", "late"}
    assert first["id"] == "router.unbalanced"


def test_an_error_exits_with_2_and_comes_first(capsys):
    code, content = run_json(
        capsys, "--gpus", "8", "--", *MODEL, *EXPERTS, "--expert-model-parallel-size", "16"
    )
    assert (code, content["verdict"]) == (2, "error")
    assert content["findings"][0]["severity"] == "error"
    assert "error" not in content


def test_the_text_says_the_verdict_first_and_then_the_fixes(capsys):
    code, out = run(capsys, "--gpus", "6", "--", *MODEL, "--pipeline-model-parallel-size", "3")
    assert code == 2
    lines = out.splitlines()
    assert lines[0].startswith("ERROR: 1 error on 6 GPUs; memory and network are not judged")
    assert "4 layers are not divisible by PP 3" in out
    assert "  fix    " in out
    assert "transformer_config.py" in out
    assert max(map(len, lines)) <= 100


def test_late_failures_are_told_apart(capsys):
    flags = [*EXPERTS, *BALANCED, "--tensor-model-parallel-size", "2"]
    code, out = run(capsys, "--gpus", "8", "--", *MODEL, *flags)
    assert code == 2
    assert "(Megatron starts with it)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus", "x", "--", *MODEL], "--gpus takes a whole number"),
        (["--gpus", "0", "--", *MODEL], "--gpus takes a whole number"),
        (["--", *MODEL], "--gpus 64"),
        (["--gpus", "8"], "behind --"),
        (["--gpus", "8", "--", *MODEL, "--micro-batch-size", "two"], "--micro-batch-size"),
        (["--gpus", "8", "--", *MODEL, "--moe-token-dispatcher-type", "alltoall_seq"], "alltoall"),
        (["--gpus", "8", "--model", "mixtral-8x99", "--", *MODEL], "mixtral"),
        (["--gpus", "8", "--hf", "no/such/folder", "--", *MODEL], "no/such/folder"),
    ],
)
def test_a_command_that_cannot_be_read_is_an_error(capsys, argv, words):
    code, content = run_json(capsys, *argv)
    assert (code, content["verdict"]) == (2, "error")
    assert words in content["error"]
    assert "\n" not in content["error"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus", "8", "--platform", "dgx-h900", "--", *MODEL], "dgx-h100"),
        (["--gpus", "8", "--platfrom", "dgx-h100", "--", *MODEL], "--platfrom"),
    ],
)
def test_other_bad_input_is_a_json_object_too(capsys, argv, words):
    code, content = run_json(capsys, *argv)
    assert code == 2
    assert set(content) == {"error"}
    assert words in content["error"]


def test_bad_input_as_text_is_one_line_on_stderr(capsys):
    assert main(["check", "--gpus", "8", "--platform", "dgx-h900", "--", *MODEL]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("piper-megatron: error: unknown platform 'dgx-h900'")
    assert captured.err.count("\n") == 1


def test_a_whole_command_says_its_ranks(capsys):
    launch = "torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py".split()
    code, content = run_json(capsys, "--", *launch, *MODEL)
    assert code == 0
    assert "8 GPUs" in content["findings"][-1]["message"] + content["findings"][0]["message"]
    code, content = run_json(capsys, "--gpus", "16", "--", *launch, *MODEL)
    assert (code, "remove one" in content["error"]) == (2, True)


def test_arguments_win_over_the_models(capsys):
    batch = "--micro-batch-size 1 --global-batch-size 16 --bf16 --seq-length 4096".split()
    few = [*batch, "--expert-model-parallel-size", "8", "--num-experts", "4"]
    code, content = run_json(capsys, "--gpus", "8", "--model", "mixtral-8x7b", "--", *few)
    assert code == 2
    assert "4 experts" in content["findings"][0]["message"]


def test_the_platform_says_what_its_network_needs(capsys):
    code, content = run_json(capsys, "--gpus", "8", "--platform", "frontier", "--", *MODEL)
    assert code == 0
    settings = next(f for f in content["findings"] if f["id"] == "platform.environment")
    assert "NCCL_CROSS_NIC=1" in settings["fix"]
