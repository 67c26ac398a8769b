"""A tape of tensors and operations, and what it says of memory.

A layer is written down once, as the operations that Megatron runs: what each reads, writes, and
lets autograd keep. Everything asked of it follows from that: the bytes kept until backward (a
storage counts once, however many operations keep it), what recomputation and offloading take
away, and how high memory rises while the layer runs forward or backward.

Sizes may be arrays, one element a layout; an operation that some layouts do without has size 0
there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from piper_megatron.layout.sizes import Number


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the forward pass.

    Attributes:
        storage: name of the memory behind it; views share it.
        bytes: of that memory.
        gradient: bytes of its gradient; 0 if it has none.
        is_view: it is a part of its memory.
    """

    storage: str
    bytes: Number
    gradient: Number
    is_view: bool = False

    def view(self, bytes: Number) -> "Tensor":
        """A part of it, which keeps all of its memory alive."""
        return Tensor(self.storage, self.bytes, bytes, is_view=True)


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation.

    Attributes:
        part: what reports call it.
        reads, writes: tensors; those that are written and neither read later nor kept are gone.
        keeps: the tensors that autograd keeps for its backward.
        forward_extra, backward_extra: bytes alive only while it runs.
        shares_gradient: the gradients of what it reads are that of what it writes (an addition).
        writes_over_kept: its backward leaves the gradient where what it keeps was.
        offloaded: what it keeps goes to the host.
    """

    part: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    keeps: tuple[Tensor, ...]
    forward_extra: Number
    backward_extra: Number
    shares_gradient: bool
    writes_over_kept: bool
    offloaded: bool


@dataclass(eq=False)
class Region:
    """Operations that are run again in backward.

    Attributes:
        part: what reports call the inputs that it keeps.
        body: operations and regions inside.
        discards: what it writes is given up as well (Megatron's CheckpointWithoutOutput), and comes
            back when the gradient of `until` is known.
        until: a tensor behind its last reader.
        scattered_by: its first input is split over so many ranks while it is kept.
    """

    part: str
    body: list["Operation | Region"] = field(default_factory=list)
    discards: bool = False
    until: Tensor | None = None
    scattered_by: Number = 1

    def operations(self) -> list[Operation]:
        """All operations inside, in order."""
        return _flat(self.body)

    def inputs(self) -> list[Tensor]:
        """What it reads from outside, each storage once."""
        written = {tensor.storage for op in self.operations() for tensor in op.writes}
        read = (tensor for op in self.operations() for tensor in op.reads)
        return list({t.storage: t for t in read if t.storage not in written}.values())

    def outputs(self) -> list[Tensor]:
        """What it writes and does not read itself."""
        read = {tensor.storage for op in self.operations() for tensor in op.reads}
        written = (tensor for op in self.operations() for tensor in op.writes)
        return [t for t in written if t.storage not in read and not _is_zero(t.gradient)]


Item = Operation | Region


class Tape:
    """Operations in the order of the forward pass."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open = [self.items]
        self._offloading = False
        self._names: dict[str, int] = {}

    def tensor(
        self, name: str, bytes: Number, *, differentiable: bool = True, pieces: Number = 1
    ) -> Tensor:
        """A tensor with memory of its own.

        Args:
            name: need not be the only one of its kind.
            bytes: of it.
            differentiable: it has a gradient.
            pieces: its gradient comes in so many pieces, one after the other.
        """
        number = self._names[name] = self._names.get(name, 0) + 1
        storage = name if number == 1 else f"{name} {number}"
        return Tensor(storage, bytes, bytes / pieces if differentiable else 0)

    def add(
        self,
        part: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor] = (),
        keeps: Sequence[Tensor] = (),
        *,
        forward_extra: Number = 0,
        backward_extra: Number = 0,
        shares_gradient: bool = False,
        writes_over_kept: bool = False,
    ) -> None:
        """Writes down one operation; see `Operation`."""
        self._open[-1].append(
            Operation(
                part=part,
                reads=tuple(reads),
                writes=tuple(writes),
                keeps=tuple(keeps),
                forward_extra=forward_extra,
                backward_extra=backward_extra,
                shares_gradient=shares_gradient,
                writes_over_kept=writes_over_kept,
                offloaded=self._offloading,
            )
        )

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """A Python variable kept tensors alive until here; in backward it does not."""
        self.add("", [Tensor(t.storage, t.bytes, 0, is_view=True) for t in tensors])

    @contextmanager
    def recomputed(
        self, when: bool, part: str, *, discards: bool = False, scattered_by: Number = 1
    ) -> Iterator[Region]:
        """Operations written down inside are run again in backward, if `when`."""
        region = Region(part, discards=discards, scattered_by=scattered_by)
        if not when:
            yield region
            return
        self._open[-1].append(region)
        self._open.append(region.body)
        try:
            yield region
        finally:
            self._open.pop()

    @contextmanager
    def offloaded(self, when: bool) -> Iterator[None]:
        """What operations written down inside keep goes to the host, if `when`."""
        before, self._offloading = self._offloading, self._offloading or when
        try:
            yield
        finally:
            self._offloading = before


def kept(items: Sequence[Item], *, offloaded: bool = False) -> dict[str, tuple[str, Number]]:
    """What stays between forward and backward.

    Args:
        items: of a tape.
        offloaded: what has gone to the host instead.

    Returns:
        storage -> (part that keeps it first, bytes).
    """
    here: dict[str, tuple[str, Number]] = {}
    away: dict[str, tuple[str, Number]] = {}
    discarded: set[str] = set()
    for item in items:
        if isinstance(item, Region):
            for place, tensor in enumerate(item.inputs()):
                bytes = tensor.bytes if place else tensor.bytes / item.scattered_by
                here.setdefault(tensor.storage, (item.part, bytes))
            if item.discards:
                discarded.update(tensor.storage for tensor in item.outputs())
            continue
        target = away if item.offloaded else here
        for tensor in item.keeps:
            target.setdefault(tensor.storage, (item.part, tensor.bytes))
    chosen = away if offloaded else here
    return {name: part for name, part in chosen.items() if name not in discarded}


def total(storages: dict[str, tuple[str, Number]]) -> Number:
    """Bytes of all of them."""
    return sum((bytes for _, bytes in storages.values()), start=0)


def by_part(storages: dict[str, tuple[str, Number]]) -> dict[str, Number]:
    """Bytes of each part."""
    parts: dict[str, Number] = {}
    for part, bytes in storages.values():
        parts[part] = parts.get(part, 0) + bytes
    return parts


def forward_peak(items: Sequence[Item], inputs: Sequence[Tensor]) -> Number:
    """The most bytes alive while it runs forward, kept ones and inputs included."""
    memory = _Memory()
    for tensor in inputs:
        memory.hold(tensor.storage, tensor.bytes)
    _forward(items, memory, set(kept(items)) | {tensor.storage for tensor in inputs})
    return memory.peak


def backward_peak(items: Sequence[Item], output: Tensor | None) -> Number:
    """The most bytes alive while it runs backward, kept ones and the output's gradient included."""
    memory = _Memory()
    for storage, (_, bytes) in kept(items).items():
        memory.hold(storage, bytes)
    backward = _Backward(memory, items)
    if output is not None:
        backward.receive(output)
    backward.run(items)
    return memory.peak


class _Memory:
    """Bytes alive, by storage, and the most there ever were."""

    def __init__(self) -> None:
        self._bytes: dict[str, Number] = {}
        self._total: Number = 0
        self.peak: Number = 0

    def hold(self, storage: str, bytes: Number) -> None:
        if storage not in self._bytes:
            self._bytes[storage] = bytes
            self._total = self._total + bytes
            self.touch()

    def drop(self, storage: str) -> None:
        self._total = self._total - self._bytes.pop(storage, 0)

    def touch(self, extra: Number = 0) -> None:
        self.peak = np.maximum(self.peak, self._total + extra)


def _forward(items: Sequence[Item], memory: _Memory, stay: set[str]) -> None:
    """Runs forward; what is in `stay`, and what nobody reads, is alive at the end."""
    readers: dict[str, int] = {}
    for op in _flat(items):
        for tensor in op.reads:
            readers[tensor.storage] = readers.get(tensor.storage, 0) + 1
    for op in _flat(items):
        for tensor in op.writes:
            memory.hold(tensor.storage, tensor.bytes)
        memory.touch(op.forward_extra)
        for tensor in op.reads:
            readers[tensor.storage] -= 1
            if not readers[tensor.storage] and tensor.storage not in stay:
                memory.drop(tensor.storage)
        for tensor in op.writes:
            internal = _is_zero(tensor.gradient) and tensor.storage not in readers
            if internal and tensor.storage not in stay:
                memory.drop(tensor.storage)


class _Backward:
    """A tape run backward: gradients come and go, recomputed tensors return, kept ones leave."""

    def __init__(self, memory: _Memory, items: Sequence[Item]) -> None:
        self._memory = memory
        self._holders: dict[str, int] = {}
        self._gradients: dict[Tensor, str] = {}
        self._users: dict[str, int] = {}
        self._number = 0
        self._hold(items)

    def receive(self, output: Tensor) -> None:
        """The gradient of the last output comes from behind."""
        self._gradients[output] = self._new_gradient(output.gradient)

    def run(self, items: Sequence[Item]) -> None:
        """Backward of all of them, last one first."""
        discarding = [item for item in items if isinstance(item, Region) and item.discards]
        for item in reversed(items):
            writes = [t for op in _flat([item]) for t in op.writes]
            for region in discarding:
                if region.until in writes and region is not item:
                    self._recompute(region)
            if isinstance(item, Operation):
                if item.offloaded:
                    for tensor in item.keeps:
                        self._memory.hold(tensor.storage, tensor.bytes)
                if item.writes_over_kept:
                    self._release(item.keeps)
                    self._differentiate(item)
                else:
                    self._differentiate(item)
                    self._release(item.keeps)
                continue
            if not item.discards:
                self._recompute(item)
            self.run(item.body)
            for tensor in item.outputs():
                self._memory.drop(_again(tensor, item))
            self._release(item.inputs())

    def _hold(self, items: Sequence[Item]) -> None:
        for item in items:
            tensors = item.keeps if isinstance(item, Operation) else item.inputs()
            for storage in {tensor.storage for tensor in tensors}:
                self._holders[storage] = self._holders.get(storage, 0) + 1

    def _release(self, tensors: Sequence[Tensor]) -> None:
        for storage in {tensor.storage for tensor in tensors}:
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self._memory.drop(storage)

    def _recompute(self, region: Region) -> None:
        for tensor in region.inputs():
            self._memory.drop(tensor.storage)  # back from the ranks over which it was split
            self._memory.hold(tensor.storage, tensor.bytes)
        inside = kept(region.body)
        self._hold(region.body)
        outputs = region.outputs()
        stay = set(inside) | {t.storage for t in (*region.inputs(), *outputs)}
        _forward(region.body, self._memory, stay)
        for tensor in outputs:
            # a discarded output returns to its old place; any other is there twice
            if not region.discards:
                self._memory.hold(_again(tensor, region), tensor.bytes)

    def _differentiate(self, op: Operation) -> None:
        received = [t for t in op.writes if t in self._gradients]
        new: dict[Tensor, str] = {}
        for tensor in dict.fromkeys(op.reads):
            if _is_zero(tensor.gradient):
                continue
            if op.shares_gradient and received:
                new[tensor] = self._gradients[received[0]]
                self._users[new[tensor]] += 1
            else:
                new[tensor] = self._new_gradient(tensor.gradient)
        self._memory.touch(op.backward_extra)
        for tensor in received:
            self._drop_gradient(self._gradients.pop(tensor))
        for tensor, gradient in new.items():
            if tensor in self._gradients:
                self._drop_gradient(gradient)  # added to the one that is there
            else:
                self._gradients[tensor] = gradient

    def _new_gradient(self, bytes: Number) -> str:
        self._number += 1
        name = f"gradient {self._number}"
        self._users[name] = 1
        self._memory.hold(name, bytes)
        return name

    def _drop_gradient(self, name: str) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            self._memory.drop(name)


def _again(tensor: Tensor, region: Region) -> str:
    return f"{tensor.storage} again" if not region.discards else tensor.storage


def _flat(items: Sequence[Item]) -> list[Operation]:
    operations: list[Operation] = []
    for item in items:
        operations += [item] if isinstance(item, Operation) else item.operations()
    return operations


def _is_zero(bytes: Number) -> bool:
    return isinstance(bytes, int) and not bytes
