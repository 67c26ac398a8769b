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
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import SubFigure

_MEMORY = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "dispatch": PURPLE,
    "logits": YELLOW,
    "buffers": RED,
    "communicators": GREY,
}
_AFTER = (PURPLE, GREY, YELLOW, SKY)
_INCHES = (12.0, 8.0)
_ROW = 0.84  # height of a stage's bar, of the distance between two
_OUTLINED_PASSES = 160  # passes of a stage up to which a whole step can be seen at once
_WINDOW_PASSES = 32  # of a longer one, what the first and the last window show
_NUMBER_POINTS = 6  # size of a micro-batch's number


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
    halves = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    _draw_timeline(figure.add_subfigure(halves[0]), timeline, after_s)
    _draw_memory(figure.add_subfigure(halves[1]).subplots(), memory)
    save(figure, path)


def _draw_timeline(figure: "SubFigure", timeline: Timeline, after_s: Mapping[str, float]) -> None:
    schedule = timeline.schedule
    step_s = timeline.step_s + sum(after_s.values())
    scale, unit = (1.0, "s") if step_s >= 1 else (1e3, "ms")
    note = "; lighter: later chunks" if schedule.vpp > 1 else ""
    windows = [(0.0, step_s)]
    label = f"time of a step ({unit}){note}"
    if schedule.passes > _OUTLINED_PASSES:
        shown_s = step_s * _WINDOW_PASSES / schedule.passes
        windows = [(0.0, shown_s), (step_s - shown_s, step_s)]
        label = f"beginning and end of a step ({unit}){note}"
    grid = figure.subplots(1, len(windows), sharey=True, squeeze=False)[0]
    for axes, (begin, end) in zip(grid, windows, strict=True):
        axes.set_xlim(begin * scale, end * scale)
        legend = _draw_stages(axes, timeline, scale, numbered=len(windows) == 1)
        legend |= _draw_after(axes, timeline, after_s, scale)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylim(schedule.pp - 0.5, -0.5)
    grid[0].set_ylabel("pipeline stage")
    figure.supxlabel(label, fontsize="medium")
    _number_stages(grid[0].yaxis, schedule.pp)
    for axes in grid[1:]:
        axes.tick_params(axis="y", left=False)
    _explain(grid[-1], legend | {"idle": LIGHT})


def _draw_stages(
    axes: "Axes", timeline: Timeline, scale: float, *, numbered: bool
) -> dict[str, str]:
    """The pipeline's part of a step; returns the legend."""
    schedule = timeline.schedule
    for stage in range(schedule.pp):
        row = (stage - _ROW / 2, _ROW)
        axes.broken_barh([(0, timeline.step_s * scale)], row, facecolors=LIGHT)
        top, bottom = _halves(stage) if schedule.beside else ((stage, _ROW),) * 2
        for chunk in range(schedule.vpp):
            later = chunk / schedule.vpp
            forward = timeline.forward_s[:, stage, chunk] * scale
            backward = timeline.backward_s[:, stage, chunk] * scale
            _draw_passes(axes, forward, _lighter(BLUE, later), top, numbered=numbered)
            _draw_passes(axes, backward, _lighter(ORANGE, later), bottom, numbered=numbered)
            wgrad = np.minimum(timeline.wgrad_s[stage, chunk] * scale, backward[1] - backward[0])
            if wgrad.any():
                tail = np.stack([backward[1] - wgrad, backward[1]])
                _draw_passes(axes, tail, _lighter(GREEN, later), bottom, numbered=False)
    legend = {"forward": BLUE, "backward": ORANGE}
    return legend | ({"weight gradients": GREEN} if timeline.wgrad_s.any() else {})


def _draw_after(
    axes: "Axes", timeline: Timeline, after_s: Mapping[str, float], scale: float
) -> dict[str, str]:
    """What follows the pipeline, on all stages; returns the legend."""
    legend = {}
    start = timeline.step_s
    for (name, seconds), colour in zip(after_s.items(), _AFTER, strict=False):
        if seconds <= 0:
            continue
        span = [(start * scale, seconds * scale)]
        for stage in range(timeline.schedule.pp):
            axes.broken_barh(span, (stage - _ROW / 2, _ROW), facecolors=colour)
        start += seconds
        legend[name] = colour
    return legend


def _halves(stage: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Middle and height of a forward pass and of the backward pass that runs beside it."""
    return (stage - _ROW / 4, _ROW / 2), (stage + _ROW / 4, _ROW / 2)


def _draw_passes(
    axes: "Axes",
    spans: np.ndarray,
    colour: tuple[float, float, float],
    place: tuple[float, float],
    *,
    numbered: bool,
) -> None:
    """Bars of one kind of pass.

    Args:
        axes: where; its limits are set.
        spans: start and end, [2, micro-batches].
        colour: of the bars.
        place: middle and height.
        numbered: whether bars show their micro-batch where it fits.
    """
    middle, height = place
    starts, ends = spans
    axes.broken_barh(
        np.stack([starts, ends - starts], axis=1).tolist(),
        (middle - height / 2, height),
        facecolors=[colour],
        edgecolors="white",
        linewidth=0.5,
    )
    if not numbered:
        return
    dark = sum(colour) < 1.5
    for micro_batch in np.flatnonzero(_numbers_fit(axes, starts, ends)):
        axes.text(
            (starts[micro_batch] + ends[micro_batch]) / 2,
            middle,
            str(micro_batch),
            ha="center",
            va="center",
            fontsize=_NUMBER_POINTS,
            color="white" if dark else "black",
        )


def _numbers_fit(axes: "Axes", starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether bars are seen as a whole and are as wide as their number."""
    begin, end = axes.get_xlim()
    # an upper bound before the layout is known, which leaves room for the legend
    points = 0.8 * axes.get_window_extent().width * 72 / axes.figure.dpi
    digits = np.array([len(str(micro_batch)) for micro_batch in range(len(starts))])
    wide = (ends - starts) / (end - begin) * points >= 0.7 * _NUMBER_POINTS * digits
    return wide & (starts >= begin) & (ends <= end)


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
    needs = axes.hlines(
        needed,
        stages - _ROW / 2,
        stages + _ROW / 2,
        color="black",
        linewidth=1.5,
        label="needed of the device",
    )
    capacity = axes.axhline(
        memory.capacity_gib,
        color="black",
        linestyle="--",
        linewidth=1.5,
        label=f"capacity {memory.capacity_gib:.1f} GiB",
    )
    axes.set_ylim(0, 1.08 * max(memory.capacity_gib, *needed, *base))
    axes.set_xlim(-0.5, len(stages) - 0.5)
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("device memory (GiB)")
    axes.spines[["top", "right"]].set_visible(False)
    _number_stages(axes.xaxis, len(stages))
    _explain(axes, legend, needs, capacity)


def _number_stages(axis: "Axis", stages: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=min(stages, 32), integer=True, min_n_ticks=1))


def _explain(axes: "Axes", colours: Mapping[str, str], *lines: "Artist") -> None:
    """The legend, on the right."""
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, edgecolor=GREY, linewidth=0.5, label=name)
        for name, colour in colours.items()
    ]
    axes.legend(
        handles=[*patches, *lines], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
