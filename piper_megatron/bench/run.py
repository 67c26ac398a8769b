"""Measures everything, point by point, and resumes where an earlier run stopped."""

import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_megatron import __version__
from piper_megatron.bench import collectives, kernels
from piper_megatron.bench.clock import Call, Clock, Timed
from piper_megatron.bench.dispatchers import build_dispatchers, round_trip, uniform_routing
from piper_megatron.bench.machine import (
    TIMEOUT,
    Levels,
    Machine,
    capacity_gib,
    device_name,
    machine,
)
from piper_megatron.bench.plan import (
    Effort,
    compute_points,
    dispatch_points,
    effort,
    link_points,
)
from piper_megatron.bench.points import Measured, Point, PointFile
from piper_megatron.bench.profile import Facts, Profile, assemble, rounded
from piper_megatron.errors import PiperError
from piper_megatron.platform.writer import platform_yaml
from piper_megatron.runtime.dispatch.groups import equal_shares, members_by_node, split_group
from piper_megatron.workload.dispatcher_flags import ALGORITHMS

Progress = Callable[[str, float], None]
_HIDDEN = {"cpu": 256, "cuda": 2048}
_STAGES = {"link": "network", "dispatch": "dispatchers"}


def bench(
    out: Path, *, quick: bool, source: str | None, name: str, progress: Progress | None
) -> Profile | None:
    """Measures the machine under this job and writes its platform file; called by all ranks.

    Args:
        out: platform file; finished points are in `points_path(out)`.
        quick: few points, within a minute.
        source: base platform; None for the one that is recognised.
        name: of the platform.
        progress: told the name of a stage and the share of it that is done, on rank 0.

    Returns:
        What was written, on rank 0; None on others.

    Raises:
        PiperError: there is no base platform for this device, or finished points are of another
            machine.
    """
    with machine(source, os.environ) as found:
        work = effort(quick=quick, gpu=found.device.type == "cuda")
        notes: list[str] = []
        points = _points(found, work, notes)
        session = _Session(found, work, points_path(out), notes)
        session.measure(points, progress)
        if session.file is None:
            return None
        when = datetime.now(UTC).date().isoformat()
        facts = Facts(
            name=name,
            origin=(
                f"piper-megatron {__version__} bench{' --quick' if quick else ''}, {when}, "
                f"{found.description}"
            ),
            device=device_name(found.device),
            capacity_gib=capacity_gib(found),
            context_gib=found.context_gib,
            nodes=len(set(found.hosts)),
            per_node=found.ranks_per_host,
        )
        profile = assemble(found.base, session.file.of(points), facts)
    platform = rounded(profile.platform)
    out.write_text(platform_yaml(platform), encoding="utf-8")
    return Profile(
        platform, profile.measured, profile.predicted, (*dict.fromkeys(notes), *profile.notes)
    )


def points_path(out: Path) -> Path:
    """The file of finished points beside a platform file."""
    return out.with_suffix(".points.jsonl")


def _points(found: Machine, work: Effort, notes: list[str]) -> list[Point]:
    gpu = found.device.type == "cuda"
    points = compute_points(work, gpu=gpu)
    for level, sizes in _measurable(found).items():
        points += link_points(work, found.base.levels[level].name, **sizes)
    kept = [each.name for i, each in enumerate(found.base.levels) if i not in _measurable(found)]
    if kept:
        notes.append(
            f"network level{'s' * (len(kept) > 1)} {', '.join(kept)}: not spanned by equal parts "
            f"of this job, as in {found.base.name}"
        )
    nodes = len(set(found.hosts))
    if found.context_gib is None:
        notes.append("Megatron is not installed: no dispatcher was measured, nor what it holds")
    elif nodes > 1 and equal_shares(members_by_node(found.hosts)):
        points += dispatch_points(work, found.world, nodes)
    return points


def _measurable(found: Machine) -> dict[int, dict[str, int]]:
    """Levels at which ranks of this job meet, with the sizes of `plan.link_points`."""
    sizes = {i: found.members(i) for i in range(len(found.base.levels))}
    return {i: each for i, each in sizes.items() if each["members"] > 1}


class _Session:
    """A measurement under way; on every rank, with the file on rank 0."""

    def __init__(self, found: Machine, work: Effort, path: Path, notes: list[str]) -> None:
        self.machine, self.work, self.notes = found, work, notes
        self.file: PointFile | None = None
        self.finished: dict[str, float] = {}
        self._levels: dict[str, Levels] = {}
        self._dispatchers: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._open(path)

    def _open(self, path: Path) -> None:
        """Opens the file on rank 0 and tells all ranks what is done, or what is wrong."""
        told: list[Any] = [None, None]
        if self.machine.rank == 0:
            try:
                self.file = PointFile(path, self.machine.description)
                told[0] = {key: each.seconds for key, each in self.file.measured.items()}
            except PiperError as error:
                told[1] = str(error)
        if self.machine.backend:
            dist.broadcast_object_list(told, device=self.machine.device)
        self.finished, wrong = told
        if wrong is not None:
            raise PiperError(wrong)

    def measure(self, points: Iterable[Point], progress: Progress | None) -> None:
        """All points that are not finished."""
        by_stage: dict[str, list[Point]] = {}
        for point in points:
            by_stage.setdefault(_STAGES.get(point.kind, "kernels"), []).append(point)
        too_long: set[tuple[str, ...]] = set()
        for stage, mine in by_stage.items():
            for number, point in enumerate(mine, start=1):
                if point.key not in self.finished and point.family not in too_long:
                    self._measure(point)
                if self.finished.get(point.key, 0.0) > self.work.longest_s:
                    too_long.add(point.family)
                if progress and self.machine.rank == 0:
                    progress(stage, number / len(mine))

    def _measure(self, point: Point) -> None:
        alone = point.kind not in _STAGES
        turn_s = self.work.compute_turn_s if alone else self.work.network_turn_s
        clock = Clock(self.machine.device, turn_s, self.work.turns, self.work.longest_s)
        call = self._prepared(point)
        if call is None:
            return
        timed = clock.alone(call) if alone else clock.together(call)
        self.finished[point.key] = timed.seconds
        if self.file is not None:
            self.file.add(_measured(point, timed))

    def _prepared(self, point: Point) -> Call | None:
        """The call of a point, made once to see that it works on all ranks; None where not."""
        call, why = None, ""
        try:
            call = self._call(point)
            if point.kind not in _STAGES:
                call()
        except (RuntimeError, NotImplementedError) as error:
            call, why = None, str(error).partition("\n")[0]
        works = torch.tensor([call is not None], dtype=torch.int32, device=self.machine.device)
        if self.machine.backend:
            dist.all_reduce(works, dist.ReduceOp.MIN)
        if not works:
            what = " ".join(filter(None, (point.kind, point.what, point.dtype)))
            self.notes.append(f"{what} cannot be measured here{f': {why}' if why else ''}")
            return None
        return call

    def _call(self, point: Point) -> Call:
        device = self.machine.device
        if point.kind == "link":
            return collectives.prepare(point, self._level(point.level), device)
        if point.kind == "dispatch":
            return self._dispatch(point)
        return kernels.prepare(point, device)

    def _level(self, name: str) -> Levels:
        if name not in self._levels:
            names = [level.name for level in self.machine.base.levels]
            self._levels[name] = self.machine.groups(names.index(name))
        return self._levels[name]

    def _dispatch(self, point: Point) -> Call:
        device = self.machine.device
        experts, topk = layer = point.size["experts"], point.size["topk"]
        hidden = _HIDDEN[device.type]
        if self._dispatchers is None or self._dispatchers[0] != layer:
            world = dist.group.WORLD
            assert world is not None, "points of dispatchers need several nodes"
            groups = split_group(world, self.machine.hosts, TIMEOUT)
            built = build_dispatchers(
                groups, ALGORITHMS, experts=experts, topk=topk, hidden=hidden, chunks=1
            )
            self._dispatchers = layer, built
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        tokens = max(point.size["bytes"] // (hidden * dtype.itemsize), 1)
        torch.manual_seed(1 + self.machine.rank)
        states = torch.randn(tokens, 1, hidden, dtype=dtype, device=device)
        routing = uniform_routing(tokens, experts, topk, device)
        dispatcher = self._dispatchers[1][point.what]

        def call() -> None:
            with torch.no_grad():
                round_trip(dispatcher, states, *routing)

        return call


def _measured(point: Point, timed: Timed) -> Measured:
    return Measured(
        point=point, seconds=timed.seconds, low=timed.low, high=timed.high, turns=timed.turns
    )
