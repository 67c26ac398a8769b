"""The layouts that the search looks into against the check, asked about one command at a time."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from piper_megatron.check.command import Command
from piper_megatron.check.run import judge
from piper_megatron.errors import LayoutError
from piper_megatron.layout.job import job_of
from piper_megatron.layout.pipeline import balanced_layout_string
from piper_megatron.platform.platform import load_platform
from piper_megatron.tuning import space as space_module
from piper_megatron.tuning.space import Space, divisors, layouts
from piper_megatron.tuning.task import AXES, Task
from piper_megatron.workload.arguments import read_arguments

FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "micro_batch": "--micro-batch-size",
}
COMMON = (
    "--hidden-size 768 --num-attention-heads 12 --seq-length 4096 --max-position-embeddings 4096 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --tokenizer-type NullTokenizer "
    "--lr 1e-4 --train-iters 5 --bf16 --attention-backend flash "
)
EXPERTS = (
    "--num-experts 24 --moe-router-topk 2 --moe-ffn-hidden-size 288 --moe-grouped-gemm "
    "--moe-layer-freq ([0]*1+[1]*11) --ffn-hidden-size 768 "
    "--moe-shared-expert-intermediate-size 96 --num-layers 12 --global-batch-size 96 "
)
# what users may fix, each with rules of its own
COMMANDS = {
    "dense": (
        "dgx-h100",
        48,
        "--num-layers 22 --ffn-hidden-size 768 --global-batch-size 96 "
        "--group-query-attention --num-query-groups 6",
    ),
    "experts": ("dgx-h100", 48, EXPERTS),
    "prediction on Frontier": ("frontier", 32, EXPERTS + "--mtp-num-layers 1"),
    "8 bits": (
        "dgx-h100",
        24,
        EXPERTS + "--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather",
    ),
    "overlapped exchange": (
        "gb200-nvl72",
        48,
        EXPERTS + "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ),
    "order of the ranks": ("dgx-a100", 48, EXPERTS + "--use-tp-pp-dp-mapping"),
    "a given split": (
        "dgx-h100",
        48,
        EXPERTS + "--decoder-first-pipeline-num-layers 2 --num-distributed-optimizer-instances 2",
    ),
    "layers a virtual stage": (
        "dgx-h100",
        48,
        EXPERTS + "--num-layers-per-virtual-pipeline-stage 2 --overlap-grad-reduce",
    ),
    "a given text": (
        "dgx-h100",
        16,
        EXPERTS + "--pipeline-model-parallel-layout Et|(tt|)*5t|L",
    ),
    "full recomputation": (
        "dgx-h100",
        16,
        EXPERTS
        + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
        "--tensor-model-parallel-size 2 --no-overlap-p2p-communication --moe-shared-expert-overlap",
    ),
    "local attention": (
        "dgx-h100",
        16,
        EXPERTS.replace("--moe-grouped-gemm", "") + "--transformer-impl local",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_legal_candidates_are_those_that_the_check_accepts(name):
    platform, gpus, arguments = COMMANDS[name]
    given = (COMMON + arguments).split()
    task = Task(read_arguments(given), gpus, load_platform(platform))
    space = layouts(task)
    assert len(space)
    known = known_layouts(space)
    rng = random.Random(name)
    seen = {True: 0, False: 0}
    for sizes in candidates(task, space, rng, 60):
        places = {name: rng.randrange(len(choices)) for name, choices in space.settings.items()}
        if not within_bounds(task, space, sizes, places):
            continue
        row = known.get(tuple(sizes.values()))
        legal = row is not None and bool(space.allowed(places)[row])
        findings = refusals(task, space, given, sizes, places)
        assert legal == (not findings), f"{sizes} {places} {findings}"
        seen[legal] += 1
    assert min(seen.values()) >= 10


def known_layouts(space: Space) -> dict[tuple[int, ...], int]:
    columns = [getattr(space.sizes, axis) for axis in (*AXES, "vpp")]
    return {tuple(map(int, row)): i for i, row in enumerate(zip(*columns, strict=True))}


def candidates(task: Task, space: Space, rng: random.Random, count: int) -> Iterator[dict]:
    """Legal layouts, and each again with one other size."""
    rows = list(known_layouts(space))
    axes = (*AXES, "vpp")
    fixed = {axis for axis, dest in AXES.items() if dest in task.given}
    if task.model.experts is None:
        fixed |= {"ep", "etp"}
    for _ in range(count):
        sizes = dict(zip(axes, rng.choice(rows), strict=True))
        yield sizes
        axis = rng.choice([axis for axis in axes if axis not in fixed])
        other = [1, 2, 3, 4] if axis in ("vpp", "micro_batch") else divisors(task.gpus)
        changed = sizes | {axis: rng.choice(other)}
        if task.model.experts is None:
            changed["etp"] = changed["tp"]
        yield changed


def within_bounds(task: Task, space: Space, sizes: dict, places: dict) -> bool:
    """What the search leaves out although Megatron takes it is none of this test's business."""
    columns = {axis: np.array([size]) for axis, size in sizes.items()}
    bounds = [bound for some in space_module._bounds(task).values() for bound in some]
    useful = space_module._useful(task, space.settings, columns)
    return all(fits(columns).all() for _, fits in bounds) and not any(
        verdict.of(places).any() for verdict in useful
    )


def refusals(task: Task, space: Space, given: list[str], sizes: dict, places: dict) -> list[str]:
    """Why the check or the reading of the command says no."""
    tokens = list(given)
    for axis, flag in FLAGS.items():
        if flag in given or (task.model.experts is None and axis in ("ep", "etp")):
            continue
        tokens += [flag, str(sizes[axis])]
    if sizes["tp"] > 1:
        tokens.append("--sequence-parallel")
    try:
        tokens += split(given, task.model.layers, task.model.mtp_layers, sizes)
    except LayoutError as error:
        return [str(error)]
    for name, place in places.items():
        tokens += space.settings[name][place].tokens
    arguments = read_arguments(tokens)
    assert not arguments.unknown
    command = Command(arguments.values, arguments.given, task.gpus, (), task.platform)
    found = [finding.id for finding in judge(command) if finding.severity == "error"]
    if not found:
        job = job_of(arguments.values, task.gpus)
        assert job.pipeline.vpp == sizes["vpp"]
    return found


def split(given: list[str], layers: int, mtp: int, sizes: dict) -> list[str]:
    """Virtual stages, or a layout text where the layers do not divide."""
    pp, vpp = sizes["pp"], sizes["vpp"]
    if any(
        flag.startswith(("--pipeline-model-parallel-layout", "--num-layers-per")) for flag in given
    ):
        return []
    if "--decoder-first-pipeline-num-layers" in given or layers % (pp * vpp) == 0:
        return ["--num-virtual-stages-per-pipeline-rank", str(vpp)] if vpp > 1 else []
    return ["--pipeline-model-parallel-layout", balanced_layout_string(layers, pp, vpp, mtp)]
