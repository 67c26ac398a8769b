"""What a step's time tells of a platform: speeds, each corrected by one factor.

| speed               | corrected in the platform file                              |
|---------------------|-------------------------------------------------------------|
| kernels             | `efficiency` of the software stack                          |
| host                | `host` of the software stack                                |
| network level NAME  | the level's `gbps`, and with it `startup_s` and `latency_s` |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from piper_megatron.platform.evidence import Evidence
from piper_megatron.platform.platform import Platform

# standard deviation of a speed's logarithm before anything was trained: single operators run
# faster than in training, the same layout moves by 1.1 to 1.8 between software stacks
DOUBT: dict[Evidence, float] = {
    "measured": 0.15,
    "published": 0.2,
    "fitted": 0.2,
    "assumed": 0.4,
}

_BEFORE = "; before: "

Change = Callable[[Platform, float, str], Platform]


@dataclass(frozen=True)
class Constant:
    """A speed that can be corrected.

    Attributes:
        name: for reports.
        key: the number in the platform file that a report shows.
        value: of that number.
        falls: the number is a time, which falls as the speed grows.
        doubt: how unsure the speed is, as the standard deviation of its logarithm.
        change: gives a platform on which it is so many times as high, with a note on the source.
    """

    name: str
    key: str
    value: float
    falls: bool
    doubt: float
    change: Change

    def corrected(self, speed: float) -> float:
        """The number at so many times the speed."""
        return _rounded(self.value / speed if self.falls else self.value * speed)


def constants_of(platform: Platform, stack: str | None) -> tuple[Constant, ...]:
    """Everything that can be corrected on a platform.

    Args:
        platform: it must have an accelerator.
        stack: of whose software, as `Accelerator.stack` takes it.
    """
    accelerator = platform.need_accelerator()
    chosen = accelerator.stack(stack)
    host_doubt = max(DOUBT[chosen.evidence], DOUBT[accelerator.host.evidence])
    return (
        Constant(
            "kernels",
            f"efficiency of stack {chosen.name}",
            chosen.efficiency,
            False,
            DOUBT[chosen.evidence],
            partial(_change_stack, chosen.name, "efficiency"),
        ),
        Constant(
            "host",
            f"host of stack {chosen.name}",
            chosen.host,
            True,
            host_doubt,
            partial(_change_stack, chosen.name, "host"),
        ),
        *(
            Constant(
                f"network level {level.name}",
                f"gbps of level {level.name}",
                level.gbps,
                False,
                max(DOUBT[level.evidence], DOUBT[transfer.evidence]),
                partial(_change_level, number),
            )
            for number, (level, transfer) in enumerate(
                zip(platform.levels, platform.transfers(), strict=True)
            )
        ),
    )


def with_reserved_ratio(platform: Platform, ratio: float, source: str) -> Platform:
    """The platform with what torch's allocator was seen to reserve over what it allocated."""
    accelerator = platform.need_accelerator()
    overheads = accelerator.overheads
    changed = overheads.model_copy(
        update={
            "reserved_ratio": _rounded(max(ratio, 1.0)),
            "source": _noted(f"reserved_ratio measured, {source}", overheads.source),
        }
    )
    return platform.model_copy(
        update={"accelerator": accelerator.model_copy(update={"overheads": changed})}
    )


def _change_stack(name: str, field: str, platform: Platform, speed: float, source: str) -> Platform:
    accelerator = platform.need_accelerator()

    def changed(value: float) -> float:
        return _rounded(value / speed if field == "host" else value * speed)

    stacks = tuple(
        stack.model_copy(
            update={
                field: changed(getattr(stack, field)),
                "evidence": "fitted",
                "source": _noted(f"{field} calibrated, {source}", stack.source),
            }
        )
        if stack.name == name
        else stack
        for stack in accelerator.stacks
    )
    return platform.model_copy(
        update={"accelerator": accelerator.model_copy(update={"stacks": stacks})}
    )


def _change_level(number: int, platform: Platform, speed: float, source: str) -> Platform:
    """A collective at the level takes so many times less, its latencies included."""
    level, transfer = platform.levels[number], platform.transfers()[number]
    calibrated = f"calibrated, {source}"
    known = f"{level.gbps:g} ({level.evidence}), {level.source}"
    changed = level.model_copy(
        update={
            "gbps": _rounded(level.gbps * speed),
            "evidence": "fitted",
            "source": _noted(calibrated, level.source, known),
            "transfer": transfer.model_copy(
                update={
                    "startup_s": _rounded(transfer.startup_s / speed),
                    "latency_s": _rounded(transfer.latency_s / speed),
                    "evidence": "fitted",
                    "source": _noted(f"latencies {calibrated}", transfer.source),
                }
            ),
        }
    )
    levels = (*platform.levels[:number], changed, *platform.levels[number + 1 :])
    return platform.model_copy(update={"levels": levels})


def _rounded(value: float) -> float:
    """Six digits: more than anybody measures, and a file that one can read."""
    return float(f"{value:.6g}")


def _noted(what: str, source: str, known: str | None = None) -> str:
    """A source in front of the one that it corrects; of corrections only the last is kept."""
    _, again, original = source.rpartition(_BEFORE)
    return f"{what}{_BEFORE}{original if again else known or source}"
