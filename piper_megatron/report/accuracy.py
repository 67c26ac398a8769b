"""Predictions beside measurements: tables, statistics, JSON and a picture."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from piper_megatron.report.figure import BLUE, GREEN, LIGHT, ORANGE, RED, new_figure, save
from piper_megatron.report.text import count, facts, percent, render, table
from piper_megatron.validation.comparison import Comparison
from piper_megatron.validation.gate import Criterion, criteria
from piper_megatron.validation.limits import REASONS
from piper_megatron.validation.order import LayoutGroup
from piper_megatron.validation.replay import Replay
from piper_megatron.validation.stack_factors import fit_factors, fitted_errors, held_out_errors
from piper_megatron.validation.statistics import Summary, by, peaks, summarise, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# name of a statistic -> by what runs are told apart
GROUPINGS: dict[str, Callable[[Comparison], str]] = {
    "all": lambda comparison: "all",
    "platform": lambda comparison: comparison.platform,
    "family": lambda comparison: comparison.family,
    "confidence": lambda comparison: comparison.confidence,
}
_BAND = 0.1  # shaded in the picture around equality
_CONFIDENCE = {"high": BLUE, "medium": GREEN, "low": ORANGE}


def accuracy_json(replay: Replay) -> dict[str, Any]:
    """Everything that the text says, for programs."""
    return {
        "rows": [
            asdict(each) | {"error": each.error, "reason": REASONS.get(each.run, "")}
            for each in replay.comparisons
        ],
        "refused": {each.run: each.reason for each in replay.refusals},
        "unsized": list(replay.unsized),
        "statistics": {
            name: {group: asdict(summary) for group, summary in summaries.items()}
            for name, summaries in _statistics(replay).items()
        },
        "stack_errors": {name: asdict(each) for name, each in _stack_errors(replay).items()},
        "stack_factors": [
            {"platform": platform, "stack": stack, "factor": factor}
            for (platform, stack), factor in fit_factors(replay.timed).items()
        ],
        "order": [
            {
                "runs": [run.run for run in group.runs],
                "best_measured": group.best_measured.run,
                "best_predicted": group.best_predicted.run,
                "loss": group.loss,
            }
            for group in replay.groups
        ],
        "criteria": [asdict(each) | {"holds": each.holds} for each in criteria(replay)],
    }


def render_accuracy(replay: Replay, width: int) -> str:
    """The whole report, plain text.

    Args:
        replay: what to show.
        width: columns of the terminal.
    """
    sign = "errors above 0: we predict more memory or more time than was measured"
    blocks: list[str | Table] = [f"{_headline(replay)}\n{sign}", _rows(replay.comparisons)]
    blocks += [
        _summaries(name, summaries) for name, summaries in _statistics(replay).items() if summaries
    ]
    if replay.timed:
        blocks += [_summaries("time by stack factors", _stack_errors(replay)), _factors(replay)]
    if replay.groups:
        blocks.append(_order(replay.groups))
    blocks.append(_criteria(criteria(replay)))
    notes = _notes(replay)
    blocks += [facts(notes, width)] if notes else []
    return render(blocks)


def draw_accuracy(replay: Replay, path: Path) -> None:
    """Writes a picture of predicted against measured; its name's ending is its format.

    Raises:
        PiperError: matplotlib is not installed, does not know the format, or cannot write there.
    """
    figure = new_figure(path, _headline(replay), (11.0, 5.5))
    left, right = figure.subplots(1, 2)
    memory = [each for each in replay.comparisons if each.quantity == "peak_gib"]
    points = [(each.measured, each.predicted, each.confidence) for each in memory]
    _scatter(left, "peak memory, GiB", points)
    confidence = {each.run: each.confidence for each in replay.comparisons}
    steps = [(run.measured_s, run.predicted_s, confidence[run.run]) for run in replay.timed]
    _scatter(right, "time of a step, s", steps)
    save(figure, path)


def _headline(replay: Replay) -> str:
    predicted = len({each.run for each in replay.comparisons})
    return (
        f"{count(predicted, 'run')} predicted, {len(replay.comparisons)} figures compared, "
        f"{count(len(replay.refusals), 'run')} refused"
    )


def _notes(replay: Replay) -> list[tuple[str, str]]:
    runs: dict[str, list[str]] = defaultdict(list)
    for refusal in replay.refusals:
        runs[refusal.reason].append(refusal.run)
    notes = [("refused", f"{reason}: {', '.join(names)}") for reason, names in runs.items()]
    return notes + ([("GPUs unknown", ", ".join(replay.unsized))] if replay.unsized else [])


def _statistics(replay: Replay) -> dict[str, dict[str, Summary]]:
    """Kind of statistic -> group -> summary; peaks leave out runs of low confidence."""
    kinds = {"peak memory": peaks(replay.comparisons), "time": times(replay.comparisons)}
    found = {
        f"{kind} by {name}" if name != "all" else kind: by(members, group)
        for kind, members in kinds.items()
        for name, group in GROUPINGS.items()
    }
    comparable = [each for each in replay.comparisons if not each.excluded]
    return found | {"error by quantity": by(comparable, lambda each: each.quantity)}


def _stack_errors(replay: Replay) -> dict[str, Summary]:
    errors = {
        "as predicted": [run.predicted_s / run.measured_s - 1 for run in replay.timed],
        "one factor a stack, all families": fitted_errors(replay.timed),
        "the same, fitted without the family": held_out_errors(replay.timed),
    }
    return {name: summarise(found) for name, found in errors.items() if found}


def _rows(comparisons: Iterable[Comparison]) -> Table:
    shown = table(
        "run",
        "platform",
        "quantity",
        "stage",
        "measured",
        "ours",
        "error",
        "",
        left=(0, 1, 2, 3, 7),
    )
    for each in comparisons:
        remark = each.excluded or REASONS.get(each.run, "")
        figures = (f"{each.measured:,.4g}", f"{each.predicted:,.4g}", f"{each.error:+.1%}")
        shown.add_row(each.run, each.platform, each.quantity, each.where, *figures, remark)
    return shown


def _summaries(name: str, summaries: Mapping[str, Summary]) -> Table:
    shown = table(name, "figures", "median", "p90", "worst", "bias")
    for group, summary in summaries.items():
        shares = (summary.median, summary.p90, summary.worst)
        shown.add_row(
            group, str(summary.count), *(f"{share:.1%}" for share in shares), f"{summary.bias:+.1%}"
        )
    return shown


def _factors(replay: Replay) -> Table:
    shown = table("platform", "stack", "runs", "fitted factor", left=(0, 1))
    runs = Counter((run.platform, run.stack) for run in replay.timed)
    for (platform, stack), factor in sorted(fit_factors(replay.timed).items()):
        shown.add_row(platform, stack, str(runs[platform, stack]), f"{factor:.3f}")
    return shown


def _order(groups: Iterable[LayoutGroup]) -> Table:
    shown = table(
        "runs that differ in layout", "quickest", "predicted quickest", "loss", left=(0, 1, 2)
    )
    for group in groups:
        names = ", ".join(run.run for run in group.runs)
        shown.add_row(names, group.best_measured.run, group.best_predicted.run, percent(group.loss))
    return shown


def _criteria(found: Iterable[Criterion]) -> Table:
    shown = table("limit", "value", "at most", "", left=(0, 3))
    for each in found:
        value, limit = (
            f"{x:.1%}" if isinstance(x, float) else str(x) for x in (each.value, each.limit)
        )
        shown.add_row(each.name, value, limit, "holds" if each.holds else "FAILS")
    return shown


def _scatter(axes: "Axes", title: str, points: Iterable[tuple[float, float, str]]) -> None:
    """Predicted over measured on logarithmic axes, with a band around equality."""
    points = list(points)
    axes.set(title=title, xlabel="measured", ylabel="predicted", xscale="log", yscale="log")
    if not points:
        return
    both = [x for measured, predicted, _ in points for x in (measured, predicted)]
    line = np.array([min(both) / 1.2, max(both) * 1.2])
    axes.fill_between(line, line * (1 - _BAND), line * (1 + _BAND), color=LIGHT)
    axes.plot(line, line, color=RED, linewidth=0.8)
    for confidence, colour in _CONFIDENCE.items():
        xs = [x for x, _, its in points if its == confidence]
        ys = [y for _, y, its in points if its == confidence]
        if xs:
            axes.scatter(xs, ys, s=14, color=colour, label=f"{confidence} confidence")
    axes.legend(loc="upper left", frameon=False)
