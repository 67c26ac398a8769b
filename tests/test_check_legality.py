"""Random commands, published ones and reported faults: our verdict is the real Megatron's."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from megatron_judge import Refusal, gpu_job, judge
from random_commands import random_command

from piper_megatron.check.finding import Finding
from piper_megatron.check.run import check
from piper_megatron.errors import WorkloadError
from piper_megatron.validation.runs import read_runs
from piper_megatron.workload.arguments import read_arguments

pytestmark = pytest.mark.filterwarnings("ignore")

COMMANDS = 1_200
CASES = Path(__file__).with_name("data") / "check_cases.jsonl"


@pytest.fixture(scope="module", autouse=True)
def _gpu_job():
    with gpu_job():
        yield


def start_up_errors(tokens: list[str], gpus: int) -> list[Finding] | None:
    """What we say that Megatron refuses before it builds a model; None for its parser."""
    try:
        arguments = read_arguments(tokens)
    except WorkloadError:
        return None
    return [f for f in check(arguments, gpus) if f.severity == "error" and not f.late]


def disagreement(tokens: list[str], gpus: int, refusal: Refusal | None) -> str | None:
    """How our verdict differs from Megatron's, if it does."""
    ours = start_up_errors(tokens, gpus)
    if ours is None:  # our parser
        agree = refusal is not None and refusal.step == "parser"
    elif any(finding.id.endswith(".positive") for finding in ours):
        agree = True  # a size below 1 is an error whatever Megatron makes of it
    else:
        agree = bool(ours) == bool(refusal)
    return None if agree else f"{gpus} GPUs, {' '.join(tokens)}: Megatron {refusal}, we {ours}"


def test_random_commands():
    rng = random.Random(20)
    places = Counter()
    disagreements = []
    for _ in range(COMMANDS):
        tokens, gpus = random_command(rng)
        refusal = judge(tokens, gpus)
        places[refusal.at if refusal else "starts"] += 1
        if found := disagreement(tokens, gpus, refusal):
            disagreements.append(found)
    assert disagreements == []
    # the commands are worth comparing
    assert 0.4 < places["starts"] / COMMANDS < 0.75
    assert len(places) > 80


def published():
    return [
        pytest.param(run.megatron_args, run.ranks, id=run.id) for run in read_runs() if run.ranks
    ]


@pytest.mark.parametrize(("tokens", "gpus"), published())
def test_published_commands(tokens, gpus):
    assert disagreement(list(tokens), gpus, judge(tokens, gpus)) is None


@pytest.mark.parametrize(
    "case", list(map(json.loads, CASES.read_text().splitlines())), ids=lambda case: case["id"]
)
def test_reported_faults(case):
    tokens, gpus = case["megatron_args"], case["gpus"]
    assert disagreement(tokens, gpus, judge(tokens, gpus)) is None


# one command a row: a base, and what is wrong with it at which parallel sizes
WRONG = """
    --moe-token-dispatcher-type alltoall_seq
    --fp8-format e5m2
    --micro-batch-size one
    --pipeline-model-parallel-layout E|t*4|L --no-overlap-p2p-communication
    --use-sharp
    --init-method-xavier-uniform
    --phase-transition-iterations 1,x
    --hybrid-layer-pattern M*M-|M*
    --hybrid-layer-pattern M*x
    --hybrid-layer-pattern MM --num-virtual-stages-per-pipeline-rank 2
    --cuda-graph-modules full_iteration_inference --cuda-graph-impl transformer_engine
    --experimental-attention-variant gated_delta_net
    --experimental-attention-variant dsa --disable-bias-linear
    --perform-rl-step --rl-consumption-granularity R
    --transformer-impl inference_optimized --disable-bias-linear
    --save somewhere
    --fim-data --mock-data
    --dataloader-type cyclic --hybrid-context-parallel --calculate-per-token-loss
""".strip().splitlines()
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --position-embedding-type rope --bf16"
).split()


@pytest.mark.parametrize("wrong", WRONG, ids=str.strip)
def test_rare_faults(wrong):
    tokens = [*BASE, *wrong.split()]
    refusal = judge(tokens, 8)
    assert judge(BASE, 8) is None
    assert refusal is not None
    assert disagreement(tokens, 8, refusal) is None
