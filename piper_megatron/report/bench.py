"""What a measurement found: points with their spread, the curves' errors, what stayed as it was."""

from collections.abc import Sequence

import numpy as np

from piper_megatron.bench.points import Measured, Point
from piper_megatron.bench.profile import Profile
from piper_megatron.report.text import count, facts, render, seconds, table

_KINDS = {
    "product": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "host": "host",
    "copy": "host and device",
    "link": "collectives and messages",
    "dispatch": "dispatch and combine of a MoE layer",
}


def render_profile(profile: Profile, path: str, width: int) -> str:
    """The report.

    Args:
        profile: what was measured.
        path: of the platform file.
        width: of the terminal.
    """
    blocks: list = []
    for kind, title in _KINDS.items():
        points = [each for each in profile.measured if each.point.kind == kind]
        if points:
            blocks += [f"{title}:", _points_table(points, profile)]
    blocks += ["curves against these points:", _errors_table(profile)]
    platform = profile.platform
    pairs = [("platform", f"{platform.name}, written to {path}"), ("about", platform.description)]
    labels = [f"{part} {label}" for part, label in platform.evidence().items()]
    pairs.append(("evidence", ", ".join(labels)))
    pairs += [("note", note) for note in profile.notes]
    blocks.append(facts(pairs, width))
    return render(blocks)


def _points_table(points: Sequence[Measured], profile: Profile) -> object:
    columns = table("what", "size", "median", "spread", "curve", "error", left=(0, 1))
    for each in points:
        predicted = profile.predicted.get(each.point.key)
        columns.add_row(
            _what(each.point),
            ", ".join(f"{name} {number:,}" for name, number in each.point.size.items()),
            seconds(each.seconds),
            f"+-{each.spread:.0%}",
            "" if predicted is None else seconds(predicted),
            "" if predicted is None else f"{predicted / each.seconds - 1:+.0%}",
        )
    return columns


def _what(point: Point) -> str:
    return " ".join(filter(None, (point.level, point.what.replace("_", " "), point.dtype)))


def _errors_table(profile: Profile) -> object:
    """Errors of the curves, by what they are of."""
    by_part: dict[str, list[float]] = {}
    for each in profile.measured:
        if (predicted := profile.predicted.get(each.point.key)) is not None:
            part = " ".join(filter(None, (each.point.level, _KINDS[each.point.kind])))
            by_part.setdefault(part, []).append(abs(predicted / each.seconds - 1))
    columns = table("curve", "points", "median error", "90th percentile", "worst")
    for part, errors in by_part.items():
        columns.add_row(
            part,
            count(len(errors), "point"),
            *(f"{np.quantile(errors, share):.1%}" for share in (0.5, 0.9, 1.0)),
        )
    return columns
