"""A picture of an estimate: the pipeline over time, and the memory of its stages."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from piper_megatron.report.figure import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    new_figure,
    save,
)
from piper_megatron.resources.estimate import Memory
from piper_megatron.resources.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEMORY = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "dispatch": PURPLE,
    "logits": YELLOW,
    "communicators": GREY,
}
_AFTER = (PURPLE, GREY, YELLOW, SKY)
_INCHES = (12.0, 8.0)
_ROW = 0.84  # height of a stage's bar, of the distance between two
_NUMBERED_ROW = 70  # passes of a stage up to which their numbers can be read
_OUTLINED_ROW = 160  # and up to which outlines do not hide them


def draw(
    path: Path, title: str, timeline: Timeline, after_s: Mapping[str, float], memory: Memory
) -> None:
    """Writes the picture; the ending of the file's name is its format.

    Args:
        path: of the picture.
        title: above it.
        timeline: the pipeline's part of a step.
        after_s: what follows on every stage until the step's end, in order.
        memory: of the same job.

    Raises:
        PiperError: matplotlib is not installed, does not know the format, or cannot write there.
    """
    figure = new_figure(path, title, _INCHES)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_timeline(above, timeline, after_s)
    _draw_memory(below, memory)
    save(figure, path)


def _draw_timeline(axes: "Axes", timeline: Timeline, after_s: Mapping[str, float]) -> None:
    schedule = timeline.schedule
    step_s = timeline.step_s + sum(after_s.values())
    scale, unit = (1.0, "s") if step_s >= 1 else (1e3, "ms")
    for stage in range(schedule.pp):
        axes.broken_barh([(0, timeline.step_s * scale)], (stage - _ROW / 2, _ROW), facecolors=LIGHT)
        for chunk in range(schedule.vpp):
            forward = timeline.forward_s[:, stage, chunk] * scale
            backward = timeline.backward_s[:, stage, chunk] * scale
            wgrad = np.minimum(timeline.wgrad_s[stage, chunk] * scale, backward[1] - backward[0])
            split = np.stack([backward[1] - wgrad, backward[1]])
            top, bottom = _halves(stage) if schedule.beside else ((stage, _ROW),) * 2
            for spans, colour, place, numbered in (
                (forward, BLUE, top, True),
                (backward, ORANGE, bottom, True),
                (split if wgrad.any() else None, GREEN, bottom, False),
            ):
                if spans is not None:
                    shade = _lighter(colour, chunk / schedule.vpp)
                    _draw_passes(axes, spans, shade, place, schedule.passes, numbered)
    legend = {"forward": BLUE, "backward": ORANGE}
    if timeline.wgrad_s.any():
        legend["weight gradients"] = GREEN
    start = timeline.step_s * scale
    for (name, seconds), colour in zip(after_s.items(), _AFTER, strict=False):
        for stage in range(schedule.pp):
            axes.broken_barh(
                [(start, seconds * scale)], (stage - _ROW / 2, _ROW), facecolors=colour
            )
        start += seconds * scale
        legend[name] = colour
    legend["idle"] = LIGHT
    note = "; lighter: later chunks" if schedule.vpp > 1 else ""
    axes.set_xlabel(f"time of a step ({unit}){note}")
    axes.set_xlim(0, step_s * scale)
    axes.set_ylim(schedule.pp - 0.5, -0.5)
    _finish(axes, axes.yaxis, schedule.pp, legend)
    axes.set_ylabel("pipeline stage")


def _halves(stage: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Middle and height of a forward pass and of the backward pass that runs beside it."""
    return (stage - _ROW / 4, _ROW / 2), (stage + _ROW / 4, _ROW / 2)


def _draw_passes(
    axes: "Axes",
    spans: np.ndarray,
    colour: tuple[float, float, float],
    place: tuple[float, float],
    passes: int,
    numbered: bool,
) -> None:
    """Bars of one kind of pass.

    Args:
        axes: where.
        spans: start and end, [2, micro-batches].
        colour: of the bars.
        place: middle and height.
        passes: of the whole row, which decides how much detail can be seen.
        numbered: whether the bars show the micro-batch.
    """
    middle, height = place
    starts, ends = spans
    axes.broken_barh(
        np.stack([starts, ends - starts], axis=1).tolist(),
        (middle - height / 2, height),
        facecolors=[colour],
        edgecolors="white" if passes <= _OUTLINED_ROW else "none",
        linewidth=0.5,
    )
    if numbered and passes <= _NUMBERED_ROW:
        dark = sum(colour) < 1.5
        for micro_batch, x in enumerate((starts + ends) / 2):
            axes.text(
                x,
                middle,
                str(micro_batch),
                ha="center",
                va="center",
                fontsize=6,
                color="white" if dark else "black",
                clip_on=True,
            )


def _lighter(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    keep = 1 - 0.75 * share
    return 1 - keep * (1 - red), 1 - keep * (1 - green), 1 - keep * (1 - blue)


def _draw_memory(axes: "Axes", memory: Memory) -> None:
    stages = np.arange(len(memory.stages))
    base = np.zeros(len(stages))
    legend: dict[str, str] = {}
    for name, colour in _MEMORY.items():
        heights = np.array([getattr(stage, f"{name}_gib") for stage in memory.stages])
        if heights.any():
            axes.bar(stages, heights, _ROW, bottom=base, color=colour, edgecolor="white")
            legend[name] = colour
        base += heights
    needed = [stage.needed_gib for stage in memory.stages]
    axes.hlines(needed, stages - _ROW / 2, stages + _ROW / 2, color="black", linewidth=1.5)
    axes.axhline(memory.capacity_gib, color=RED, linestyle="--", linewidth=1.5)
    axes.annotate(
        f"capacity {memory.capacity_gib:.1f} GiB",
        (1, memory.capacity_gib),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color=RED,
    )
    axes.set_ylim(0, 1.12 * max(memory.capacity_gib, *needed, *base))
    axes.set_xlim(-0.5, len(stages) - 0.5)
    _finish(axes, axes.xaxis, len(stages), legend)
    axes.set_xlabel("pipeline stage; black line: with what is outside of torch's allocator")
    axes.set_ylabel("device memory (GiB)")


def _finish(axes: "Axes", stage_axis, stages: int, legend: Mapping[str, str]) -> None:
    """Ticks at the stages, no frame, and the legend on the right."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    stage_axis.set_major_locator(MaxNLocator(nbins=min(stages, 32), integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=colour, edgecolor=GREY, linewidth=0.5, label=name)
        for name, colour in legend.items()
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
