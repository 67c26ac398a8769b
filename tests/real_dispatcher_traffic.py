"""What a MoE layer with one of Piper's dispatchers asks of torch.distributed and of the device.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from real_dispatchers import (
    TIMEOUT,
    Problem,
    Variant,
    build_layer,
    differences,
    start,
    train,
    with_dispatcher,
)

MEGATRONS = "Megatron's own"


class Collective(NamedTuple):
    """One collective of a rank.

    Attributes:
        operation: torch's name.
        group: what the group is for.
        ranks: its members.
        sent: rows for each member, of an all-to-all.
        received: rows from each member, of an all-to-all.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Message(NamedTuple):
    """A message of a rank to another, or from it.

    Attributes:
        operation: `send` or `recv_`.
        group: what the group is for.
        peer: the other rank.
        tag: of the batch.
        size_bytes: of the rows.
    """

    operation: str
    group: str
    peer: int
    tag: int
    size_bytes: int


Trace = list[Collective | Message]


def traces_of_all(problems: list[Problem]) -> list[dict[str, Trace]]:
    """Of every problem and variant, and of Megatron's own dispatcher, on this rank."""
    import torch.distributed as dist

    _apply_recall()
    traces = []
    for problem in problems:
        groups = start(problem.layout)
        layer = build_layer(problem)
        layers = {str(v): with_dispatcher(layer, v, groups) for v in problem.variants}
        traces.append(
            {name: _trace(each, problem) for name, each in {MEGATRONS: layer, **layers}.items()}
        )
    dist.barrier()  # rank 0 takes the store with it
    return traces


def _apply_recall() -> None:
    """The plug-in's hook, with which a recomputation asks nobody again."""
    from piper_megatron.runtime.hooks import HookSet
    from piper_megatron.runtime.register import HOOKS

    HookSet("recall").apply([hook for hook in HOOKS if hook.id == "dispatcher.recall"])


def _trace(layer: Any, problem: Problem) -> Trace:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    trace: Trace = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                trace.append(_event(func._schema, args))
            return func(*args, **(kwargs or {}))

    def _event(schema: Any, args: tuple[Any, ...]) -> Collective | Message:
        operation = schema.name.removeprefix("c10d::")
        group = next(
            dist.ProcessGroup.unbox(value)
            for value, argument in zip(args, schema.arguments, strict=False)
            if argument.name == "process_group"
        )
        ranks = tuple(dist.get_process_group_ranks(group))
        if operation in ("send", "recv_"):
            ((rows,), _, peer, tag) = args
            return Message(operation, group.group_desc, ranks[peer], tag, rows.nbytes)
        splits: list[tuple[int, ...]] = []
        if operation == "alltoall_base_":
            received, sent, _, received_splits, sent_splits, *_ = args
            for rows, given in ((sent, sent_splits), (received, received_splits)):
                splits.append(tuple(given) or (len(rows) // len(ranks),) * len(ranks))
        return Collective(operation, group.group_desc, ranks, *splits)

    with Recorder():
        train(layer, problem)
    return trace


@dataclass
class HostCopies:
    """What of a layer's run waited for the device.

    Attributes:
        differences: of the results to a run in which nothing is late.
        synchronizations: waits for the copy to the host.
        other: what else would have waited.
    """

    differences: dict[str, float]
    synchronizations: int = 0
    other: Counter = field(default_factory=Counter)


def host_copies_of_all(problems: list[Problem]) -> list[dict[str, HostCopies]]:
    """Of every problem and variant, and of Megatron's own dispatcher, with late copies to the host.

    What Megatron's function copies to the host holds garbage until the event of the copy is waited
    for.
    """
    import torch.distributed as dist

    found = []
    for problem in problems:
        groups = start(problem.layout)
        layer = build_layer(problem)
        truth = train(layer, problem)
        layers = {str(v): with_dispatcher(layer, v, groups) for v in problem.variants}
        found.append({})
        for name, each in {MEGATRONS: layer, **layers}.items():
            copies = found[-1][name] = HostCopies({})
            with _late_copies(copies), _waits_seen(copies):
                result = train(each, problem)
            copies.differences = differences(truth, result)
    dist.barrier()  # rank 0 takes the store with it
    return found


@contextmanager
def _late_copies(copies: HostCopies) -> Iterator[None]:
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    from piper_megatron.runtime.cpu.streams import Event
    from piper_megatron.runtime.dispatch import dispatcher

    under_way: list[tuple[Any, Any]] = []

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        host = torch.full_like(tensor, -1).as_subclass(_on_host())
        under_way.append((host, tensor))
        return host.numpy() if as_numpy else host

    def synchronize(_event: Event) -> None:
        copies.synchronizations += 1
        for host, tensor in under_way:
            host.copy_(tensor)
        under_way.clear()

    with (
        patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", move),
        patch.object(dispatcher, "maybe_move_tensor_to_cpu", move),
        patch.object(Event, "synchronize", synchronize),
    ):
        yield


@cache
def _on_host() -> type:
    """Tensors that the host may look at, and what is computed from them."""
    import torch

    return type("OnHost", (torch.Tensor,), {})


_METHODS = ("item", "tolist", "numpy", "cpu", "__int__", "__bool__", "__float__", "__index__")
# operations whose result has a shape, or is a number, that only the device knows
_OPERATIONS = (
    "nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "equal", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave.Tensor", "bincount",
)  # fmt: skip


@contextmanager
def _waits_seen(copies: HostCopies) -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def counted(name: str, method: Callable) -> Callable:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, _on_host()):
                copies.other[name] += 1
            return method(tensor, *args, **kwargs)

        return call

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func).removeprefix("aten.").removesuffix(".default")
            by_mask = name == "index.Tensor" and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            )
            if by_mask or (name in _OPERATIONS and not isinstance(args[0], _on_host())):
                copies.other[name] += 1
            return func(*args, **(kwargs or {}))

    methods = {name: getattr(torch.Tensor, name) for name in _METHODS}
    for name, method in methods.items():
        setattr(torch.Tensor, name, counted(name, method))
    with Operations():
        yield
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)


def rows_sent(problems: list[Problem]) -> list[dict[str, np.ndarray]]:
    """Rows that this rank sends with each variant: [4 directions, 2], inside nodes and between.

    Directions are those of `stats.DIRECTIONS`.
    """
    import torch.distributed as dist

    from piper_megatron.runtime.dispatch.stats import ROWS, LayerRecorder

    results = []
    for problem in problems:
        groups = start(problem.layout)
        layer = build_layer(problem)
        rows = {}
        for variant in problem.variants:
            recorder = LayerRecorder(layer, variant.algorithm)
            train(with_dispatcher(layer, variant, groups, recorder=recorder), problem)
            rows[str(variant)] = recorder.sums[:, 1:, ROWS : ROWS + 2].sum(1)
        results.append(rows)
    dist.barrier()  # rank 0 takes the store with it
    return results


def lose_a_peer(
    problem: Problem,
    variant: Variant,
    lost: int,
    phase: str,
    timeout_s: float | None,
    farewells: Path,
) -> str:
    """What this rank's layer raises when another rank gets lost.

    Args:
        problem: with a layer that is told to be the seventh.
        variant: its dispatcher.
        lost: the rank.
        phase: method of the dispatcher that it does not get through.
        timeout_s: of the node and rail groups; the rank then hangs until the others have given up.
            None for a rank that ends.
        farewells: folder for a file from each rank that has given up.
    """
    import torch.distributed as dist

    groups = start(problem.layout, timedelta(seconds=timeout_s) if timeout_s else TIMEOUT)
    layer = with_dispatcher(build_layer(problem), variant, groups, where="layer 7")
    others = dist.get_world_size() - 1

    def get_lost(*_args: Any, **_kwargs: Any) -> None:
        while timeout_s is not None and len(list(farewells.iterdir())) < others:
            time.sleep(0.05)
        os._exit(0)

    if dist.get_rank() == lost:
        setattr(layer.token_dispatcher, phase, get_lost)
    try:
        train(layer, problem)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        (farewells / str(dist.get_rank())).touch()
    return ""
