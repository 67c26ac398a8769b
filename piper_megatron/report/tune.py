"""Plans as text: a table, the front of speed against memory, where the time goes, what was lost."""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from piper_megatron.report.estimate import verdict
from piper_megatron.report.figure import BLUE, GREY, RED, new_figure, save
from piper_megatron.report.text import count, facts, percent, render, seconds, table
from piper_megatron.tuning.plan import Plan
from piper_megatron.tuning.search import Outcome, Point

SIZES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
# parts of a step that are shown, the largest over all plans first
SHOWN_PARTS = 8
SHOWN_REASONS = 10
_PLOT_COLUMNS, _PLOT_ROWS = 60, 12
_SHOWN_POINTS = 8


def render_outcome(
    outcome: Outcome, model: str, platform: str, capacity_gib: float, width: int
) -> str:
    """The whole report, plain text.

    Args:
        outcome: what the search found.
        model: its name.
        platform: its name.
        capacity_gib: memory of a device.
        width: columns of the terminal.
    """
    plans = outcome.plans or ((outcome.nearest,) if outcome.nearest else ())
    blocks: list[str | Table] = ["\n".join(_headlines(outcome, model, platform, capacity_gib))]
    if plans:
        blocks += [_plans_table(plans), _arguments(plans[0], width)]
        blocks.append(_parts_table(plans))
    if len(outcome.front) > 1:
        blocks.append(_front(outcome.front))
    blocks.append(_rejections(outcome.rejected))
    notes = [("note", text) for text in outcome.notes]
    for plan in plans:
        notes += [(f"plan {plan.rank}", text) for text in plan.notes]
    if plans:
        notes += [("assumed", text) for text in plans[0].estimate.assumptions]
    if notes:
        blocks.append(facts(notes, width))
    return render(blocks)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The public form of a search's result."""
    return outcome.model_dump(mode="json")


def _headlines(outcome: Outcome, model: str, platform: str, capacity_gib: float) -> list[str]:
    looked = (
        f"{outcome.legal:,} legal candidates of {outcome.searched:,} in {outcome.seconds:.1f} s; "
        f"a plan may need {outcome.limit_gib:.1f} of {capacity_gib:.1f} GiB"
    )
    if outcome.plans:
        best = outcome.plans[0]
        time = best.estimate.time
        return [
            f"best: step {seconds(time.step_s)}, {time.tflops_per_gpu:.1f} TFLOPS/GPU, MFU "
            f"{time.mfu:.1%}, {time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
            f"{model} on {count(best.gpus, 'rank')} of {platform}, {best.global_batch:,} sequences "
            f"of {best.seq:,} tokens",
            looked,
        ]
    lines = ["NOTHING FITS"]
    if outcome.nearest:
        lines[0] += f"; the nearest miss {verdict(outcome.nearest.estimate.memory)}"
    return [*lines, outcome.advice, looked]


def _plans_table(plans: Sequence[Plan]) -> Table:
    settings = ("recompute", "dispatcher", "optimizer")
    left = tuple(range(len(SIZES) + 6, len(SIZES) + 10))
    shown = table(
        "plan",
        *SIZES,
        "micro-batch",
        "step",
        "TFLOPS",
        "MFU",
        "GiB",
        "confidence",
        *settings,
        left=(0, *left),
    )
    for plan in plans:
        layout, time = plan.layout, plan.estimate.time
        needed = max(stage.needed_gib for stage in plan.estimate.memory.stages)
        shown.add_row(
            str(plan.rank),
            *(str(getattr(layout, name)) for name in SIZES),
            f"{layout.micro_batch} x {layout.micro_batches}",
            seconds(time.step_s),
            f"{time.tflops_per_gpu:.1f}",
            f"{time.mfu:.1%}",
            f"{needed:.1f}",
            plan.confidence,
            *(getattr(layout, name) for name in settings),
        )
    return shown


def _arguments(plan: Plan, width: int) -> str:
    lines = textwrap.wrap(
        shlex.join(plan.megatron_args),
        width - 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    indented = " \\\n    ".join(lines)
    return f"arguments of plan {plan.rank}, beside yours\n    {indented}"


def _parts_table(plans: Sequence[Plan]) -> Table:
    """Where the time of each plan goes."""
    names = {name for plan in plans for name, spent in plan.estimate.time.parts.items() if spent}
    largest = sorted(
        names,
        key=lambda name: max(plan.estimate.time.parts.get(name, 0.0) for plan in plans),
        reverse=True,
    )
    shown = table("part of the step", *(f"plan {plan.rank}" for plan in plans))
    for name in largest[:SHOWN_PARTS]:
        spent = [plan.estimate.time.parts.get(name, 0.0) for plan in plans]
        shares = [
            percent(part / plan.estimate.time.step_s)
            for part, plan in zip(spent, plans, strict=True)
        ]
        shown.add_row(name, *shares)
    return shown


def _front(points: Sequence[Point]) -> str:
    """The front as a scatter of letters, with a legend; predicted in closed form."""
    spread = points if len(points) <= _SHOWN_POINTS else _spread(points)
    shown = [(chr(ord("a") + i), point) for i, point in enumerate(spread)]
    times, needs = ([getattr(p, name) for p in points] for name in ("step_s", "needed_gib"))
    grid = [[" "] * (_PLOT_COLUMNS + 1) for _ in range(_PLOT_ROWS + 1)]
    for mark, point in [(".", point) for point in points] + shown:
        column = round(_PLOT_COLUMNS * _place(point.step_s, times))
        row = _PLOT_ROWS - round(_PLOT_ROWS * _place(point.needed_gib, needs))
        grid[row][column] = mark
    low, high = f"{min(needs):.1f}", f"{max(needs):.1f}"
    margin = max(len(low), len(high))
    labels = [high, *[""] * (_PLOT_ROWS - 1), low]
    lines = ["speed against memory, GiB over step time (closed form; none is better in both)"]
    lines += [
        f"{label:>{margin}} |{''.join(row).rstrip()}"
        for label, row in zip(labels, grid, strict=True)
    ]
    ends = f"{seconds(min(times))}{seconds(max(times)):>{_PLOT_COLUMNS - 4}}"
    lines += [f"{'':{margin}} +{'-' * (_PLOT_COLUMNS + 1)}", f"{'':{margin}}  {ends}"]
    lines += [
        f"{mark}  {seconds(point.step_s)}, {point.needed_gib:.1f} GiB: {point.layout}"
        for mark, point in shown
    ]
    return "\n".join(lines)


def _spread(points: Sequence[Point]) -> list[Point]:
    last = len(points) - 1
    return [points[round(i * last / (_SHOWN_POINTS - 1))] for i in range(_SHOWN_POINTS)]


def _place(value: float, among: Sequence[float]) -> float:
    span = max(among) - min(among)
    return (value - min(among)) / span if span else 0.0


def _rejections(rejected: Mapping[str, int]) -> Table:
    shown = table("why others lost", "candidates", "share")
    total = sum(rejected.values())
    for reason, number in list(rejected.items())[:SHOWN_REASONS]:
        shown.add_row(reason, f"{number:,}", percent(number / total))
    rest = list(rejected.values())[SHOWN_REASONS:]
    if rest:
        shown.add_row(f"{count(len(rest), 'other reason')}", f"{sum(rest):,}", "")
    return shown


def draw_front(path: Path, outcome: Outcome, title: str) -> None:
    """The front as a picture.

    Raises:
        PiperError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(path, title, (8.0, 5.0))
    axes = figure.add_subplot()
    axes.step(
        [point.step_s for point in outcome.front],
        [point.needed_gib for point in outcome.front],
        where="post",
        marker="o",
        color=BLUE,
        label="candidates that none beats in both (closed form)",
    )
    for plan in outcome.plans:
        needed = max(stage.needed_gib for stage in plan.estimate.memory.stages)
        place = (plan.estimate.time.step_s, needed)
        axes.plot(*place, marker="s", linestyle="", color=RED)
        axes.annotate(f"plan {plan.rank}", place, textcoords="offset points", xytext=(6, 4))
    axes.axhline(outcome.limit_gib, color=GREY, linestyle="--", label="a plan may need")
    axes.set_xlabel("step time, s")
    axes.set_ylabel("memory of the fullest GPU, GiB")
    axes.legend()
    save(figure, path)
