"""A platform from a base and what was measured."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from piper_megatron.bench.accelerator_fit import Fitted, fit_accelerator
from piper_megatron.bench.network_fit import fit_level, in_fit, predict
from piper_megatron.bench.points import Measured
from piper_megatron.errors import PlatformError
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.platform.dispatch_profile import DispatchProfile
from piper_megatron.platform.platform import Platform, list_platforms, load_platform

_CPU_PLATFORM = "cpu-lab"


@dataclass(frozen=True)
class Facts:
    """What is not a time.

    Attributes:
        name: of the platform to write.
        origin: who measured where and when, for the sources.
        device: product that a rank drives.
        capacity_gib: memory of a rank.
        context_gib: that a process holds beside its tensors; None if not known.
        nodes, per_node: of the job.
    """

    name: str
    origin: str
    device: str
    capacity_gib: float
    context_gib: float | None
    nodes: int
    per_node: int


@dataclass(frozen=True)
class Profile:
    """A measured platform, and how well its curves fit.

    Attributes:
        platform: to write.
        measured: all points.
        predicted: seconds that the platform's curves give, by the key of a point.
        notes: what could not be measured.
    """

    platform: Platform
    measured: tuple[Measured, ...]
    predicted: dict[str, float]
    notes: tuple[str, ...]


def base_for_device(device: str | None) -> Platform:
    """A platform of the library with this device.

    Args:
        device: what the driver calls it; None for a CPU.

    Raises:
        PlatformError: there is none.
    """
    if device is None:
        return load_platform(_CPU_PLATFORM)
    words = set(re.findall(r"[a-z]*\d+[a-z]*", device.lower()))
    for name in list_platforms():
        platform = load_platform(name)
        known = platform.accelerator.name.lower() if platform.accelerator else ""
        models = {word for word in re.findall(r"[a-z]+\d+[a-z]*", known) if len(word) > 2}
        if models & words:
            return platform
    raise PlatformError(
        f"no platform of the library has a {device}; name the nearest one with --platform"
    )


def assemble(base: Platform, measured: Sequence[Measured], facts: Facts) -> Profile:
    """The base with everything replaced that was measured.

    Args:
        base: keeps the rest, with its labels.
        measured: all points.
        facts: names, memory.
    """
    fitted = Fitted()
    links = [p for p in measured if p.point.kind == "link"]
    levels = tuple(fit_level(base, i, links, facts.origin, fitted) for i in range(len(base.levels)))
    accelerator = fit_accelerator(base.need_accelerator(), measured, facts.origin, fitted)
    platform = base.model_copy(
        update={
            "name": facts.name,
            "aliases": (),
            "description": f"{facts.device}, on the base of {base.name}; {facts.origin}",
            "levels": levels,
            "accelerator": _with_memory(accelerator, facts),
            "dispatch": (*_profiles(measured, facts), *base.dispatch),
        }
    )
    fitted.predicted |= {p.point.key: predict(platform, p) for p in links if in_fit(p, links)}
    return Profile(platform, tuple(measured), fitted.predicted, tuple(fitted.notes))


def _with_memory(accelerator: Accelerator, facts: Facts) -> Accelerator:
    nominal = accelerator.memory.nominal_gb
    if accelerator.memory.evidence != "published" or facts.capacity_gib > nominal:
        nominal = round(facts.capacity_gib * 2**30 / 1e9, 1)
    changes: dict[str, object] = {
        "name": facts.device,
        "memory": accelerator.memory.model_copy(
            update={
                "nominal_gb": nominal,
                "capacity_gib": round(facts.capacity_gib, 2),
                "evidence": "measured",
                "source": facts.origin,
            }
        ),
    }
    if facts.context_gib is not None:
        overheads = accelerator.overheads
        changes["overheads"] = overheads.model_copy(
            update={
                "context_gib": round(facts.context_gib, 3),
                "source": f"context_gib: {facts.origin}; the rest as before: {overheads.source}",
            }
        )
    return accelerator.model_copy(update=changes)


def _profiles(measured: Sequence[Measured], facts: Facts) -> list[DispatchProfile]:
    """One for each kind of layer; sizes that all its dispatchers were measured at."""
    points = [p for p in measured if p.point.kind == "dispatch"]
    layers = dict.fromkeys((p.point.size["experts"], p.point.size["topk"]) for p in points)
    profiles = []
    for experts, topk in layers:
        seconds: dict[str, dict[int, float]] = {}
        for p in points:
            if (p.point.size["experts"], p.point.size["topk"]) == (experts, topk):
                seconds.setdefault(p.point.what, {})[p.point.size["bytes"]] = p.seconds
        common = sorted(set.intersection(*(set(sizes) for sizes in seconds.values())))
        if not common:
            continue
        profiles.append(
            DispatchProfile.model_validate(
                {
                    "nodes": facts.nodes,
                    "per_node": facts.per_node,
                    "experts": experts,
                    "topk": topk,
                    "token_bytes": common,
                    "seconds": {
                        what: [sizes[count] for count in common] for what, sizes in seconds.items()
                    },
                    "evidence": "measured",
                    "source": facts.origin,
                }
            )
        )
    return profiles


def rounded(platform: Platform, digits: int = 4) -> Platform:
    """Measured numbers with so many digits: more are noise."""
    return Platform.model_validate(_rounded(platform.model_dump(), digits))


def _rounded(value: object, digits: int) -> object:
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each, digits) for each in value]
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.{digits}g}")
    return value
