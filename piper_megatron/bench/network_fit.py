"""From measured collectives to the curve of a network level, as `resources/network.py` reads it."""

from collections.abc import Sequence

import numpy as np

from piper_megatron.bench.accelerator_fit import Fitted
from piper_megatron.bench.least_squares import fit_nonnegative
from piper_megatron.bench.points import Measured
from piper_megatron.layout.collectives import Collective, Operation
from piper_megatron.platform.platform import NetworkLevel, Platform
from piper_megatron.platform.transfer import Efficiency, Transfer
from piper_megatron.resources.network import collective_cost, message_cost
from piper_megatron.resources.reach import Reach, domain_sizes

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
# bytes at which 2/3 of the long-message rate is reached
_RAMPS = (0.0, *(float(1 << power) for power in range(8, 27)))
_ALL = Efficiency(**dict.fromkeys(Efficiency.model_fields, 1.0))
_FREE = Transfer(
    startup_s=0,
    latency_s=0,
    ramp_bytes=0,
    efficiency=_ALL,
    evidence="assumed",
    source="nothing, to find the share of another level",
)


def fit_level(
    base: Platform, level: int, points: Sequence[Measured], origin: str, fitted: Fitted
) -> NetworkLevel:
    """A level with the bandwidth and the curve that its points give.

    Args:
        base: has the level.
        level: its index.
        points: of kind `link`, of any level.
        origin: who measured, for the sources.
        fitted: takes notes.
    """
    known = base.levels[level]
    mine = [p for p in points if p.point.level == known.name and in_fit(p, points)]
    absent = [op for op in OPERATIONS if op not in {operation(p) for p in mine}]
    if absent:
        if mine:
            fitted.notes.append(f"level {known.name} stays: no {', '.join(absent)} was measured")
        return known
    seconds = np.array([p.seconds for p in mine])
    transfer = base.transfers()[level]
    best: tuple[float, float, np.ndarray] | None = None
    for ramp in _RAMPS:
        columns = np.array([_columns(base, level, transfer, ramp, p) for p in mine])
        positive = [False, False] + [True] * len(OPERATIONS)
        found = fit_nonnegative(columns, seconds, positive)
        missed = float(np.abs(np.log(columns @ found / seconds)).mean())
        if best is None or missed < best[0] * 0.999:
            best = missed, ramp, found
    assert best is not None, "every operation has points"
    _, ramp, found = best
    rates = 1 / found[2:]  # GB/s
    efficiency = {op: float(rate / rates.max()) for op, rate in zip(OPERATIONS, rates, strict=True)}
    return known.model_copy(
        update={
            "gbps": float(rates.max()),
            "evidence": "measured",
            "source": f"fastest long messages; {origin}",
            "transfer": transfer.model_copy(
                update={
                    "startup_s": float(found[0]),
                    "latency_s": float(found[1]),
                    "ramp_bytes": ramp,
                    "efficiency": Efficiency(
                        **efficiency,
                        deepep=efficiency["all_to_all"],
                        hybridep=efficiency["all_to_all"],
                    ),
                    "evidence": "measured",
                    "source": f"{origin}; deepep and hybridep assumed as all_to_all",
                }
            ),
        }
    )


def predict(platform: Platform, measured: Measured) -> float:
    """What the model says of a point of kind `link`."""
    point = measured.point
    level = [each.name for each in platform.levels].index(point.level)
    reach = _reach(platform, level, point.size["members"], whole=point.what.endswith("whole"))
    if operation(measured) == "point_to_point":
        return float(message_cost(platform, reach, point.size["bytes"]).seconds)
    collective = Collective("", "", Operation(operation(measured)), point.size["bytes"], "forward")
    return float(collective_cost(platform, reach, collective).seconds)


def operation(measured: Measured) -> str:
    """Field of `Efficiency` that a point tells of."""
    return measured.point.what.removesuffix("_whole")


def in_fit(measured: Measured, points: Sequence[Measured]) -> bool:
    """Whether all links of the level are busy, as the model takes them to be."""
    pairs = [
        p.point.size["pairs"]
        for p in points
        if p.point.level == measured.point.level and "pairs" in p.point.size
    ]
    return measured.point.size.get("pairs") in (None, max(pairs, default=None))


def _columns(
    base: Platform, level: int, transfer: Transfer, ramp: float, measured: Measured
) -> list[float]:
    """What the model multiplies with start-up, latency, and the inverse rate of each operation."""

    def seconds(startup: float, latency: float, gbps: float) -> float:
        mine = transfer.model_copy(
            update={
                "startup_s": startup,
                "latency_s": latency,
                "ramp_bytes": ramp,
                "efficiency": _ALL,
            }
        )
        levels = [
            each.model_copy(
                update={"transfer": mine, "gbps": gbps}
                if i == level
                else {"transfer": _FREE, "gbps": 1e30}
            )
            for i, each in enumerate(base.levels)
        ]
        return predict(base.model_copy(update={"levels": tuple(levels)}), measured)

    busy = seconds(0.0, 0.0, 1.0)
    mine = operation(measured)
    return [
        seconds(1.0, 0.0, 1e30),
        seconds(0.0, 1.0, 1e30),
        *(busy * (each == mine) for each in OPERATIONS),
    ]


def _reach(platform: Platform, level: int, members: int, *, whole: bool) -> Reach:
    """A rail has one member in each domain of the level inside, a whole domain all its ranks."""
    if not whole:
        return Reach(
            members, tuple(members if i < level else 1 for i in range(len(platform.levels)))
        )
    sizes = domain_sizes(platform)
    return Reach(
        members,
        tuple(
            max(members // (sizes[i] or members), 1) if i < level else 1
            for i in range(len(platform.levels))
        ),
    )
