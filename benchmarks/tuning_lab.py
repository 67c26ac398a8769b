"""The whole way on a small cluster: measure it, tune for it, train what was predicted.

On 2 hosts x 4 ranks of the cluster lab, ranks numbered host by host:

1. `piper-megatron bench --quick` by all ranks at once. They share the machine's cores, and are
   measured while all of them compute.
2. The search of `tune` for the model of `grid_placement.py` (4 layers, hidden 256, 16 experts,
   top-4), nothing but model and batch fixed.
3. The tuner's choice and other legal layouts are trained, in turns, several rounds. Step times are
   medians of the rounds' medians.
4. Memory of the rank that holds most: the resident set of its process, against what the estimate
   says that a rank needs; and, in one more run of each layout, bytes of tensors alive at a time,
   against the predicted peak.

    python benchmarks/tuning_lab.py [--rounds N] [--profile FILE] [--json FILE]
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cluster_lab import ClusterLab, LabError, RankResult
from grid_placement import EXAMPLE, MODEL, WARM_UP_STEPS, BenchmarkError, command, read_log
from measured_training import MARK

from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import Platform, load_platform
from piper_megatron.resources.estimate import Estimate, estimate
from piper_megatron.tuning.limit import default_margin
from piper_megatron.tuning.search import search
from piper_megatron.tuning.task import Task
from piper_megatron.workload.arguments import read_arguments

HOSTS, RANKS_PER_HOST = 2, 4
GPUS = HOSTS * RANKS_PER_HOST
TUNED = "tuned"
SHARDED = ["--use-distributed-optimizer"]
_SIZES = {"TP": "tensor-model", "CP": "context", "PP": "pipeline-model", "EP": "expert-model"}


def layout(sizes: str, *more: str) -> list[str]:
    """Arguments of sizes such as `PP2 EP4`."""
    flags = [*SHARDED, *more]
    for size in sizes.split():
        flags += [f"--{_SIZES[size[:2]]}-parallel-size", size[2:]]
    return flags


LAYOUTS: dict[str, list[str]] = {
    "EP8": layout("EP8"),
    "EP4": layout("EP4"),
    "EP1": layout("EP1"),
    "PP2 EP4": layout("PP2 EP4"),
    "PP2 EP4, 2 sequences": layout("PP2 EP4", "--micro-batch-size", "2"),
    "PP2 EP1": layout("PP2 EP1"),
    "PP4 EP2": layout("PP4 EP2"),
    "PP4 EP1": layout("PP4 EP1"),
    "TP2 PP2 EP4": layout(
        "TP2 PP2 EP4", "--sequence-parallel", "--expert-tensor-parallel-size", "1"
    ),
    "TP4 EP8": layout("TP4 EP8", "--sequence-parallel", "--expert-tensor-parallel-size", "1"),
    "CP2 EP4": layout("CP2 EP4"),
    "EP8, recomputed": layout(
        "EP8",
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ),
}
TIMEOUT_S = 1200.0


@dataclass
class Run:
    """A layout: what is predicted of it, and what was measured."""

    flags: list[str]
    predicted: Estimate
    rounds_s: list[float]
    tensors_gib: float = 0.0
    process_gib: float = 0.0

    @property
    def step_s(self) -> float:
        """Measured."""
        return median(self.rounds_s)

    @property
    def needed_gib(self) -> float:
        """Predicted, with what a process holds beside its tensors."""
        return max(stage.needed_gib for stage in self.predicted.memory.stages)


def measure_machine(lab: ClusterLab, path: Path) -> str:
    """Writes the lab's platform file; returns the report."""
    results = lab.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "piper_megatron", "bench", "--quick"),
            *("--platform", "cpu-lab", "--name", "lab", "--out", str(path)),
        ],
        {"OMP_NUM_THREADS": "1"},
        timeout_s=TIMEOUT_S,
    )
    check(results, "bench")
    return results[0].output


def check(results: Sequence[RankResult], what: str) -> None:
    """Raises `BenchmarkError` with the output of the first rank that failed."""
    failed = sorted((r for r in results if r.returncode), key=lambda r: r.returncode < 0)
    if failed:
        raise BenchmarkError(f"{what}: rank {failed[0].rank}:\n{failed[0].output[-4000:]}")


def tuned(lab_platform: Platform) -> Run:
    """The best plan."""
    task = Task(read_arguments(MODEL.split()), GPUS, lab_platform, None, 1.0)
    outcome = search(task, margin=default_margin(lab_platform), top=1, processes=2)
    plan = outcome.plans[0]
    return Run(list(plan.megatron_args), plan.estimate, [])


def predict(lab_platform: Platform, flags: Sequence[str]) -> Estimate:
    """Of a layout."""
    job = job_of(read_arguments([*MODEL.split(), *flags]).values, GPUS)
    return estimate(job, lab_platform)


def train(
    lab: ClusterLab, flags: Sequence[str], steps: int, what: str
) -> tuple[list[float], float]:
    """Seconds of the steps after those of warm-up, and GiB of the rank that holds most.

    Args:
        lab: where.
        flags: on top of the model's.
        steps: after those of warm-up.
        what: whose memory, see `measured_training.py`.
    """
    script = [str(Path(__file__).with_name("measured_training.py")), what, str(EXAMPLE)]
    argv = command(flags, steps, script)
    results = lab.run(argv, {"OMP_NUM_THREADS": "1"}, order="block", timeout_s=TIMEOUT_S)
    check(results, " ".join(flags))
    held = re.findall(rf"{MARK} \d+: ([\d.]+)", "".join(r.output for r in results))
    if len(held) != GPUS:
        raise BenchmarkError(f"{len(held)} of {GPUS} ranks told their memory")
    step_s, _ = read_log(results, WARM_UP_STEPS + steps)
    return list(step_s[WARM_UP_STEPS:]), max(map(float, held))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; no two values are equal."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def summarize(runs: dict[str, Run]) -> dict[str, Any]:
    """The figures that are asked for."""
    best = min(runs, key=lambda name: runs[name].step_s)
    memory = {
        "tensors": [run.predicted.memory.peak_gib / run.tensors_gib - 1 for run in runs.values()],
        "process": [run.needed_gib / run.process_gib - 1 for run in runs.values()],
    }
    return {
        "spearman": rank_correlation(
            [run.predicted.time.step_s for run in runs.values()],
            [run.step_s for run in runs.values()],
        ),
        "best": best,
        "tuned_over_best": runs[TUNED].step_s / runs[best].step_s,
        "worst_memory_error": {name: max(errors, key=abs) for name, errors in memory.items()},
        "layouts": {
            name: {
                "flags": run.flags,
                "predicted_s": run.predicted.time.step_s,
                "parts": run.predicted.time.parts,
                "measured_s": run.step_s,
                "rounds_s": run.rounds_s,
                "predicted_gib": run.predicted.memory.peak_gib,
                "tensors_gib": run.tensors_gib,
                "needed_gib": run.needed_gib,
                "process_gib": run.process_gib,
            }
            for name, run in runs.items()
        },
    }


def report(runs: dict[str, Run], summary: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{'':<24}   seconds of a step             GiB of tensors      GiB of the process",
        f"{'layout':<24}predicted  measured (range)    predicted measured  predicted measured",
    ]
    for name, run in sorted(runs.items(), key=lambda item: item[1].step_s):
        spread = f"({min(run.rounds_s):.2f} - {max(run.rounds_s):.2f})"
        lines.append(
            f"{name:<24}{run.predicted.time.step_s:9.2f}  {run.step_s:8.2f} {spread:<15}"
            f"{run.predicted.memory.peak_gib:8.3f} {run.tensors_gib:8.3f}"
            f"{run.needed_gib:11.3f} {run.process_gib:8.3f}"
        )
    worst = summary["worst_memory_error"]
    lines += [
        f"Spearman correlation of step times: {summary['spearman']:.2f}",
        f"the tuner's choice takes {summary['tuned_over_best']:.2f} of the best, {summary['best']}",
        f"worst error of peak memory: tensors {worst['tensors']:+.1%}, "
        f"process {worst['process']:+.1%}",
    ]
    return "\n".join(lines)


def run_lab(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Run], str]:
    """All four steps."""
    with ClusterLab(HOSTS, RANKS_PER_HOST, arguments.mbit) as lab:
        path = arguments.profile or folder / "lab.yaml"
        if not path.exists():
            began = time.monotonic()
            print(measure_machine(lab, path), flush=True)
            print(f"bench --quick took {time.monotonic() - began:.0f} s", flush=True)
        measured = load_platform(str(path))
        runs = {TUNED: tuned(measured)}
        print(f"tuned: {' '.join(runs[TUNED].flags)}", flush=True)
        runs |= {name: Run(flags, predict(measured, flags), []) for name, flags in LAYOUTS.items()}
        for number in range(arguments.rounds):
            for name, run in runs.items():
                step_s, run.process_gib = train(lab, run.flags, arguments.steps, "process")
                run.rounds_s.append(median(step_s))
                print(
                    f"round {number + 1}/{arguments.rounds}  {name:<22} {run.rounds_s[-1]:6.2f} s "
                    f"a step, predicted {run.predicted.time.step_s:.2f}",
                    file=sys.stderr,
                    flush=True,
                )
        for run in runs.values():
            _, run.tensors_gib = train(lab, run.flags, 0, "tensors")
    return runs, path.read_text()


def main() -> int:
    """Exit code 1 when a run fails, 2 when the lab cannot be built."""
    parser = argparse.ArgumentParser(description="Predicted and measured layouts in the lab.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each layout runs")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a host's link")
    parser.add_argument(
        "--profile", type=Path, help="platform file of the lab; measured unless it is there"
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    started = datetime.now().astimezone()
    try:
        with TemporaryDirectory() as folder:
            runs, profile = run_lab(arguments, Path(folder))
    except LabError as error:
        print(f"tuning_lab: {error}", file=sys.stderr)
        return 2
    except BenchmarkError as error:
        print(f"tuning_lab: {error}", file=sys.stderr)
        return 1
    summary = summarize(runs)
    print(report(runs, summary))
    if arguments.json:
        record = {
            "benchmark": "tuning_lab",
            "date": started.isoformat(timespec="seconds"),
            "mbit": arguments.mbit,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "versions": {name: version(name) for name in ("torch", "megatron-core")},
            "profile": profile,
            **summary,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
