"""Peak memory of every stage: what stays, what micro-batches in flight keep, and what runs.

Each phase of a step has a highest point of its own, and the peak is the largest of them, not their
sum. Forward and backward passes are followed through the very order of the schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.platform.accelerator import MemoryOverheads
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.activations.buffers import stage_buffers
from piper_megatron.resources.activations.chunk import ChunkActivations, chunk_activations
from piper_megatron.resources.activations.layer import ROUTED, Activations
from piper_megatron.resources.communicators import communicators_gib, needed_gib
from piper_megatron.resources.estimate import GIB, Memory, StageMemory
from piper_megatron.resources.schedule import NOTHING, Schedule, schedule_of
from piper_megatron.resources.states import StageStates, stage_states

FORWARD = "forward"
BOUNDARIES = "boundaries"
DISPATCH = "dispatch"
LAYERS = "layers"
LOGITS = "logits"
EMBEDDING = "embedding"
OPTIMIZER = "optimizer step"
LOAD = "load"
# pieces of a chunk, as `ChunkActivations.beyond` names them
_PHASES = {
    "layers": LAYERS,
    "mtp": "multi-token prediction",
    "head": LOGITS,
    "embedding": EMBEDDING,
    "forward": FORWARD,
}


@dataclass(frozen=True)
class _Moment:
    """The highest point of a phase.

    Attributes:
        live: micro-batches alive, [VPP].
        beyond_bytes: what runs, above what they keep.
        piece: what runs; None when nothing does.
    """

    live: np.ndarray
    beyond_bytes: float = 0.0
    piece: Activations | None = None


def memory(job: Job, platform: Platform, imbalance: float = 1.0) -> Memory:
    """Memory of the most loaded rank of every stage.

    Args:
        job: what is trained and how.
        platform: whose device it must fit.
        imbalance: rows on the most loaded expert rank over the mean.

    Raises:
        PlatformError: the platform does not describe its accelerator.
        LayoutError: the micro-batches cannot be scheduled.
    """
    device = platform.need_accelerator()
    schedule = schedule_of(job)
    known: dict = {}
    chunks = [
        [chunk_activations(job, chunk, imbalance=imbalance, known=known) for chunk in stage]
        for stage in job.pipeline.stages
    ]
    stages = tuple(
        _StageMemory(job, schedule, stage, states, chunks[stage], device.overheads).report()
        for stage, states in enumerate(
            stage_states(job, transposed_weights=device.transposes_8_bit)
        )
    )
    worst = max(stages, key=lambda stage: stage.peak_gib)
    return Memory(
        stages=stages,
        peak_gib=worst.peak_gib,
        worst_stage=worst.stage,
        capacity_gib=device.memory.capacity_gib,
        fits=all(stage.needed_gib <= device.memory.capacity_gib for stage in stages),
    )


class _StageMemory:
    """Finds the highest point of every phase on one stage."""

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        stage: int,
        states: StageStates,
        chunks: list[ChunkActivations],
        overheads: MemoryOverheads,
    ) -> None:
        self._job = job
        self._schedule = schedule
        self._stage = stage
        self._states = states
        self._overheads = overheads
        buffers = stage_buffers(job, stage, overheads.workspace_gib * GIB)
        self._buffers_bytes = float(sum(buffers.values()))
        self._chunks = chunks
        self._vpp = len(chunks)
        self._kept_bytes = np.array([float(chunk.total) for chunk in self._chunks])

    @property
    def _resident_bytes(self) -> float:
        return float(self._states.resident_bytes) + self._buffers_bytes

    def report(self) -> StageMemory:
        """The stage's row of an estimate."""
        moments = self._moments()
        peaks = {name: self._height(moment) for name, moment in moments.items()}
        peaks[OPTIMIZER] = self._resident_bytes + float(self._states.step_peak_bytes)
        peaks[LOAD] = self._resident_bytes + self._states.load_peak_bytes
        top = max(peaks, key=lambda name: peaks[name])
        outside_gib = float(communicators_gib(self._job.sizes, self._overheads))
        activations, logits, dispatch = self._composition(moments.get(top))
        states = self._states
        return StageMemory(
            stage=self._stage,
            weights_gib=float(states.weights_bytes + states.low_precision_bytes) / GIB,
            gradients_gib=float(states.gradients_bytes) / GIB,
            optimizer_gib=float(states.optimizer_bytes) / GIB,
            activations_gib=activations / GIB,
            logits_gib=logits / GIB,
            dispatch_gib=dispatch / GIB,
            buffers_gib=(self._buffers_bytes + states.router_bytes + float(states.gathered_bytes))
            / GIB,
            communicators_gib=outside_gib,
            needed_gib=float(needed_gib(peaks[top] / GIB, outside_gib)),
            resident_gib=self._resident_bytes / GIB,
            peak_gib=peaks[top] / GIB,
            reserved_gib=peaks[top] / GIB * self._overheads.reserved_ratio,
            peaks_gib={name: height / GIB for name, height in peaks.items()},
        )

    def _height(self, moment: _Moment) -> float:
        live_bytes = float(moment.live @ self._kept_bytes)
        return self._resident_bytes + live_bytes + moment.beyond_bytes

    def _moments(self) -> dict[str, _Moment]:
        """The highest moment of each phase of forward and backward passes."""
        highest: dict[str, _Moment] = {}
        for name, moment in self._candidates():
            if name not in highest or self._height(moment) > self._height(highest[name]):
                highest[name] = moment
        return highest

    def _candidates(self) -> Iterator[tuple[str, _Moment]]:
        """Every pass of the schedule, with what is alive when its pieces run."""
        schedule, stage = self._schedule, self._stage
        chunks = schedule.chunks(schedule.slots(stage))
        live = schedule.live(stage)
        risen = [self._risen(chunk) for chunk in self._chunks]
        ends = live if schedule.beside else live[1::2]
        before = np.vstack([np.zeros_like(ends[:1]), ends[:-1]])
        both = ends if schedule.beside else live[0::2]
        slots = np.unique(np.hstack([chunks, before, both, ends]), axis=0)
        if not schedule.beside:
            # of the slots with the same passes, the one with most alive is the highest
            fullest = slots[
                (slots[:, 2 + self._vpp : 2 + 2 * self._vpp] @ self._kept_bytes).argsort()
            ]
            slots = np.array(list({(row[0], row[1]): row for row in fullest}.values()))
        for forward, backward, *counts in slots:
            at_start, with_both, at_end = np.split(np.array(counts), 3)
            yield BOUNDARIES, _Moment(with_both)
            if forward != NOTHING:
                yield FORWARD, _Moment(with_both, *risen[forward][FORWARD])
            if backward == NOTHING:
                continue
            if not schedule.beside or forward == NOTHING:
                held = with_both if not schedule.beside else at_start
                yield from _backward(risen[backward], dict.fromkeys(_PHASES.values(), held))
            else:
                yield from self._side_by_side(risen, forward, backward, at_start, at_end)

    def _side_by_side(
        self,
        risen: list[dict[str, tuple[float, Activations]]],
        forward: int,
        backward: int,
        at_start: np.ndarray,
        at_end: np.ndarray,
    ) -> Iterator[tuple[str, _Moment]]:
        """A backward pass whose layers run beside those of a forward pass.

        Its head runs before the other pass begins, its embedding after that has ended. In between a
        layer is saved for each that is given back, and the working sets of both add up.
        """
        with_backward = at_end.copy()
        with_backward[backward] += 1
        held = dict.fromkeys(_PHASES.values(), at_start) | {EMBEDDING: with_backward}
        layers = [
            piece for name, piece in self._chunks[forward].pieces if name.startswith("layers")
        ]
        one_more = max((float(p.total + p.working_forward) for p in layers), default=0.0)
        for name, moment in _backward(risen[backward], held):
            beside_it = one_more if name in (LAYERS, DISPATCH) else 0.0
            yield name, replace(moment, beyond_bytes=moment.beyond_bytes + beside_it)

    def _risen(self, chunk: ChunkActivations) -> dict[str, tuple[float, Activations]]:
        """Bytes above what a chunk keeps, and the piece that runs, by phase."""
        risen = {}
        for name, (bytes, piece) in chunk.beyond().items():
            phase = _PHASES[name]
            if phase == LAYERS and any(
                piece.recomputed.get(p) or piece.saved.get(p) for p in ROUTED
            ):
                phase = DISPATCH
            risen[phase] = (float(bytes), piece)
        return risen

    def _composition(self, moment: _Moment | None) -> tuple[float, float, float]:
        """Bytes of activations, logits and dispatch at a moment."""
        if moment is None:
            return 0.0, 0.0, 0.0
        logits = routed = kept = 0.0
        for count, chunk in zip(moment.live, self._chunks, strict=True):
            saved = chunk.saved
            logits += count * float(saved.get(LOGITS, 0))
            routed += count * sum(float(saved.get(part, 0)) for part in ROUTED)
            kept += count * float(chunk.total)
        others = kept - logits - routed
        beyond, piece = moment.beyond_bytes, moment.piece
        if beyond < 0:  # pieces behind the one that runs backward are gone already
            left = 1 + beyond / kept
            return others * left, logits * left, routed * left
        if piece is not None and piece.saved.get(LOGITS):
            logits += beyond
        elif piece is not None and piece.routed:
            routed += beyond
        else:
            others += beyond
        return others, logits, routed


def _backward(
    risen: dict[str, tuple[float, Activations]], held: dict[str, np.ndarray]
) -> Iterator[tuple[str, _Moment]]:
    """The pieces of a backward pass, with what is alive when each runs."""
    for name, (bytes, piece) in risen.items():
        if name != FORWARD:
            yield name, _Moment(held[LAYERS if name == DISPATCH else name], bytes, piece)
