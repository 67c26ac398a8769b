"""What the ways of the token dispatcher cost on a cluster with slow links between hosts.

    python benchmarks/dispatcher_lab.py moe      dispatch and combine of one MoE layer
    python benchmarks/dispatcher_lab.py table    equal-split exchanges, by size
    python benchmarks/dispatcher_lab.py train    a training step, against Megatron's alltoall

Sides of a comparison run in one job and take turns (in `train`, one job after the other); figures
are medians of the slowest rank's times. Messages are counted where they are posted, bytes between
hosts by the hosts' interfaces, headers included. `dispatcher_probe.py` is what the ranks run.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from cluster_lab import ClusterLab, LabError
from grid_placement import MODEL, BenchmarkError, Training, train

from piper_megatron.platform.dispatch_profile import DispatchProfile

TIMEOUT_S = 3600
MOE_LAYOUTS = ((4, 2), (2, 4))  # hosts, ranks on each
TABLE_LAYOUTS = ((2, 4), (4, 2), (4, 4))
LAYER = {"experts": 64, "topk": 8, "hidden": 1024, "tokens": 256}
MOE_WAYS = ("megatron", "flat", "2dh", "halo", "rail", "rbd")
ONCE_A_HOST = ("rail", "rbd")
TABLE_WAYS = ("flat", "2dh", "halo")
PAIR_BYTES = tuple(1024 * 4**i for i in range(7))
# of a cell of the table, in each pass; what a message costs beside its bytes
CELL_S, LATENCY_S = 6.0, 3e-3
REPEATS, CALLS_TURN_S, MOST_CALLS = (3, 25), 0.02, 5
TRAIN_WAYS: dict[str, list[str]] = {
    "megatron": ["--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "8"],
    "auto": ["--piper-grid", "1x8", "--piper-dispatcher", "auto"],
}


def probe(lab: ClusterLab, task: str, **work: Any) -> Any:
    """What the ranks of a lab measured.

    Raises:
        BenchmarkError: with the output of the first rank that failed.
    """
    script = str(Path(__file__).with_name("dispatcher_probe.py"))
    results = lab.run(
        [sys.executable, "-W", "ignore", script, json.dumps({"task": task, **work})],
        {"OMP_NUM_THREADS": "1"},
        timeout_s=TIMEOUT_S,
    )
    # those that the lab killed because another failed say nothing of the cause
    failed = sorted((r for r in results if r.returncode), key=lambda r: r.returncode < 0)
    if failed:
        raise BenchmarkError(
            f"rank {failed[0].rank} ended with {failed[0].returncode}:\n{failed[0].output[-4000:]}"
        )
    return json.loads(results[0].output.splitlines()[-1])


def measure_moe(
    lab: ClusterLab, ways: Sequence[str], layer: dict[str, int], repeats: int
) -> dict[str, Any]:
    """Dispatch and combine of a layer; ratios to Megatron's own, and what rows allow.

    Args:
        lab: where.
        ways: Piper's algorithms, `megatron` first.
        layer: see `dispatcher_probe.moe`.
        repeats: turns of each way.
    """
    measured = probe(lab, "moe", algorithms=ways, layer=layer, repeats=repeats, chunks=1)
    rows = measured["rows"]
    medians = {name: median(way["seconds"]) for name, way in measured["ways"].items()}
    bound = rows["once_an_expert"] / rows["once_a_host"]
    return {
        "hosts": len(lab.hosts),
        "ranks_per_host": lab.ranks_per_host,
        "rows_between_hosts": rows,
        "bound": bound,
        "ways": {
            name: {
                **way,
                "median_s": medians[name],
                "gain": medians["megatron"] / medians[name],
                "gain_over_flat": medians["flat"] / medians[name],
                "bound": bound if name in ONCE_A_HOST else 1.0,
            }
            for name, way in measured["ways"].items()
        },
    }


def report_moe(result: dict[str, Any]) -> str:
    """A measurement for people."""
    lines = [
        f"{result['hosts']} hosts x {result['ranks_per_host']}: rows between hosts "
        f"{result['rows_between_hosts']['once_an_expert']:,}, once a host "
        f"{result['rows_between_hosts']['once_a_host']:,}, bound {result['bound']:.2f}",
        "            ms  (range)          gain  over flat  of bound  messages between, inside"
        "  MB between",
    ]
    for name, way in result["ways"].items():
        low, high = (1e3 * edge(way["seconds"]) for edge in (min, max))
        lines.append(
            f"  {name:<9}{1e3 * way['median_s']:6.0f}  ({low:.0f} - {high:.0f})".ljust(31)
            + f"{way['gain']:6.2f}  {way['gain_over_flat']:9.2f}"
            + f"  {way['gain_over_flat'] / way['bound']:8.2f}"
            + f"{way['messages_between']:17d}, {way['messages_inside']:<4d}"
            + f"{way['crossed_bytes'] / 1e6:14.1f}"
        )
    return "\n".join(lines)


def measure_table(lab: ClusterLab) -> tuple[list[dict[str, Any]], DispatchProfile]:
    """All sizes, in two passes: the first chooses for `auto`, the second judges the choice."""
    cells = [plan_cell(lab, pair_bytes) for pair_bytes in PAIR_BYTES]
    passes = probe(lab, "table", algorithms=TABLE_WAYS, cells=[*cells, *cells], chunks=1)
    first, second = passes[: len(cells)], passes[len(cells) :]
    profile = profile_of(lab, PAIR_BYTES, first)
    judged = [
        judge(profile, pair_bytes, ways)
        for pair_bytes, ways in zip(PAIR_BYTES, second, strict=True)
    ]
    return judged, profile


def profile_of(
    lab: ClusterLab, pair_bytes: Sequence[int], cells: Sequence[dict[str, Any]]
) -> DispatchProfile:
    """Cells of one layout, as a platform file has them."""
    ranks = len(lab.hosts) * lab.ranks_per_host
    return DispatchProfile(
        nodes=len(lab.hosts),
        per_node=lab.ranks_per_host,
        # every token to all ranks
        experts=ranks,
        topk=ranks,
        token_bytes=tuple(pair_bytes),
        # there and back
        seconds={
            name: tuple(2 * median(cell[name]["seconds"]) for cell in cells) for name in TABLE_WAYS
        },
        evidence="measured",
        source=f"benchmarks/dispatcher_lab.py table --mbit {lab.mbit:g}, torch {version('torch')}",
    )


def plan_cell(lab: ClusterLab, pair_bytes: int) -> dict[str, int]:
    """How often a cell is measured: more often where it is short and noisy."""
    pairs = lab.ranks_per_host**2 * (len(lab.hosts) - 1)
    expected_s = LATENCY_S + pairs * pair_bytes * 8 / (lab.mbit * 1e6)
    calls = max(1, min(MOST_CALLS, round(CALLS_TURN_S / expected_s)))
    repeats = round(CELL_S / (len(TABLE_WAYS) * calls * expected_s))
    fewest, most = REPEATS
    return {"pair_bytes": pair_bytes, "calls": calls, "repeats": max(fewest, min(most, repeats))}


def judge(profile: DispatchProfile, pair_bytes: int, ways: dict[str, Any]) -> dict[str, Any]:
    """One cell of the second pass.

    Args:
        profile: of the first.
        pair_bytes: size of the cell.
        ways: what was measured now.
    """
    medians = {name: median(way["seconds"]) for name, way in ways.items()}
    measured_before = profile.at(pair_bytes)
    assert measured_before is not None
    choice = min(measured_before, key=measured_before.__getitem__)
    return {
        "hosts": profile.nodes,
        "ranks_per_host": profile.per_node,
        "pair_bytes": pair_bytes,
        "median_s": medians,
        "over_flat": {name: medians[name] / medians["flat"] for name in medians},
        "auto": choice,
        "auto_over_best": medians[choice] / min(medians.values()),
        "ways": ways,
    }


def report_table(cells: list[dict[str, Any]]) -> str:
    """Cells of one layout for people."""
    messages = ", ".join(f"{name} {count_messages(name, cells)}" for name in TABLE_WAYS)
    lines = [
        f"{cells[0]['hosts']} hosts x {cells[0]['ranks_per_host']}; messages between + inside "
        f"hosts: {messages}",
        "  a pair    flat ms  2dh / flat  halo / flat  auto  / best  MB between (flat, 2dh, halo)",
    ]
    for cell in cells:
        crossed = ", ".join(f"{w['crossed_bytes'] / 1e6:.2f}" for w in cell["ways"].values())
        lines.append(
            f"  {size(cell['pair_bytes']):<8}{1e3 * cell['median_s']['flat']:9.2f}"
            f"{cell['over_flat']['2dh']:12.2f}{cell['over_flat']['halo']:13.2f}"
            f"  {cell['auto']:<5}{cell['auto_over_best']:7.2f}  {crossed}"
        )
    return "\n".join(lines)


def count_messages(name: str, cells: list[dict[str, Any]]) -> str:
    """Messages between + inside hosts, and where that changes with the size."""
    texts: list[str] = []
    last = None
    for cell in cells:
        way = cell["ways"][name]
        now = f"{way['messages_between']} + {way['messages_inside']}"
        if now != last:
            texts.append(f"from {size(cell['pair_bytes'])} {now}" if texts else now)
        last = now
    return "; ".join(texts)


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def measure_training(lab: ClusterLab, rounds: int, steps: int) -> dict[str, Any]:
    """Trains both ways once a round."""
    trainings: dict[str, list[Training]] = {way: [] for way in TRAIN_WAYS}
    for number in range(rounds):
        for way, flags in TRAIN_WAYS.items():
            trainings[way].append(train(lab, flags, steps, TIMEOUT_S, order="block"))
            print(
                f"round {number + 1}/{rounds}  {way:<9}"
                f"{trainings[way][-1].median_step_s:6.2f} s a step",
                flush=True,
                file=sys.stderr,
            )
    gains = [
        old.median_step_s / new.median_step_s
        for old, new in zip(trainings["megatron"], trainings["auto"], strict=True)
    ]
    differences = [
        abs(float(a) / float(b) - 1)
        for old, new in zip(trainings["megatron"], trainings["auto"], strict=True)
        for a, b in zip(old.losses, new.losses, strict=True)
    ]
    return {
        "model": " ".join(MODEL.split()),
        "ways": TRAIN_WAYS,
        "gains": gains,
        "gain": median(gains),
        "largest_difference_of_losses": max(differences),
        "trainings": {way: [asdict(t) for t in runs] for way, runs in trainings.items()},
        "step_s": {way: [t.median_step_s for t in runs] for way, runs in trainings.items()},
        "crossed_mb_per_step": {
            way: median(t.crossed_mb_per_step for t in runs) for way, runs in trainings.items()
        },
    }


def report_training(result: dict[str, Any]) -> str:
    """A measurement for people."""
    lines = ["way           s/step  (range over rounds)  MB/step between hosts"]
    for way, steps in result["step_s"].items():
        spread = f"({min(steps):.2f} - {max(steps):.2f})"
        crossed = result["crossed_mb_per_step"][way]
        lines.append(f"  {way:<11}{median(steps):7.2f}  {spread:<19}  {crossed:8.1f}")
    gains = result["gains"]
    lines.append(f"gain {result['gain']:.2f}x  ({min(gains):.2f} - {max(gains):.2f})")
    lines.append(
        f"losses differ by {result['largest_difference_of_losses']:.1e} of their value at most"
    )
    return "\n".join(lines)


def run_moe(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All layouts."""
    results = []
    for hosts, ranks_per_host in MOE_LAYOUTS:
        with ClusterLab(hosts, ranks_per_host, arguments.mbit) as lab:
            results.append(measure_moe(lab, MOE_WAYS, LAYER, arguments.repeats))
        print(report_moe(results[-1]), flush=True)
    return results


def run_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All layouts."""
    results, profiles = [], []
    for hosts, ranks_per_host in TABLE_LAYOUTS:
        with ClusterLab(hosts, ranks_per_host, arguments.mbit) as lab:
            cells, profile = measure_table(lab)
        print(report_table(cells), flush=True)
        results += cells
        profiles.append(profile.model_dump(mode="json", exclude_none=True))
    if arguments.save:
        arguments.save.write_text(yaml.safe_dump({"dispatch": profiles}, sort_keys=False))
    return results


def run_training(arguments: argparse.Namespace) -> dict[str, Any]:
    """2 hosts x 4."""
    with ClusterLab(2, 4, arguments.mbit) as lab:
        result = measure_training(lab, arguments.rounds, arguments.steps)
    print(report_training(result), flush=True)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The token dispatcher in the cluster lab.")
    commands = parser.add_subparsers(required=True, dest="benchmark")

    def add(name: str, call: Callable, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about)
        command.add_argument("--mbit", type=float, default=200.0, help="rate of a host's link")
        command.add_argument("--json", type=Path, help="file for the result")
        command.set_defaults(call=call)
        return command

    moe = add("moe", run_moe, "dispatch and combine of one MoE layer")
    moe.add_argument("--repeats", type=int, default=15, help="turns of each way")
    table = add("table", run_table, "equal-split exchanges, by size")
    table.add_argument("--save", type=Path, help="file for the times, a part of a platform file")
    training = add("train", run_training, "a training step, against Megatron's alltoall")
    training.add_argument("--rounds", type=int, default=3, help="how often each way runs")
    training.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    return parser


def main() -> int:
    """Exit code 1 when a run fails, 2 when the lab cannot be built."""
    arguments = _parser().parse_args()
    started = datetime.now().astimezone()
    try:
        result = arguments.call(arguments)
    except LabError as error:
        print(f"dispatcher_lab: {error}", file=sys.stderr)
        return 2
    except BenchmarkError as error:
        print(f"dispatcher_lab: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        record = {
            "benchmark": f"dispatcher_lab {arguments.benchmark}",
            "date": started.isoformat(timespec="seconds"),
            "mbit": arguments.mbit,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "versions": {name: version(name) for name in ("torch", "megatron-core")},
            "result": result,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
