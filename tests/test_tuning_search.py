"""The search against all candidates worked out one by one, and what it says where nothing fits."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from piper_megatron.errors import WorkloadError
from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.estimate import estimate
from piper_megatron.tuning.finalist import WorkedOut, worked_out
from piper_megatron.tuning.limit import default_margin, limit_gib
from piper_megatron.tuning.score import Candidate
from piper_megatron.tuning.search import Outcome, search
from piper_megatron.tuning.space import layouts
from piper_megatron.tuning.task import AXES, Task, values_of
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.flags import spelling_of

MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --lr 1e-4 --train-iters 5 --bf16 --attention-backend flash "
    "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 4096 --ffn-hidden-size 8192 "
    "--moe-grouped-gemm --moe-layer-freq ([0]*1+[1]*7) "
)
BATCH = "--global-batch-size 64 "
# what keeps the candidates few enough to work them all out
FEW = (
    "--context-parallel-size 1 --expert-tensor-parallel-size 1 --micro-batch-size 1 "
    "--use-distributed-optimizer --num-distributed-optimizer-instances 1 "
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
# name -> platform, GPUs, margin, arguments
CASES = {
    "much room": ("dgx-h100", 16, 0.1, FULL + "--moe-token-dispatcher-type alltoall"),
    "little room": (
        "dgx-h100",
        16,
        0.85,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --optimizer-cpu-offload "
        "--use-precision-aware-optimizer",
    ),
    "slow network": (
        "frontier",
        32,
        0.1,
        FULL + "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2",
    ),
}


def task_of(platform: str, gpus: int, arguments: str) -> Task:
    return Task(read_arguments((MODEL + arguments).split()), gpus, load_platform(platform))


def every_candidate(task: Task) -> Iterator[WorkedOut]:
    space = layouts(task)
    for places in product(*(range(len(choices)) for choices in space.settings.values())):
        allowed = space.allowed(dict(zip(space.settings, places, strict=True)))
        chosen = tuple(
            choices[place] for choices, place in zip(space.settings.values(), places, strict=True)
        )
        for row in np.flatnonzero(allowed):
            sizes = {axis: int(getattr(space.sizes, axis)[row]) for axis in (*AXES, "vpp")}
            found = worked_out(task, Candidate(sizes, chosen, np.nan, np.nan), 0.0)
            if isinstance(found, WorkedOut):
                yield found


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_fits_is_quicker_or_smaller_than_what_is_found(name):
    platform, gpus, margin, arguments = CASES[name]
    task = task_of(platform, gpus, BATCH + FEW + arguments)
    limit = limit_gib(task.platform, margin)
    every = list(every_candidate(task))
    assert len(every) > 50
    fitting = [each for each in every if each.needed_gib <= limit]
    best = search(task, margin=margin).plans[0]
    assert best.estimate.time.step_s <= min(each.step_s for each in fitting) * 1.005
    assert needed_gib(best) <= limit
    smallest = search(task, margin=margin, objective="memory").plans[0]
    assert needed_gib(smallest) <= min(each.needed_gib for each in every) * 1.01
    if name == "little room":
        assert len(fitting) < len(every)


def needed_gib(plan) -> float:
    return max(stage.needed_gib for stage in plan.estimate.memory.stages)


@pytest.fixture(scope="module")
def outcome() -> tuple[Task, Outcome]:
    task = task_of("dgx-h100", 16, BATCH)
    return task, search(task, margin=default_margin(task.platform))


def test_plans_are_in_order_and_each_is_another_layout(outcome):
    _, found = outcome
    times = [plan.estimate.time.step_s for plan in found.plans]
    assert times == sorted(times)
    assert len(times) == 5
    assert [plan.rank for plan in found.plans] == [1, 2, 3, 4, 5]
    sizes = [tuple(getattr(plan.layout, axis) for axis in (*AXES, "vpp")) for plan in found.plans]
    assert len(set(sizes)) == 5


def test_a_plan_keeps_the_task_and_costs_what_its_arguments_cost(outcome):
    task, found = outcome
    for plan in found.plans:
        assert not task.given & values_of(plan.megatron_args).keys()
        assert (plan.global_batch, plan.seq, plan.spec) == (64, 4096, task.model)
        assert plan.layout.tp * plan.layout.cp * plan.layout.pp * plan.layout.dp == 16
        assert plan.layout.dp * plan.layout.micro_batch * plan.layout.micro_batches == 64


def test_no_point_of_the_front_beats_another_and_it_begins_at_the_best(outcome):
    _, found = outcome
    times = [point.step_s for point in found.front]
    needs = [point.needed_gib for point in found.front]
    assert len(times) > 5
    assert times == sorted(set(times))
    assert needs == sorted(set(needs), reverse=True)
    assert times[0] == pytest.approx(found.plans[0].estimate.time.step_s, rel=0.05)


def test_every_candidate_is_accounted_for(outcome):
    _, found = outcome
    reasons = found.rejected
    illegal = sum(n for reason, n in reasons.items() if not reason.startswith("stage: "))
    assert found.searched - illegal == found.legal
    assert sum(n for reason, n in reasons.items() if reason.startswith("stage: ")) < found.legal


def test_processes_find_the_same(outcome):
    task, found = outcome
    again = search(task, margin=default_margin(task.platform), processes=2)
    assert again.model_dump(exclude={"seconds"}) == found.model_dump(exclude={"seconds"})


def test_the_stages_of_the_search_are_told_to_their_end():
    told = []
    task = task_of("dgx-h100", 16, BATCH + FEW + FULL)
    search(task, margin=0.1, progress=lambda stage, share: told.append((stage, share)))
    last = dict(told)
    assert {"bounds", "candidates", "finalists"} <= last.keys()
    assert set(last.values()) == {1.0}


def test_fewest_gpus():
    task = task_of("dgx-h100", 64, BATCH)
    margin = 0.7
    found = search(task, margin=margin, objective="gpus")
    fewest = found.plans[0].gpus
    assert f"{fewest} GPUs are the fewest on which it fits" in found.notes
    fewer = max(count for count in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56) if count < fewest)
    assert not search(replace(task, gpus=fewer), margin=margin).plans


def test_imbalance_costs_time():
    task = task_of("dgx-h100", 16, BATCH + FEW + FULL)
    even, uneven = (
        search(replace(task, imbalance=imbalance), margin=0.1) for imbalance in (1.0, 2.0)
    )
    assert uneven.plans[0].estimate.time.step_s > 1.1 * even.plans[0].estimate.time.step_s
    assert any("2 times the mean" in note for note in uneven.notes)


TIGHT = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--expert-model-parallel-size 2 "
)


def test_where_nothing_fits_the_advice_is_true():
    task = task_of("dgx-h100", 4, BATCH + TIGHT)
    margin = 0.8
    found = search(task, margin=margin)
    assert not found.plans
    assert found.nearest is not None
    assert needed_gib(found.nearest) > found.limit_gib
    more_room = re.search(r"--memory-margin ([\d.]+)", found.advice)
    assert more_room
    assert float(more_room[1]) < margin
    assert search(task, margin=float(more_room[1])).plans
    freed = re.findall(r"without (--[\w-]+)", found.advice)
    assert freed
    for flag in freed:
        dest = next(dest for dest in task.given if spelling_of(dest) == flag)
        assert search(task.without({dest}), margin=margin).plans, flag
    more = re.search(r"fit on (\d+) GPUs", found.advice)
    assert more
    assert search(replace(task, gpus=int(more[1])), margin=margin).plans


def test_the_argument_that_leaves_no_layout_is_named():
    task = task_of("dgx-h100", 16, BATCH + "--tensor-model-parallel-size 3")
    with pytest.raises(WorkloadError, match="--tensor-model-parallel-size 3") as raised:
        search(task, margin=0.1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--global-batch-size is missing"),
        (BATCH + "--rampup-batch-size 8 8 1000", "batch size that changes"),
        (BATCH + "--tensor-parallel-num-weight-shards 2", "weight shards"),
    ],
)
def test_tasks_that_are_none(arguments, words):
    with pytest.raises(WorkloadError, match=words):
        task_of("dgx-h100", 16, arguments)


def test_what_is_assumed_is_said():
    task = task_of("dgx-h100", 12, BATCH.replace("64", "72"))
    notes = search(task, margin=0.1).notes
    assert "12 GPUs are used: 1 whole nodes of 8, and 4 of another" in notes
    assert any("evenly loaded" in note for note in notes)
    part = task_of("dgx-h100", 4, BATCH + FEW + FULL)
    assert "4 of a node's 8 GPUs are used" in search(part, margin=0.1).notes
    wide = Task(
        read_arguments((MODEL.replace("--bf16 ", "") + BATCH + FEW + FULL).split()),
        16,
        load_platform("dgx-h100"),
    )
    assert any("training in fp32" in note for note in search(wide, margin=0.1).notes)


def test_a_plan_costs_what_the_estimate_of_its_command_says(outcome):
    task, found = outcome
    plan = found.plans[0]
    tokens = [*(MODEL + BATCH).split(), *plan.megatron_args]
    job = job_of(read_arguments(tokens).values, 16)
    again = estimate(job, task.platform)
    assert again.time.step_s == pytest.approx(plan.estimate.time.step_s, rel=1e-9)
    assert again.memory == plan.estimate.memory
