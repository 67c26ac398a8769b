"""A calibration as text and JSON: runs before and after, constants, memory, what to look at."""

from typing import Any

from rich.table import Table

from piper_megatron.calibration.calibrate import Calibration, Correction, RunResult
from piper_megatron.calibration.timing import StepTiming
from piper_megatron.report.estimate import parallel_sizes
from piper_megatron.report.text import count, facts, percent, render, seconds, table


def calibration_json(found: Calibration, out: str | None) -> dict[str, Any]:
    """Everything that the text says, for programs."""
    before, after = found.reserved_ratio
    return {
        "platform": found.platform.name,
        "stack": found.stack,
        "runs": [_run_json(result) for result in found.runs],
        "constants": [_correction_json(each) for each in found.corrections],
        "reserved_ratio": {"before": before, "after": after},
        "warnings": list(found.warnings),
        "written": out,
    }


def render_calibration(found: Calibration, out: str | None, width: int) -> str:
    """The whole report, plain text.

    Args:
        found: what to show.
        out: where the platform was written.
        width: columns of the terminal.
    """
    fitted = sum(each.error is not None for each in found.corrections)
    what = [count(fitted, "constant") + " of time"]
    what += ["reserved memory"] if found.reserved_ratio[1] is not None else []
    blocks: list[str | Table] = [
        f"{found.platform.name}, software stack '{found.stack}': {' and '.join(what)} corrected "
        f"by {count(len(found.runs), 'run')}",
        _runs(found.runs),
        _constants(found),
    ]
    if any(result.memory for result in found.runs):
        blocks.append(_memory(found.runs))
    blocks.append(facts(_notes(found, out), width))
    return render(blocks)


def _run_json(result: RunResult) -> dict[str, Any]:
    run, timing = result.run, result.run.timing
    before, after = result.errors
    return {
        "log": run.log.name,
        "layout": parallel_sizes(run.job),
        "measured_s": timing.median_s,
        "spread": timing.spread,
        "lines": timing.lines,
        "left_out": _left_out(timing),
        "before_s": result.before_s,
        "after_s": result.after_s,
        "error_before": before,
        "error_after": after,
        "taken_from_log": list(run.taken),
        "memory": [vars(rank) | {"reserved_ratio": rank.reserved_ratio} for rank in result.memory],
    }


def _correction_json(each: Correction) -> dict[str, Any]:
    return {
        "name": each.constant.name,
        "key": each.constant.key,
        "before": each.constant.value,
        "after": each.after,
        "speed": each.speed,
        "share_of_step": each.share,
        "error": each.error,
        "fitted": each.error is not None,
        "why": each.why,
    }


def _left_out(timing: StepTiming) -> dict[str, int]:
    counts = {
        "warm-up": timing.warm_up,
        "outliers": timing.outliers,
        "skipped": timing.skipped,
        "other batch": timing.other_batches,
    }
    return {why: number for why, number in counts.items() if number}


def _runs(results: tuple[RunResult, ...]) -> Table:
    shown = table(
        "run", "layout", "lines", "left out", "measured", "spread", "before", "error", "after",
        "error", left=(0, 1, 3),
    )  # fmt: skip
    for result in results:
        timing = result.run.timing
        before, after = result.errors
        left_out = ", ".join(f"{number} {why}" for why, number in _left_out(timing).items())
        shown.add_row(
            result.run.log.name,
            parallel_sizes(result.run.job),
            str(timing.lines),
            left_out,
            seconds(timing.median_s),
            percent(timing.spread),
            seconds(result.before_s),
            f"{before:+.1%}",
            seconds(result.after_s),
            f"{after:+.1%}",
        )
    return shown


def _constants(found: Calibration) -> Table:
    shown = table("constant", "before", "after", "", "share of step", "", left=(0, 3, 5))
    for each in found.corrections:
        error = "" if each.error is None else f"+- {percent(each.error)}"
        shown.add_row(
            each.constant.key,
            f"{each.constant.value:.4g}",
            f"{each.after:.4g}",
            error,
            percent(each.share),
            each.why,
        )
    before, after = found.reserved_ratio
    why = "measured: the median of the ranks" if after else "stays: no memory report in the logs"
    shown.add_row("reserved_ratio", f"{before:.4g}", f"{after or before:.4g}", "", "", why)
    return shown


def _memory(results: tuple[RunResult, ...]) -> Table:
    shown = table(
        "run", "rank", "stage", "allocated GiB", "predicted", "error", "reserved", "ratio"
    )
    for result in results:
        for rank in result.memory:
            shown.add_row(
                result.run.log.name,
                str(rank.rank),
                str(rank.stage),
                f"{rank.measured_gib:.2f}",
                f"{rank.predicted_gib:.2f}",
                f"{rank.predicted_gib / rank.measured_gib - 1:+.1%}",
                f"{rank.reserved_gib:.2f}",
                f"{rank.reserved_ratio:.3f}",
            )
    return shown


def _notes(found: Calibration, out: str | None) -> list[tuple[str, str]]:
    notes = [("warning", text) for text in found.warnings]
    notes += [
        ("from the log", f"{result.run.log.name} was run with {', '.join(result.run.taken)}")
        for result in found.runs
        if result.run.taken
    ]
    if out is None:
        return [*notes, ("not written", "--out FILE writes the corrected platform")]
    return [*notes, ("written", f"{out}; use it as --platform {out}")]
