"""Fits the kernel efficiency of each platform's software stacks to published runs.

For every run the efficiency that gives its measured step; for a stack the median of its model
families' medians, drawn towards that of the platform when few families ran on it; for a platform
the median over its families, which becomes its default. No run has a constant of its own.

    python tools/fit_stacks.py [PLATFORM ...]
"""

import sys
from collections import defaultdict
from math import exp, log
from statistics import median

import numpy as np

from piper_megatron.layout.job import job_of
from piper_megatron.platform.accelerator import Stack
from piper_megatron.platform.platform import Platform, load_platform
from piper_megatron.resources.step import step_time
from piper_megatron.validation.replay import NATURAL_IMBALANCE, replay
from piper_megatron.validation.runs import Run, read_runs
from piper_megatron.workload.arguments import read_arguments

EFFICIENCIES = np.geomspace(0.4, 1.6, 9)


def with_efficiency(platform: Platform, efficiency: float) -> Platform:
    """The platform with one software stack alone."""
    stack = Stack(name="trial", efficiency=efficiency, evidence="fitted", source="trial")
    accelerator = platform.need_accelerator().model_copy(update={"stacks": (stack,)})
    return platform.model_copy(update={"accelerator": accelerator})


def efficiency_of(run: Run, measured_s: float) -> float | None:
    """The efficiency at which a run is predicted to take as long as it did.

    None where no efficiency of kernels explains it: the host, the network or what is not published
    of the run decides its time.
    """
    platform = load_platform(run.platform)
    assert run.ranks is not None
    job = job_of(read_arguments(run.megatron_args).values, run.ranks)
    imbalance = NATURAL_IMBALANCE if run.routing == "natural" else 1.0
    steps = [
        step_time(job, with_efficiency(platform, each), imbalance=imbalance).step_s
        for each in EFFICIENCIES
    ]
    # steps fall as the efficiency grows
    if not steps[-1] < measured_s < steps[0]:
        return None
    return exp(np.interp(-log(measured_s), -np.log(steps), np.log(EFFICIENCIES)))


def by_family(found: list[tuple[str, float]]) -> float:
    """Median over families, so that a much measured family counts once."""
    families = defaultdict(list)
    for family, efficiency in found:
        families[family].append(log(efficiency))
    return median(median(each) for each in families.values())


def main(names: list[str]) -> None:
    """Prints one line for each stack."""
    runs = {run.id: run for run in read_runs()}
    found: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for timed in replay(runs.values()).timed:
        if not names or timed.platform in names:
            efficiency = efficiency_of(runs[timed.run], timed.measured_s)
            if efficiency is not None:
                found[timed.platform][timed.stack].append((timed.family, efficiency))
    for platform, stacks in found.items():
        centre = by_family([each for stack in stacks.values() for each in stack])
        print(f"{platform:14} {'(default)':12} {exp(centre):.2f}")
        for name, each in stacks.items():
            families = len({family for family, _ in each})
            weight = families / (families + 1)
            drawn = weight * by_family(each) + (1 - weight) * centre
            spread = " ".join(f"{efficiency:.2f}" for _, efficiency in sorted(each))
            print(f"{platform:14} {name:12} {exp(drawn):.2f}   {families} families: {spread}")


if __name__ == "__main__":
    main(sys.argv[1:])
