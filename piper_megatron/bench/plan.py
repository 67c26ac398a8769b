"""Which points are measured: quick or thorough, by device and by what the job spans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from piper_megatron.bench.points import Point
from piper_megatron.workload.dispatcher_flags import ALGORITHMS

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Effort:
    """How much is measured, and for how long each point.

    Attributes:
        rows: of products.
        widths: of products; on both sides.
        groups: experts of a grouped or looped product.
        batches, heads, channels, sequences: of attention.
        elements: of memory-bound kernels.
        copies: bytes between host and device.
        messages: bytes of collectives.
        tokens: bytes of a rank's hidden states for the dispatchers.
        layers: (experts a rank, top-k) of the dispatchers.
        compute_turn_s, network_turn_s: that a turn lasts at least.
        turns: that are timed.
        longest_s: a call that takes longer is timed once, and larger ones of its kind not at all.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    groups: tuple[int, ...]
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    channels: tuple[int, ...]
    sequences: tuple[int, ...]
    elements: tuple[int, ...]
    copies: tuple[int, ...]
    messages: tuple[int, ...]
    tokens: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    compute_turn_s: float
    network_turn_s: float
    turns: int
    longest_s: float


KIB, MIB = 1 << 10, 1 << 20

QUICK_CPU = Effort(
    rows=(64, 256, 1024),
    widths=(128, 512),
    groups=(8,),
    batches=(1,),
    heads=(4,),
    channels=(64,),
    sequences=(128, 512),
    elements=(64 * KIB, 256 * KIB, MIB),
    copies=(),
    messages=(4 * KIB, 64 * KIB, 512 * KIB),
    tokens=(32 * KIB, 512 * KIB),
    layers=((2, 4),),
    compute_turn_s=0.05,
    network_turn_s=0.03,
    turns=3,
    longest_s=0.5,
)
CPU = Effort(
    rows=(16, 64, 256, 1024, 4096),
    widths=(128, 256, 512, 1024),
    groups=(4, 16),
    batches=(1, 4),
    heads=(4, 16),
    channels=(64, 128),
    sequences=(128, 512, 2048),
    elements=(16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    copies=(),
    messages=tuple(KIB * 4**i for i in range(7)),
    tokens=(8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB),
    layers=((2, 4), (8, 8)),
    compute_turn_s=0.1,
    network_turn_s=0.05,
    turns=7,
    longest_s=2.0,
)
QUICK_GPU = Effort(
    rows=(256, 2048, 16384),
    widths=(1024, 4096),
    groups=(8,),
    batches=(1,),
    heads=(16,),
    channels=(128,),
    sequences=(1024, 4096),
    elements=(MIB, 16 * MIB, 128 * MIB),
    copies=(64 * KIB, 64 * MIB),
    messages=(64 * KIB, 4 * MIB, 64 * MIB),
    tokens=(MIB, 16 * MIB),
    layers=((8, 8),),
    compute_turn_s=0.02,
    network_turn_s=0.02,
    turns=5,
    longest_s=0.5,
)
GPU = Effort(
    rows=(128, 512, 2048, 8192, 32768),
    widths=(512, 1024, 2048, 4096, 8192),
    groups=(2, 8, 32),
    batches=(1, 4),
    heads=(8, 32),
    channels=(64, 128),
    sequences=(512, 2048, 8192, 32768),
    elements=(256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    copies=(64 * KIB, MIB, 16 * MIB, 256 * MIB),
    messages=tuple(16 * KIB * 4**i for i in range(8)),
    tokens=(256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB),
    layers=((2, 4), (8, 8), (32, 8)),
    compute_turn_s=0.05,
    network_turn_s=0.05,
    turns=11,
    longest_s=2.0,
)
_LAUNCHES = {"width": 16, "layers": 8}
_ADAM_ELEMENTS = 4 * MIB
_NORM_WIDTH = 1024


def effort(*, quick: bool, gpu: bool) -> Effort:
    """The effort for a device."""
    if gpu:
        return QUICK_GPU if quick else GPU
    return QUICK_CPU if quick else CPU


def compute_points(effort: Effort, *, gpu: bool) -> list[Point]:
    """Points of one device, small ones of a family first.

    Args:
        effort: sizes.
        gpu: trains in 16 bits, and has a link to the host.
    """
    return [
        *_products(effort, "bf16" if gpu else "fp32", "fp32" if gpu else "bf16"),
        *_attention(effort),
        *(
            Point(kind="memory", what=what, dtype="bf16" if gpu else "fp32", size=size)
            for what in ("copy", "add", "norm", "permute", "loss")
            for size in _matrices(effort.elements)
        ),
        *(
            Point(kind="memory", what="cast", dtype="fp32", size=size)
            for size in _matrices(effort.elements)
        ),
        Point(kind="host", what="launch", dtype="fp32", size=_LAUNCHES),
        Point(kind="host", what="adam", dtype="fp32", size={"elements": _ADAM_ELEMENTS}),
        *(
            Point(kind="copy", what=what, size={"bytes": count})
            for what in ("to_device", "to_host")
            for count in effort.copies
        ),
    ]


def _products(effort: Effort, main: str, other: str) -> Iterable[Point]:
    def point(what: str, dtype: str, rows: int, inputs: int, outputs: int, groups: int) -> Point:
        size = {"rows": rows, "inputs": inputs, "outputs": outputs, "groups": groups}
        return Point(kind="product", what=what, dtype=dtype, size=size)

    shapes = list(product(effort.rows, effort.widths))
    for rows, width in shapes:
        yield point("single", main, rows, width, width, 1)
        yield point("single", main, rows, width, 2 * width, 1)
    for rows, width in shapes[len(effort.widths) :]:
        yield point("single", other, rows, width, width, 1)
    for what in ("loop", "grouped", "grouped_weights"):
        for rows, width, groups in product(effort.rows, effort.widths, effort.groups):
            if rows >= groups:
                yield point(what, main, rows, width, width, groups)


def _attention(effort: Effort) -> Iterable[Point]:
    for what in ("forward", "backward"):
        for batch, heads, channels, seq in product(
            effort.batches, effort.heads, effort.channels, effort.sequences
        ):
            size = {"batch": batch, "heads": heads, "channels": channels, "seq": seq}
            yield Point(kind="attention", what=what, dtype="bf16", size=size)


def _matrices(elements: Iterable[int]) -> list[dict[str, int]]:
    return [{"rows": count // _NORM_WIDTH, "width": _NORM_WIDTH} for count in elements]


def link_points(effort: Effort, level: str, members: int, whole: int, rails: int) -> list[Point]:
    """Points of one network level.

    Args:
        effort: sizes.
        level: name.
        members: ranks of a rail.
        whole: ranks of a domain.
        rails: that work at once in a domain.
    """
    points = [
        Point(kind="link", what=what, level=level, size={"bytes": count, "members": members})
        for what in COLLECTIVES
        for count in effort.messages
    ]
    if whole > members:
        points += [
            Point(
                kind="link",
                what="all_to_all_whole",
                level=level,
                size={"bytes": count, "members": whole},
            )
            for count in effort.messages
        ]
    points += [
        Point(
            kind="link",
            what="point_to_point",
            level=level,
            size={"bytes": count, "members": members, "pairs": pairs},
        )
        for pairs in sorted({1, -(-rails // 2), rails})
        for count in effort.messages
    ]
    return points


def dispatch_points(
    effort: Effort, world: int, nodes: int, algorithms: Sequence[str] = ALGORITHMS
) -> list[Point]:
    """Points of the dispatchers on one expert group of all ranks; some nodes must be remote."""
    if nodes == 1:
        return []
    return [
        Point(
            kind="dispatch",
            what=algorithm,
            size={"experts": experts * world, "topk": topk, "bytes": count},
        )
        for experts, topk in effort.layers
        if topk <= experts * world
        for algorithm in algorithms
        for count in effort.tokens
    ]
