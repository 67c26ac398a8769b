"""The pipeline's schedule: who does what in which order, when, and how much is alive at once.

The orders are those of Megatron-Core 0.19.2 (`pipeline_parallel/`: schedules.py, combined_1f1b.py).
A rank's work is a list of slots. In each it runs a forward pass, a backward pass, or one of both,
of a "virtual micro-batch": the k-th forward or backward pass of the rank over all its chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from piper_megatron.errors import LayoutError
from piper_megatron.layout.job import Job

NOTHING = -1  # no virtual micro-batch
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
# seconds for each [PP][VPP]
ChunkTimes = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of the work on every rank of a pipeline.

    Attributes:
        pp: pipeline ranks.
        vpp: chunks of each; above 1 the schedule is interleaved.
        micro_batches: of a step.
        group: micro-batches that a chunk takes in a row before the next chunk's turn; None for PP.
        beside: the forward pass of a slot runs layer by layer beside the backward pass of another
            micro-batch (`--overlap-moe-expert-parallel-comm`).
        overlap_p2p: tensors of the steady phase travel behind the work (interleaved only).
        overlap_warmup_flush: those of the other phases too.

    Raises:
        LayoutError: micro-batches that Megatron's schedule refuses when training starts.
    """

    pp: int
    vpp: int = 1
    micro_batches: int
    group: int | None = None
    beside: bool = False
    overlap_p2p: bool = False
    overlap_warmup_flush: bool = False

    def __post_init__(self) -> None:
        if self.vpp == 1:
            return
        if not self.pp <= self.group_size <= self.micro_batches:
            raise LayoutError(
                f"interleaving needs PP {self.pp} <= {_GROUP} {self.group_size} <= "
                f"{self.micro_batches} micro-batches; raise --global-batch-size or lower PP or DP"
            )
        rest = self.micro_batches % self.group_size
        if 0 < rest < self.pp:
            raise LayoutError(
                f"{self.micro_batches} micro-batches in groups of {self.group_size} leave {rest}, "
                f"fewer than PP {self.pp}; choose a {_GROUP} that leaves none"
            )

    @property
    def group_size(self) -> int:
        """Micro-batches that a chunk takes in a row."""
        return self.pp if self.group is None else self.group

    @property
    def passes(self) -> int:
        """Forward passes of a rank in a step."""
        return self.vpp * self.micro_batches

    @cached_property
    def table(self) -> np.ndarray:
        """Micro-batch and chunk of every virtual micro-batch in forward order, [passes, 2].

        Backward passes go through the same table with the chunks reversed
        (`schedules.py:get_schedule_table`).
        """
        if self.vpp == 1:
            return np.stack([np.arange(self.passes), np.zeros(self.passes, int)], axis=1)
        rows = [
            (micro_batch, chunk)
            for start in range(0, self.micro_batches, self.group_size)
            for chunk in range(self.vpp)
            for micro_batch in range(start, min(start + self.group_size, self.micro_batches))
        ]
        return np.array(rows)

    @property
    def sends_after_both(self) -> bool:
        """Whether a slot's tensors travel when both its passes are done."""
        return self.vpp > 1 and not self.overlap_p2p

    def warmup(self, rank: int) -> int:
        """Forward passes before a rank's first backward slot.

        `schedules.py:get_pp_rank_microbatches`; without a pipeline `combined_1f1b.py`.
        """
        behind = self.pp - rank - 1
        if self.vpp == 1:
            passes = behind + (self.pp == 1 and self.beside)
        else:
            passes = 2 * behind + (self.vpp - 1) * self.group_size + self.beside
        return min(passes, self.passes)

    def slots(self, rank: int) -> np.ndarray:
        """Virtual micro-batches of a rank's slots, [slots, 2]: forward, backward, or `NOTHING`."""
        warmup = self.warmup(rank)
        count = self.passes + warmup
        forward = np.arange(count)
        forward[self.passes :] = NOTHING
        backward = np.arange(count) - warmup
        backward[:warmup] = NOTHING
        return np.stack([forward, backward], axis=1)

    def chunks(self, slots: np.ndarray) -> np.ndarray:
        """Chunk of every pass in `slots`, the same shape; `NOTHING` where there is none."""
        chunk = self.table[:, 1]
        forward, backward = slots.T
        return np.stack(
            [
                np.where(forward == NOTHING, NOTHING, chunk[forward]),
                np.where(backward == NOTHING, NOTHING, self.vpp - 1 - chunk[backward]),
            ],
            axis=1,
        )

    def live(self, rank: int) -> np.ndarray:
        """Micro-batches whose activations a rank holds, by chunk, at every moment that counts.

        The moments are the end of each slot's forward pass and the end of the slot. A pass beside
        another one gives back a layer for each layer that it saves, so the memory of such a slot is
        that of its beginning or its end and one layer more (`model_chunk_schedule_plan.py:run`).

        Returns:
            int array [moments, VPP].
        """
        chunks = self.chunks(self.slots(rank))
        saved, freed = (chunks[:, column, None] == np.arange(self.vpp) for column in (0, 1))
        ends = np.cumsum(saved.astype(int) - freed, axis=0)
        if self.beside:
            return ends
        return np.stack([ends + freed, ends], axis=1).reshape(-1, self.vpp)


def schedule_of(job: Job) -> Schedule:
    """The schedule that Megatron chooses for a job.

    Raises:
        LayoutError: as `Schedule`.
    """
    training = job.training
    return Schedule(
        pp=job.layout.pp,
        vpp=job.pipeline.vpp,
        micro_batches=int(job.sizes.micro_batches),
        group=training.microbatch_group_size_per_vp_stage,
        beside=training.overlap_moe_expert_parallel_comm,
        overlap_p2p=training.overlap_p2p_comm and job.pipeline.vpp > 1,
        overlap_warmup_flush=training.overlap_p2p_comm_warmup_flush,
    )


def in_flight(schedule: Schedule) -> np.ndarray:
    """Most micro-batches whose activations are alive at once, int array [PP, VPP].

    With `beside`, a rank holds one layer's activations more than these (see `Schedule.live`).
    """
    return np.array([schedule.live(rank).max(axis=0) for rank in range(schedule.pp)])


def peak_activation_bytes(schedule: Schedule, chunk_bytes: Sequence[Sequence[float]]) -> np.ndarray:
    """Largest sum over a rank's chunks of live micro-batches times bytes, float array [PP].

    Args:
        schedule: the order.
        chunk_bytes: [PP][VPP] bytes that one micro-batch keeps from forward to backward.
    """
    return np.array(
        [(schedule.live(r) @ np.asarray(chunk_bytes[r])).max() for r in range(schedule.pp)]
    )


@dataclass(frozen=True)
class Timeline:
    """When everything happens, seconds from the first pass's start.

    Attributes:
        schedule: what was simulated.
        forward_s, backward_s: start and end of every pass, [2, PP, VPP, micro-batches].
        wgrad_s: [PP, VPP], the end of each backward pass that computes weight gradients only.
        end_s: when a rank has done its last pass and sent its result, [PP].
        working_s: time in passes, [PP].
        sending_s: time in which nothing runs because a tensor is being sent, [PP].
        gathering_s: time in which nothing runs because parameters are being gathered, [PP].
    """

    schedule: Schedule
    forward_s: np.ndarray
    backward_s: np.ndarray
    wgrad_s: np.ndarray
    end_s: np.ndarray
    working_s: np.ndarray
    sending_s: np.ndarray
    gathering_s: np.ndarray

    @property
    def step_s(self) -> float:
        """Length of the pipeline's part of a step."""
        return float(self.end_s.max())

    @property
    def idle_s(self) -> np.ndarray:
        """Time in which a rank waits for another one, [PP]."""
        return self.step_s - self.working_s - self.sending_s - self.gathering_s


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the work on a micro-batch.

    Attributes:
        forward_s: [PP][VPP] of the forward pass of a chunk.
        backward_s: [PP][VPP] of its backward pass, with recomputation and weight gradients.
        p2p_s: [PP] of a tensor from rank p to p + 1 (from the last one to rank 0), or back.
        wgrad_s: [PP][VPP] of `backward_s`, what runs after the input's gradient has left; None for
            nothing.
        together_s: [PP][VPP][VPP] of a slot with the forward pass of one chunk beside the backward
            pass of another; needed when the schedule runs them so.
        gathered_s: [PP][VPP] when the gather of a chunk's parameters ends, before which its first
            forward pass does not end; None when nothing is awaited.
    """

    forward_s: ChunkTimes
    backward_s: ChunkTimes
    p2p_s: Sequence[float]
    wgrad_s: ChunkTimes | None = None
    together_s: Sequence[ChunkTimes] | None = None
    gathered_s: ChunkTimes | None = None


def simulate(schedule: Schedule, times: PassTimes) -> Timeline:
    """Plays the pipeline's part of a step.

    A pass starts when its rank is free and its input has arrived. A tensor leaves when the pass
    that makes it ends, takes its boundary's time, and does not wait for the receiver. A sender that
    does not overlap stands still meanwhile: after each pass, or in the interleaved steady phase
    after both passes of a slot, whose tensors go together. An overlapped forward send stands still
    too, since Megatron waits for it before it frees the tensor (`schedules.py:pp_post_forward`,
    0.18.2 and 0.19.2), except beside a backward pass, where a side stream does the waiting.
    """
    ranks = [_Rank(schedule, times, rank) for rank in range(schedule.pp)]
    for rank, this in enumerate(ranks):
        this.next, this.previous = ranks[(rank + 1) % schedule.pp], ranks[rank - 1]
    playing = [this.play() for this in ranks]
    while playing:
        # gradients go down the ranks, activations up
        playing = [work for work in playing if next(work, _DONE) is not _DONE][::-1]

    shape = (2, schedule.pp, schedule.vpp, schedule.micro_batches)
    no_wgrad = np.zeros(shape[1:3])
    return Timeline(
        schedule=schedule,
        forward_s=np.array([[r.forward_start, r.forward_end] for r in ranks])
        .swapaxes(0, 1)
        .reshape(shape),
        backward_s=np.array([[r.backward_start, r.backward_end] for r in ranks])
        .swapaxes(0, 1)
        .reshape(shape),
        wgrad_s=no_wgrad if times.wgrad_s is None else np.array(times.wgrad_s, float),
        end_s=np.array([r.now for r in ranks]),
        working_s=np.array([r.working for r in ranks]),
        sending_s=np.array([r.sending for r in ranks]),
        gathering_s=np.array([r.gathering for r in ranks]),
    )


_DONE = object()
_NOT_YET = -1.0


class _Rank:
    """A rank while the step is played.

    A pass of a chunk is numbered chunk * micro-batches + micro-batch.
    """

    next: "_Rank"
    previous: "_Rank"

    def __init__(self, schedule: Schedule, times: PassTimes, rank: int) -> None:
        self.schedule, self.times, self.rank = schedule, times, rank
        passes, count = schedule.passes, schedule.micro_batches
        # passes of the model's first and last chunk, whose tensors stay
        self.end_of_first = count if rank == 0 else 0
        self.begin_of_last = passes - count if rank == schedule.pp - 1 else passes
        self.forward_s = [seconds for seconds in times.forward_s[rank] for _ in range(count)]
        self.backward_s = [seconds for seconds in times.backward_s[rank] for _ in range(count)]
        self.activation_arrived, self.gradient_arrived = [_NOT_YET] * passes, [_NOT_YET] * passes
        if rank == 0:
            self.activation_arrived[: schedule.micro_batches] = [0.0] * schedule.micro_batches
        self.forward_start, self.forward_end = [0.0] * passes, [0.0] * passes
        self.backward_start, self.backward_end = [0.0] * passes, [0.0] * passes
        self.now = self.working = self.sending = self.gathering = 0.0

    def play(self) -> Iterator[None]:
        """Does the rank's work as far as its inputs have arrived; yields when one has not."""
        schedule = self.schedule
        for forward, backward in self._numbered_slots():
            both = forward != NOTHING and backward != NOTHING
            if both and (schedule.beside or schedule.sends_after_both):
                while self._missing(forward, backward):
                    yield
                if schedule.beside:
                    self._run_beside(forward, backward)
                else:
                    self._run_both(forward, backward)
                continue
            if forward != NOTHING:
                while self.activation_arrived[forward] == _NOT_YET:
                    yield
                self._run_forward(forward)
                self._hold(self._send_activation(forward, self.now))
            if backward != NOTHING:
                while self.gradient_arrived[backward] == _NOT_YET:
                    yield
                self._run_backward(backward)
                travel = self._send_gradient(backward, self.now)
                if not (schedule.overlap_p2p and (both or schedule.overlap_warmup_flush)):
                    self._hold(travel)

    def _numbered_slots(self) -> list[tuple[int, int]]:
        slots = self.schedule.slots(self.rank)
        chunks = self.schedule.chunks(slots)
        micro_batch = self.schedule.table[:, 0]
        numbers = np.where(
            slots == NOTHING, NOTHING, chunks * self.schedule.micro_batches + micro_batch[slots]
        )
        return list(zip(*numbers.T.tolist(), strict=True))

    def _missing(self, forward: int, backward: int) -> bool:
        """Whether a slot that receives both inputs before it begins cannot begin."""
        own_loss = backward >= self.begin_of_last
        return self.activation_arrived[forward] == _NOT_YET or (
            self.gradient_arrived[backward] == _NOT_YET and not own_loss
        )

    def _run_forward(self, number: int) -> None:
        spent = self.forward_s[number]
        start = max(self.now, self.activation_arrived[number])
        end = start + spent
        if self.times.gathered_s is not None and number % self.schedule.micro_batches == 0:
            chunk = number // self.schedule.micro_batches
            end = max(end, self.times.gathered_s[self.rank][chunk])
            self.gathering += end - start - spent
        self.forward_start[number], self.forward_end[number] = start, end
        self.working += spent
        self.now = end

    def _run_backward(self, number: int) -> None:
        spent = self.backward_s[number]
        start = max(self.now, self.gradient_arrived[number])
        self.now = start + spent
        self.backward_start[number], self.backward_end[number] = start, self.now
        self.working += spent

    def _run_both(self, forward: int, backward: int) -> None:
        """A forward pass, then a backward pass, then what both send, one after the other."""
        self.now = max(self.now, self.activation_arrived[forward], self.gradient_arrived[backward])
        self._run_forward(forward)
        if forward >= self.begin_of_last:
            self._send_activation(forward, self.now)
        self._run_backward(backward)
        if forward < self.begin_of_last:
            self._hold(self._send_activation(forward, self.now))
        self._hold(self._send_gradient(backward, self.now))

    def _run_beside(self, forward: int, backward: int) -> None:
        """A forward pass beside a backward pass."""
        assert self.times.together_s is not None, "passes side by side need their times"
        count = self.schedule.micro_batches
        spent = self.times.together_s[self.rank][forward // count][backward // count]
        start = max(self.now, self.activation_arrived[forward], self.gradient_arrived[backward])
        self.now = start + spent
        self.working += spent
        self.forward_start[forward], self.forward_end[forward] = start, self.now
        self.backward_start[backward], self.backward_end[backward] = start, self.now
        if self.schedule.overlap_p2p:
            tail = self.times.wgrad_s[self.rank][backward // count] if self.times.wgrad_s else 0.0
            self._send_activation(forward, self.now)
            self._send_gradient(backward, self.now - tail)
        else:
            self._hold(self._send_activation(forward, self.now))
            self._hold(self._send_gradient(backward, self.now))

    def _send_activation(self, number: int, leaves: float) -> float:
        """Sends what a forward pass made; the seconds that it travels."""
        if number >= self.begin_of_last:
            self.gradient_arrived[number] = leaves
            return 0.0
        wraps = self.rank == self.schedule.pp - 1
        travel = self.times.p2p_s[self.rank]
        received = number + self.schedule.micro_batches if wraps else number
        self.next.activation_arrived[received] = leaves + travel
        return travel

    def _send_gradient(self, number: int, leaves: float) -> float:
        """Sends what a backward pass made; the seconds that it travels."""
        if number < self.end_of_first:
            return 0.0
        wraps = self.rank == 0
        travel = self.times.p2p_s[self.rank - 1]
        received = number - self.schedule.micro_batches if wraps else number
        self.previous.gradient_arrived[received] = leaves + travel
        return travel

    def _hold(self, seconds: float) -> None:
        self.now += seconds
        self.sending += seconds
