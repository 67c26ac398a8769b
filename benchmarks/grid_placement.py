"""What a Piper grid and its placement gain on a cluster with slow links between hosts.

Trains one MoE model with Megatron on 2 hosts x 4 ranks of the cluster lab, whose launcher numbers
the ranks round-robin over the hosts, in three ways:

    pure EP    PP1 x EP8: all experts in one group over both hosts
    launcher   PP2 x EP4: expert groups as the rank numbers fall, hence over both hosts
    placed     PP2 x EP4 with --piper-placement auto: every expert group inside a host

The ways take turns, so that a noisy moment of the machine does not fall on one of them alone. A
round runs each once; gains are ratios of median step times within a round. Placement must not
change the training: `launcher` and `placed` have to print equal losses, to the last digit.

    python benchmarks/grid_placement.py [--rounds N] [--json FILE]
"""

import argparse
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from cluster_lab import ClusterLab, LabError, RankResult

HOSTS, RANKS_PER_HOST, ORDER = 2, 4, "round-robin"
WAYS = {
    "pure EP": ["--piper-grid", "1x8"],
    "launcher": ["--piper-grid", "2x4"],
    "placed": ["--piper-grid", "2x4", "--piper-placement", "auto"],
}
# name -> (slower way, faster way)
GAINS = {
    "grid over pure EP": ("pure EP", "placed"),
    "placement": ("launcher", "placed"),
}
WARM_UP_STEPS = 2
MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 256
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --transformer-impl local
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1024 --split 1,0,0
    --lr 1e-3 --lr-decay-style constant --seed 1234
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
"""


class BenchmarkError(RuntimeError):
    """A run failed, or its log is not what the benchmark expects."""


@dataclass(frozen=True)
class Training:
    """One run: seconds and printed loss of every step, warm-up included, and its traffic."""

    step_s: tuple[float, ...]
    losses: tuple[str, ...]
    crossed_mb: float

    @property
    def crossed_mb_per_step(self) -> float:
        """1e6 bytes that hosts sent to each other, the little traffic at the start included."""
        return self.crossed_mb / len(self.step_s)

    @property
    def median_step_s(self) -> float:
        """Median over the steps after warm-up."""
        return median(self.step_s[WARM_UP_STEPS:])


EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_moe.py"


def command(flags: Sequence[str], steps: int, script: Sequence[str] = (str(EXAMPLE),)) -> list[str]:
    """What every rank executes, with flags on top of the model's."""
    launcher = Path(sysconfig.get_path("scripts")) / "piper-megatron"
    return [
        *(str(launcher), "run", "--cpu", *script),
        *MODEL.split(),
        *("--train-iters", str(WARM_UP_STEPS + steps)),
        *flags,
    ]


def train(
    lab: ClusterLab, flags: Sequence[str], steps: int, timeout_s: float, order: str = ORDER
) -> Training:
    """Trains once.

    Args:
        lab: where.
        flags: on top of the model's.
        steps: after those of warm-up.
        timeout_s: for all of them.
        order: how the launcher numbers the ranks.

    Raises:
        BenchmarkError: with the output of the first rank that failed.
    """
    crossed_before = lab.crossed_bytes()
    results = lab.run(
        command(flags, steps), {"OMP_NUM_THREADS": "1"}, order=order, timeout_s=timeout_s
    )
    # those that the lab killed because another failed say nothing of the cause
    failed = sorted((r for r in results if r.returncode), key=lambda r: r.returncode < 0)
    if failed:
        raise BenchmarkError(
            f"{' '.join(flags)}: rank {failed[0].rank} ended with {failed[0].returncode}:\n"
            + failed[0].output[-4000:]
        )
    step_s, losses = read_log(results, WARM_UP_STEPS + steps)
    return Training(step_s, losses, (lab.crossed_bytes() - crossed_before) / 1e6)


def read_log(results: list[RankResult], steps: int) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Seconds and losses of all steps; Megatron's last rank prints them, wherever it was placed."""
    log = "".join(result.output for result in results)
    step_ms = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)
    losses = re.findall(r"lm loss: (\S+)", log)
    if not len(step_ms) == len(losses) == steps:
        raise BenchmarkError(f"expected {steps} steps in the log, found {len(step_ms)}:\n{log}")
    return tuple(float(ms) / 1e3 for ms in step_ms), tuple(losses)


def measure(rounds: int, steps: int, mbit: float, timeout_s: float) -> dict[str, list[Training]]:
    """Trains every way once a round; way -> one training per round."""
    trainings: dict[str, list[Training]] = {way: [] for way in WAYS}
    with ClusterLab(HOSTS, RANKS_PER_HOST, mbit) as lab:
        for number in range(rounds):
            for way, done in trainings.items():
                done.append(train(lab, WAYS[way], steps, timeout_s))
                print(
                    f"round {number + 1}/{rounds}  {way:<9} {done[-1].median_step_s:6.2f} s a step",
                    flush=True,
                    file=sys.stderr,
                )
    return trainings


def summarize(trainings: dict[str, list[Training]]) -> dict:
    """Medians with their range over the rounds, gains, and whether placement kept the losses."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": median(values), "min": min(values), "max": max(values)}

    medians = {way: [t.median_step_s for t in runs] for way, runs in trainings.items()}
    kept = {training.losses for way in ("launcher", "placed") for training in trainings[way]}
    return {
        "step_s": {way: spread(values) for way, values in medians.items()},
        "crossed_mb_per_step": {
            way: spread([t.crossed_mb_per_step for t in runs]) for way, runs in trainings.items()
        },
        "gains": {
            name: spread([s / f for s, f in zip(medians[slow], medians[fast], strict=True)])
            for name, (slow, fast) in GAINS.items()
        },
        "losses_equal_with_and_without_placement": len(kept) == 1,
    }


def report(summary: dict) -> str:
    """The summary for people."""
    lines = ["way                  s/step  (range over rounds)  MB/step between hosts"]
    for way, s in summary["step_s"].items():
        crossed = summary["crossed_mb_per_step"][way]["median"]
        spread = f"({s['min']:.2f} - {s['max']:.2f})"
        lines.append(f"  {way:<18} {s['median']:6.2f}  {spread:<19}  {crossed:8.1f}")
    lines.append("gain, median of the rounds (range)")
    for name, g in summary["gains"].items():
        lines.append(f"  {name:<18} {g['median']:5.2f}x  ({g['min']:.2f} - {g['max']:.2f})")
    equal = summary["losses_equal_with_and_without_placement"]
    lines.append(f"losses with and without placement: {'equal' if equal else 'DIFFERENT'}")
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 when placement changed the losses, 2 when the lab cannot be built."""
    parser = argparse.ArgumentParser(description="Step times of a Piper grid in the cluster lab.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way runs")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a host's link")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one run may take")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    started = datetime.now().astimezone()
    try:
        trainings = measure(arguments.rounds, arguments.steps, arguments.mbit, arguments.timeout)
    except LabError as error:
        print(f"grid_placement: {error}", file=sys.stderr)
        return 2
    except BenchmarkError as error:
        print(f"grid_placement: {error}", file=sys.stderr)
        return 1
    summary = summarize(trainings)
    print(report(summary))
    if arguments.json:
        result = {
            "benchmark": "grid_placement",
            "date": started.isoformat(timespec="seconds"),
            "cluster": {
                "hosts": HOSTS,
                "ranks_per_host": RANKS_PER_HOST,
                "mbit": arguments.mbit,
                "rank_order": ORDER,
            },
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "versions": {name: version(name) for name in ("torch", "megatron-core")},
            "model": " ".join(MODEL.split()),
            "ways": {way: " ".join(flags) for way, flags in WAYS.items()},
            "warm_up_steps": WARM_UP_STEPS,
            **summary,
            "trainings": {way: [asdict(t) for t in runs] for way, runs in trainings.items()},
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if summary["losses_equal_with_and_without_placement"] else 1


if __name__ == "__main__":
    sys.exit(main())
