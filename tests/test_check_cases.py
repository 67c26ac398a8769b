"""Faults that users reported, each with its right answer, and their near relatives.

`data/check_cases.jsonl` holds the reported ones: `expected` is the verdict, and the worst finding's
message or fix has one of the words of `must_mention`.
"""

import json
from pathlib import Path

import pytest

from piper_megatron.check.command import Command
from piper_megatron.check.finding import verdict
from piper_megatron.check.run import check, judge
from piper_megatron.platform.platform import load_platform
from piper_megatron.validation.runs import read_runs
from piper_megatron.workload.arguments import read_arguments

CASES = [
    json.loads(line)
    for line in (Path(__file__).with_name("data") / "check_cases.jsonl").read_text().splitlines()
]
BY_ID = {case["id"]: case for case in CASES}


def findings_of(tokens, gpus, platform=None):
    return check(read_arguments(tokens), gpus, load_platform(platform) if platform else None)


def without_memory(tokens, gpus, platform=None):
    """What the rules say; a prediction of memory takes longer and has its own tests."""
    arguments = read_arguments(tokens)
    machine = load_platform(platform) if platform else None
    return judge(Command(arguments.values, arguments.given, gpus, arguments.unknown, machine))


def told(findings, severity):
    return " ".join(f"{f.message} {f.fix}" for f in findings if f.severity == severity).lower()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_reported_fault(case):
    findings = findings_of(case["megatron_args"], case["gpus"], case["platform"])
    assert verdict(findings) == case["expected"], [f for f in findings if f.severity != "info"]
    if case["expected"] != "ok":
        text = told(findings, case["expected"])
        assert any(word in text for word in case["must_mention"])


def changed(id, *flags, drop=()):
    """A case's arguments with some flags dropped and others at the end, which win."""
    tokens = list(BY_ID[id]["megatron_args"])
    for flag in drop:
        at = tokens.index(flag)
        end = next((i for i in range(at + 1, len(tokens)) if tokens[i][:2] == "--"), len(tokens))
        del tokens[at:end]
    return [*tokens, *flags]


GROUPED = "--moe-grouped-gemm"
ETP = "--expert-tensor-parallel-size"
EP = "--expert-model-parallel-size"
# case, flags more, flags less, GPUs, platform, verdict, words of which one is told
RELATIVES = [
    # expert grid, ETP by default, folding
    ("B1", [EP, "8"], [], 16, None, "ok", []),
    ("B1", [EP, "3"], [], 6, None, "error", ["32 experts"]),
    ("B2", [ETP, "1"], [], 4, None, "ok", []),
    ("B2", [], [], 16, None, "ok", []),
    ("B2", [], [], 24, None, "error", ["expert-tensor-parallel"]),
    ("B5", [EP, "32"], [], 32, None, "ok", []),
    ("B5", [EP, "64"], [], 32, None, "error", ["64 gpus"]),
    ("B9", ["--context-parallel-size", "3"], [], 8, None, "error", ["cp 3"]),
    # optimizer instances
    ("B3", ["--num-distributed-optimizer-instances", "1"], [], 4, None, "ok", []),
    ("B3", [ETP, "1"], [], 4, None, "ok", []),
    (
        "B3",
        [ETP, "1", "--num-distributed-optimizer-instances", "3"],
        [],
        4,
        None,
        "error",
        ["1, 2"],
    ),
    # layers
    (
        "B6",
        ["--decoder-first-pipeline-num-layers", "11", "--decoder-last-pipeline-num-layers", "11"],
        [],
        64,
        None,
        "ok",
        [],
    ),
    ("B6", ["--decoder-first-pipeline-num-layers", "10"], [], 64, None, "ok", []),
    ("B6", ["--decoder-first-pipeline-num-layers", "11"], [], 64, None, "error", ["layout"]),
    (
        "B6",
        ["--num-layers", "78", "--moe-layer-freq", "1"],
        [],
        64,
        None,
        "error",
        ["(19/20/20/19)"],
    ),
    (
        "B6",
        ["--num-layers", "94", "--moe-layer-freq", "1"],
        [],
        64,
        None,
        "error",
        ["(23/24/24/23)"],
    ),
    ("B13", [], ["--decoder-last-pipeline-num-layers"], 1, None, "ok", []),
    ("B14-fixed", [], ["--decoder-first-pipeline-num-layers"], 8, None, "error", ["layout"]),
    ("B15", ["--num-virtual-stages-per-pipeline-rank", "1"], [], 64, None, "ok", []),
    (
        "B15",
        ["--num-layers-per-virtual-pipeline-stage", "2"],
        ["--num-virtual-stages-per-pipeline-rank"],
        64,
        None,
        "error",
        ["1, 5"],
    ),
    ("B15-fixed", ["--global-batch-size", "24"], [], 64, None, "error", ["micro-batches"]),
    ("B15-fixed", ["--pipeline-model-parallel-size", "1"], [], 64, None, "error", ["pp 2"]),
    ("B16", ["--decoder-last-pipeline-num-layers", "3"], [], 16, None, "error", ["virtual"]),
    (
        "B16",
        ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "24"],
        [],
        16,
        None,
        "error",
        ["layout"],
    ),
    # layout texts
    ("B17-d", ["--pipeline-model-parallel-layout", "Et|(tt|)*30"], [], 1024, None, "error", ["l"]),
    (
        "B17-d",
        ["--pipeline-model-parallel-layout", "Et|(tt|)*30x"],
        [],
        1024,
        None,
        "error",
        ["'x'"],
    ),
    (
        "B17-d",
        ["--pipeline-model-parallel-layout", "Ett||(tt|)*29L"],
        [],
        1024,
        None,
        "error",
        ["61"],
    ),
    (
        "B17-d",
        ["--pipeline-model-parallel-layout", "Ettt||(tt|)*29L"],
        [],
        1024,
        None,
        "error",
        ["deadlock"],
    ),
    ("B17-d", ["--decoder-last-pipeline-num-layers", "3"], [], 1024, None, "error", ["layout"]),
    ("B17-d", ["--mtp-num-layers", "1"], [], 1024, None, "error", ["mtp"]),
    (
        "B19",
        ["--pipeline-model-parallel-layout", "Et|(tt|)*29t|mL"],
        [],
        256,
        None,
        "warning",
        ["mtp"],
    ),
    (
        "B19",
        ["--pipeline-model-parallel-layout", "Et|(tt|)*29t|tmL"],
        [],
        256,
        None,
        "error",
        ["60"],
    ),
    ("B19", ["--pipeline-model-parallel-layout", "E|(tt|)*29t|tmL"], [], 256, None, "ok", []),
    (
        "B19",
        ["--pipeline-model-parallel-layout", "E|(tt|)*14ttm|(tt|)*15L"],
        [],
        256,
        None,
        "error",
        ["mtp"],
    ),
    ("B20-stale", ["--pipeline-model-parallel-size", "16"], [], 256, None, "ok", []),
    # overlap and connections
    ("B21", [EP, "1"], [], 64, None, "error", ["expert parallelism"]),
    ("B21", ["--mtp-num-layers", "2"], [], 64, None, "error", ["multi-token"]),
    ("B21", ["--moe-token-dispatcher-type", "allgather"], [], 64, None, "error", ["alltoall"]),
    ("B21", ["--pipeline-model-parallel-size", "2", EP, "32"], [], 64, None, "error", ["virtual"]),
    (
        "B21",
        [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ],
        [],
        64,
        None,
        "error",
        ["recomputation"],
    ),
    ("B21", ["--delay-wgrad-compute"], [], 64, None, "ok", []),
    ("B68-wgrad", [], ["--overlap-moe-expert-parallel-comm"], 16, None, "ok", []),
    ("B68-wgrad", [], ["--overlap-dispatch-backward-with-experts-wgrad"], 16, None, "ok", []),
    ("B30", [], [], 32, "dgx-b200", "ok", []),
    ("B30", [], [], 32, None, "warning", ["max_connections"]),
    (
        "B30",
        ["--context-parallel-size", "2", "--tensor-model-parallel-size", "1"],
        [],
        32,
        "dgx-h200",
        "warning",
        ["max_connections"],
    ),
    ("B30", ["--tensor-model-parallel-size", "1"], [], 32, "dgx-h200", "ok", []),
    ("B30", [], ["--overlap-moe-expert-parallel-comm"], 32, "dgx-h200", "ok", []),
    # sequence parallelism
    ("B8", ["--sequence-parallel"], [], 8, None, "ok", []),
    ("B8", ["--num-experts", "0", EP, "1"], [], 8, None, "warning", ["dense"]),
    ("B8", ["--tensor-model-parallel-size", "1"], [], 8, None, "ok", []),
    # dispatchers and their backends
    ("B12", ["--moe-token-dispatcher-type", "flex"], [], 256, None, "error", ["flex"]),
    ("B12", ["--moe-token-dispatcher-type", "flex"], ["--fake-process-group"], 256, None, "ok", []),
    ("B60", ["--moe-token-dispatcher-type", "alltoall"], [], 16, None, "ok", []),
    ("B60", [], ["--moe-token-dispatcher-type"], 16, None, "warning", ["default"]),
    ("B60", [EP, "1"], [], 16, None, "ok", []),
    ("B61", [GROUPED], [], 16, None, "ok", []),
    ("B61", [EP, "8"], [], 16, None, "ok", []),
    ("B64", ["--moe-token-dispatcher-type", "flex"], [], 16, None, "ok", []),
    ("B64", ["--moe-flex-dispatcher-backend", "hybridep"], [], 16, None, "warning", ["flex"]),
    ("B64", ["--moe-flex-dispatcher-backend", "ncclep"], [], 16, None, "error", ["flex"]),
    ("B64", ["--moe-enable-deepep"], [], 16, None, "error", ["flex"]),
    ("B64", ["--moe-token-dispatcher-type", "flex"], [], 16, "frontier", "warning", ["cuda"]),
    # capacity
    ("B65", ["--moe-pad-expert-input-to-capacity"], [], 8, None, "ok", []),
    (
        "B65",
        ["--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0"],
        [],
        8,
        None,
        "error",
        ["aux_loss"],
    ),
    (
        "B65",
        ["--moe-pad-expert-input-to-capacity"],
        ["--moe-expert-capacity-factor"],
        8,
        None,
        "error",
        ["capacity-factor"],
    ),
    ("B65", ["--moe-expert-capacity-factor", "1000"], [], 8, None, "error", ["1000"]),
    ("B65", ["--moe-expert-capacity-factor", "0"], [], 8, None, "error", ["every token"]),
    ("B65", ["--moe-expert-capacity-factor", "nan"], [], 8, None, "error", ["capacity"]),
    ("B65", ["--moe-expert-capacity-factor", "0.25"], [], 8, None, "warning", ["drops"]),
    (
        "B65",
        ["--moe-token-dispatcher-type", "flex", "--moe-pad-expert-input-to-capacity", EP, "8"],
        [],
        8,
        None,
        "error",
        ["deepep"],
    ),
    # balancing and expert bias
    (
        "B69",
        ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-3"],
        [],
        16,
        None,
        "ok",
        [],
    ),
    (
        "B69",
        ["--moe-router-load-balancing-type", "aux_loss"],
        [],
        16,
        None,
        "warning",
        ["default is 0"],
    ),
    (
        "B69",
        ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"],
        [],
        16,
        None,
        "ok",
        [],
    ),
    (
        "B69",
        [
            "--moe-router-enable-expert-bias",
            "--moe-router-score-function",
            "sigmoid",
            "--moe-router-bias-update-rate",
            "0",
        ],
        [],
        16,
        None,
        "warning",
        ["update-rate"],
    ),
    ("B69", ["--moe-router-force-load-balancing"], [], 16, None, "ok", []),
    ("B82", ["--moe-router-score-function", "sqrtsoftplus"], [], 16, None, "ok", []),
    ("B82", [], ["--moe-router-enable-expert-bias"], 16, None, "ok", []),
    # settings without effect
    ("B1-fixed", [], ["--group-query-attention"], 4, None, "warning", ["--group-query-attention"]),
    ("B1-fixed", ["--recompute-modules", "moe_act"], [], 4, None, "warning", ["selective"]),
    ("B1-fixed", ["--fp8-recipe", "mxfp8"], [], 4, None, "warning", ["--fp8-format"]),
    ("B1-fixed", ["--kv-lora-rank", "512"], [], 4, None, "warning", ["multi-latent"]),
    ("B1-fixed", ["--moe-router-num-groups", "4"], [], 4, None, "warning", ["group-topk"]),
    # numbers that cannot be
    ("B1-fixed", ["--moe-router-topk", "64"], [], 4, None, "error", ["32 experts"]),
    ("B1-fixed", ["--micro-batch-size", "0"], [], 4, None, "error", ["--micro-batch-size"]),
    ("B1-fixed", ["--seq-length", "-1"], [], 4, None, "error", ["--seq-length"]),
    ("B1-fixed", ["--global-batch-size", "3"], [], 4, None, "error", ["2 or 4"]),
    ("B1-fixed", ["--fp8-format", "hybrid"], [], 4, "dgx-a100", "error", ["--fp8-format"]),
    # flags that Megatron does not have
    ("B1-fixed", ["--sequence-paralel"], [], 4, None, "error", ["--sequence-parallel"]),
    ("B1-fixed", ["--my-own-flag", "3"], [], 4, None, "warning", ["--my-own-flag"]),
    ("B1-fixed", ["--moe-extended-tp"], [], 4, None, "warning", ["--moe-extended-tp"]),
    # sizes against the machine
    (
        "B4-fixed",
        [
            "--tensor-model-parallel-size",
            "8",
            "--sequence-parallel",
            EP,
            "1",
            "--pipeline-model-parallel-size",
            "1",
        ],
        [],
        8,
        "perlmutter-a100-80",
        "warning",
        ["tp 8"],
    ),
    (
        "B4-fixed",
        ["--global-batch-size", "4", "--micro-batch-size", "1"],
        [],
        8,
        None,
        "warning",
        ["micro-batches"],
    ),
    ("B4-fixed", [], ["--bf16"], 8, None, "warning", ["--bf16"]),
]


def _name(row):
    return " ".join([row[0], *row[1], *(f"without {flag}" for flag in row[2]), f"on {row[3]}"])


@pytest.mark.parametrize("row", RELATIVES, ids=_name)
def test_relatives_of_reported_faults(row):
    id, more, less, gpus, platform, expected, words = row
    findings = without_memory(changed(id, *more, drop=less), gpus, platform)
    assert verdict(findings) == expected, [f for f in findings if f.severity != "info"]
    if words:
        text = told(findings, expected)
        assert any(word in text for word in words), text


# what these commands really do wrong, and what of it was really so in the run
KNOWN = {
    "precision.loss-fusion": "the run used Transformer Engine's loss, which 0.19 refuses",
    "experts.grouped-bias": "the row leaves --no-bias-dropout-fusion out, which its stack sets",
    "overlap.experts": "the run combined the overlap with full recomputation",
    "fsdp.conditions": "the row leaves --ckpt-format out",
}


@pytest.mark.parametrize("run", [r for r in read_runs() if r.ranks], ids=lambda run: run.id)
def test_published_runs_are_not_refused(run):
    findings = without_memory(run.megatron_args, run.ranks, run.platform)
    assert {finding.id for finding in findings if finding.severity == "error"} <= set(KNOWN)
