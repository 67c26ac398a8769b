"""How fast the resource model is: layouts a second, and the start of the commands.

    python benchmarks/model_speed.py

Every legal layout of a model is evaluated once (`resources.evaluate`), by one process and by two.
Commands are timed as whole processes, the shortest of several runs.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from piper_megatron.layout.sizes import Sizes
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.evaluate import evaluate
from piper_megatron.workload.arguments import read_arguments
from piper_megatron.workload.presets import preset_arguments
from piper_megatron.workload.reading import effective, model_spec, training_spec
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# preset, ranks, sequences of a step, sequences of a micro-batch
SEARCHES = (
    ("deepseek-v3", 2048, 16384, (1, 2, 4, 8)),
    ("qwen3-235b-a22b", 1024, 8192, (1, 2, 4, 8, 16)),
    ("mixtral-8x22b", 512, 4096, (1, 2, 4, 8, 16)),
)
SEQ = 4096
TRAINING = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--moe-grouped-gemm --moe-permute-fusion --use-flash-attn "
    "--moe-token-dispatcher-type alltoall "
    "--recompute-granularity selective --recompute-modules moe_act"
)
COMMANDS = {
    "--help": ["--help"],
    "estimate": (
        "estimate --platform dgx-h100 --gpus 256 --model deepseek-v3 -- "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 "
        "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --sequence-parallel "
        "--pipeline-model-parallel-layout Et|(tt|)*30mL "
        "--micro-batch-size 1 --global-batch-size 4096 --seq-length 4096 " + TRAINING
    ).split(),
}


def workload(preset: str, world: int) -> tuple[ModelSpec, TrainingSpec]:
    """A model with the settings that all its layouts share."""
    batch = f"--micro-batch-size 1 --global-batch-size {world} --seq-length {SEQ}"
    arguments = read_arguments([*preset_arguments(preset), *batch.split(), *TRAINING.split()])
    values = effective(arguments.values, world)
    changes = {"sequence_parallel": True, "overlap_p2p_comm": True}
    return model_spec(values), training_spec(values).model_copy(update=changes)


def legal_layouts(
    model: ModelSpec, world: int, batch: int, micro_batches: tuple[int, ...]
) -> Sizes:
    """Every combination of parallel sizes that divides as it must."""
    assert model.experts is not None
    powers = 2 ** np.arange(10)
    columns = np.array(
        list(
            itertools.product(
                powers[:4], powers[:4], powers[:6], powers, powers[:4], range(1, 9), micro_batches
            )
        )
    ).T
    tp, cp, pp, ep, etp, vpp, micro_batch = columns
    replicas = world // (tp * cp * pp)
    count = batch // np.maximum(micro_batch * replicas, 1)
    legal = (world % (tp * cp * pp) == 0) & (world % (ep * etp * pp) == 0) & (replicas > 0)
    legal &= (model.experts.count % ep == 0) & (etp <= tp)
    legal &= (model.attention.latent is not None) | (model.attention.groups % tp == 0)
    legal &= (batch % np.maximum(micro_batch * replicas, 1) == 0) & (pp * vpp <= model.layers)
    legal &= (vpp == 1) | ((pp > 1) & (count >= pp) & (count % pp == 0))
    names = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
    chosen = dict(zip(names, columns[:, legal], strict=True))
    return Sizes(world=world, global_batch=batch, seq=SEQ, **chosen)


def search(preset: str, world: int, batch: int, micro_batches: tuple[int, ...]) -> tuple[int, int]:
    """Evaluates all layouts; how many there are, and how many fit."""
    model, training = workload(preset, world)
    sizes = legal_layouts(model, world, batch, micro_batches)
    found = evaluate(model, training, sizes, load_platform("dgx-h100"))
    return len(found.step_s), int(found.feasible.sum())


def shortest_run_s(command: list[str], repeats: int) -> float:
    """Wall-clock time of a whole process, its bytecode compiled as after any first run."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "piper_megatron.cli.main", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    total = 0
    print(f"{'model':18} {'ranks':>6} {'layouts':>8} {'fit':>7} {'a second':>9}")
    for each in SEARCHES:
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            count, fitting = search(*each)
            times.append(time.perf_counter() - begun)
        rate = count / min(times)
        print(f"{each[0]:18} {each[1]:6,} {count:8,} {fitting:7,} {rate:9,.0f}")
        total += count
    with ProcessPoolExecutor(2) as pool:
        jobs = SEARCHES * (2 * repeats)
        for future in [pool.submit(search, *each) for each in SEARCHES * 2]:
            future.result()  # imports and platform files are read once
        begun = time.perf_counter()
        for future in [pool.submit(search, *each) for each in jobs]:
            future.result()
        spent = time.perf_counter() - begun
    print(f"two processes: {2 * repeats * total / spent:,.0f} layouts a second")
    for name, command in COMMANDS.items():
        print(f"{name:10} {shortest_run_s(command, repeats):.2f} s")


if __name__ == "__main__":
    main()
