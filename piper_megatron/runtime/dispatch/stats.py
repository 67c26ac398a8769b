"""What the dispatcher sends: counted on every rank, summed and logged at Megatron's log interval.

The hops of a layer's exchange count into the layer's `LayerRecorder`, from numbers that the host
knows anyway, and mark start and end with events that nobody waits for before the log interval.
Without `--piper-dispatcher-stats` there are no recorders.
"""

import json
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

FILE_NAME = "piper_dispatcher_stats.jsonl"
DIRECTIONS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
INSIDE, BETWEEN, WHOLE = "inside the node", "between nodes", "over the expert group"
HOPS = (BETWEEN, INSIDE, WHOLE)
# sums since the last logged iteration; of the first three, inside the node and between nodes
ROWS, BYTES, MESSAGES, MS, FIELDS = 0, 2, 4, 6, 7


@dataclass(frozen=True)
class HopStatistics:
    """One hop in one direction: sums of an iteration over the ranks that hold the layer.

    Attributes:
        hop: one of `HOPS`.
        rows_in_node: rows of hidden states, or of their gradients, sent to other ranks of the
            sender's node; what a rank keeps does not count.
        rows_between_nodes: rows sent to ranks of other nodes.
        bytes_in_node: of the rows, probabilities and routing bits sent inside the node.
        bytes_between_nodes: the same, to other nodes.
        messages_in_node: messages to other ranks of the sender's node.
        messages_between_nodes: messages to ranks of other nodes.
        ms_mean: milliseconds from the start of the hop's messages to their arrival, mean of the
            ranks; messages that are under way at once all count.
        ms_max: of the slowest rank.
    """

    hop: str
    rows_in_node: float
    rows_between_nodes: float
    bytes_in_node: float
    bytes_between_nodes: float
    messages_in_node: float
    messages_between_nodes: float
    ms_mean: float
    ms_max: float


@dataclass(frozen=True)
class DirectionStatistics:
    """One direction of one layer, of an iteration.

    Attributes:
        direction: one of `DIRECTIONS`.
        ms_mean: milliseconds from start to end, mean of the ranks.
        ms_max: of the slowest rank.
        hops: what ran.
    """

    direction: str
    ms_mean: float
    ms_max: float
    hops: tuple[HopStatistics, ...]


@dataclass(frozen=True)
class LayerStatistics:
    """One layer: sums of an iteration over the ranks that hold it.

    Attributes:
        layer: Megatron's number, from 1 over the whole model; `mtp_1`, ... for MTP layers.
        algorithm: what the last rank's group runs.
        ranks: how many hold the layer.
        routed_rows_between_nodes: (token, expert) pairs whose expert is on another node.
        redundancy_removed: share of them that dispatch does not send between nodes; None without
            any.
        directions: what ran.
    """

    layer: str
    algorithm: str
    ranks: int
    routed_rows_between_nodes: float
    redundancy_removed: float | None
    directions: tuple[DirectionStatistics, ...]


Stop = Callable[[], None]


def nothing() -> None:
    """Ends what nobody times."""


class LayerRecorder:
    """Counts what one rank sends for one layer. Evaluation is left out."""

    def __init__(self, layer: Any, algorithm: str) -> None:
        """Args:
        layer: Megatron's MoELayer; its number is read late, since Megatron sets it late.
        algorithm: what the layer's exchange runs.
        """
        self.algorithm = algorithm
        # [direction, whole and hops, field]
        self.sums = np.zeros((len(DIRECTIONS), 1 + len(HOPS), FIELDS))
        self.routed_rows_between_nodes = 0
        self._layer = layer
        self._direction: int | None = None
        self._stopwatch = _Stopwatch()
        _recorders.add(self)

    @property
    def place(self) -> tuple[bool, int]:
        """Sorts layers as the model runs them: whether it is an MTP layer, then its number."""
        return self._layer.is_mtp_layer, self._layer.layer_number

    @property
    def label(self) -> str:
        """The layer's name in the log."""
        is_mtp_layer, number = self.place
        return f"mtp_{number}" if is_mtp_layer else str(number)

    def record_routed(self, rows_between_nodes: int) -> None:
        """Counts the (token, expert) pairs of a dispatch whose expert is on another node."""
        if self._layer.training:
            self.routed_rows_between_nodes += rows_between_nodes

    def during(self, direction: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what its hops send counted for one of `DIRECTIONS`."""

        def recorded(*args: Any) -> Any:
            if not self._layer.training:
                return function(*args)
            self._direction = DIRECTIONS.index(direction)
            try:
                with self._stopwatch.span(self.sums[self._direction, 0, MS:]):
                    return function(*args)
            finally:
                self._direction = None

        return recorded

    def start(self, hop: str, rows: torch.Tensor, messages: Iterable[tuple[int, bool]]) -> Stop:
        """Counts messages of a hop to other ranks, and times them until the result is called.

        Args:
            hop: one of `HOPS`.
            rows: [..., H] hidden states or their gradients; anything else counts as bytes alone.
            messages: how many of the rows each has, and whether it goes to another node.
        """
        if self._direction is None:
            return nothing
        sums = self.sums[self._direction, 1 + HOPS.index(hop)]
        is_hidden = rows.dim() > 1 and rows.is_floating_point()
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        for count, between_nodes in messages:
            sums[ROWS + between_nodes] += count * is_hidden
            sums[BYTES + between_nodes] += count * row_bytes
            sums[MESSAGES + between_nodes] += 1
        return self._stopwatch.start(sums[MS:])

    def take(self) -> np.ndarray:
        """The sums, then the routed rows, in one array; counting starts anew.

        Waits for the device to pass the last event.
        """
        self._stopwatch.finish()
        taken = np.append(self.sums.ravel(), self.routed_rows_between_nodes)
        self.sums[:] = 0
        self.routed_rows_between_nodes = 0
        return taken


class _Stopwatch:
    """Times spans on the device's clock; on the CPU backend its stand-in reads the host's.

    Events are read when the device has passed them and then used again, so a long log interval
    neither waits nor piles up events.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, np.ndarray]] = deque()

    def start(self, sum_ms: np.ndarray) -> Stop:
        """Adds the time until what is returned is called to `sum_ms` [1], some time later."""
        start, end = self._idle.pop() if self._idle else (_event(), _event())
        start.record()

        def stop() -> None:
            end.record()
            self._running.append((start, end, sum_ms))
            while self._running and self._running[0][1].query():
                self._read_oldest()

        return stop

    @contextmanager
    def span(self, sum_ms: np.ndarray) -> Iterator[None]:
        """Adds the time between enter and exit to `sum_ms` [1], some time later."""
        stop = self.start(sum_ms)
        yield
        stop()

    def finish(self) -> None:
        """Waits for all spans."""
        while self._running:
            self._running[0][1].synchronize()
            self._read_oldest()

    def _read_oldest(self) -> None:
        start, end, sum_ms = self._running.popleft()
        sum_ms += start.elapsed_time(end)
        self._idle.append((start, end))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


# the dispatchers own the recorders
_recorders: "weakref.WeakSet[LayerRecorder]" = weakref.WeakSet()
_iterations = 0


def log_iteration(iteration: int) -> None:
    """Logs the interval that ends with an iteration, if one does; to be called after each.

    Collective over all ranks at the log interval.
    """
    global _iterations
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    if args.piper_dispatcher_stats is None:
        return
    _iterations += 1
    if iteration % args.log_interval:
        return
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    layers = summarize(stage, _iterations)
    _iterations = 0
    stages = _gather_on_last_rank(layers, parallel_state.get_pipeline_model_parallel_group())
    if stages is not None:
        _write(iteration, [layer for stage_layers in stages for layer in stage_layers], args)


def summarize(stage: dist.ProcessGroup, iterations: int) -> list[LayerStatistics]:
    """Statistics of this process's layers; counting starts anew. Collective over the group.

    Args:
        stage: the ranks that hold the same layers.
        iterations: how many went by since the last call.
    """
    recorders = sorted(_recorders, key=lambda recorder: recorder.place)
    if not recorders:
        return []
    taken = np.stack([recorder.take() for recorder in recorders]) / iterations
    total = torch.from_numpy(taken).to("cuda")
    most = total.clone()
    dist.all_reduce(total, group=stage)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=stage)
    return [
        _layer_statistics(recorder, *sums, ranks=stage.size())
        for recorder, sums in zip(
            recorders, zip(total.cpu().numpy(), most.cpu().numpy(), strict=True), strict=True
        )
    ]


def _layer_statistics(
    recorder: LayerRecorder, total: np.ndarray, most: np.ndarray, ranks: int
) -> LayerStatistics:
    shape = recorder.sums.shape
    directions = tuple(
        DirectionStatistics(
            direction=direction,
            ms_mean=float(sums[0, MS]) / ranks,
            ms_max=float(maxima[0, MS]),
            hops=tuple(
                _hop_statistics(hop, sums[1 + h], ranks, maxima[1 + h, MS])
                for h, hop in enumerate(HOPS)
                if sums[1 + h].any()
            ),
        )
        for direction, sums, maxima in zip(
            DIRECTIONS, total[:-1].reshape(shape), most[:-1].reshape(shape), strict=True
        )
        if sums.any()
    )
    routed = float(total[-1])
    sent = float(total[:-1].reshape(shape)[0, 1:, ROWS + 1].sum())
    return LayerStatistics(
        layer=recorder.label,
        algorithm=recorder.algorithm,
        ranks=ranks,
        routed_rows_between_nodes=routed,
        redundancy_removed=1 - sent / routed if routed else None,
        directions=directions,
    )


def _hop_statistics(hop: str, total: np.ndarray, ranks: int, slowest_ms: float) -> HopStatistics:
    rows, size_bytes, messages = (total[i : i + 2].tolist() for i in (ROWS, BYTES, MESSAGES))
    return HopStatistics(
        hop=hop,
        rows_in_node=rows[0],
        rows_between_nodes=rows[1],
        bytes_in_node=size_bytes[0],
        bytes_between_nodes=size_bytes[1],
        messages_in_node=messages[0],
        messages_between_nodes=messages[1],
        ms_mean=float(total[MS]) / ranks,
        ms_max=float(slowest_ms),
    )


def _gather_on_last_rank(
    layers: list[LayerStatistics], pipeline: dist.ProcessGroup
) -> list[list[LayerStatistics]] | None:
    """Layers of all stages, on the last rank of the job, which has Megatron's writers."""
    last = dist.get_world_size() - 1
    if last not in dist.get_process_group_ranks(pipeline):
        return None
    is_last = dist.get_rank() == last
    stages: list[Any] | None = [None] * pipeline.size() if is_last else None
    dist.gather_object(layers, stages, dst=last, group=pipeline)
    return stages


def _write(iteration: int, layers: list[LayerStatistics], args: Any) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    folder = Path(args.save or args.tensorboard_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE_NAME).open("a") as file:
        for layer in layers:
            print(json.dumps({"iteration": iteration, **asdict(layer)}), file=file)
    named = dict(pair for layer in layers for pair in _scalars(layer))
    if (writer := get_tensorboard_writer()) is not None:
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if (wandb_writer := get_wandb_writer()) is not None:
        wandb_writer.log(named, iteration)


def _scalars(layer: LayerStatistics) -> Iterator[tuple[str, float]]:
    prefix = f"piper_dispatcher/layer_{layer.layer}"
    if layer.redundancy_removed is not None:
        yield f"{prefix}/redundancy_removed", layer.redundancy_removed
    for direction in layer.directions:
        yield f"{prefix}/{direction.direction}/ms_mean", direction.ms_mean
        yield f"{prefix}/{direction.direction}/ms_max", direction.ms_max
        for hop in direction.hops:
            name = f"{prefix}/{direction.direction}/{hop.hop.replace(' ', '_')}"
            for quantity, value in asdict(hop).items():
                if quantity != "hop":
                    yield f"{name}/{quantity}", value
