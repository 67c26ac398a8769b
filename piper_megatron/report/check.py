"""The findings of a check as text: the verdict, then each finding with its fix."""

import textwrap
from collections.abc import Iterator, Sequence

from piper_megatron.check.finding import Finding, verdict
from piper_megatron.platform.platform import Platform
from piper_megatron.report.text import count, render

LATE = "Megatron starts with it"
INDENT = 9


def render_check(
    findings: Sequence[Finding], gpus: int | None, platform: Platform | None, width: int
) -> str:
    """The whole report, plain text.

    Args:
        findings: the worst first.
        gpus: number of ranks; None where the command cannot be read.
        platform: where the job is to run; None says that memory and network were not judged.
        width: columns of the terminal.
    """
    return render([_headline(findings, gpus, platform), *_blocks(findings, width)])


def _headline(findings: Sequence[Finding], gpus: int | None, platform: Platform | None) -> str:
    counts = [
        count(number, severity)
        for severity in ("error", "warning")
        if (number := sum(finding.severity == severity for finding in findings))
    ]
    told = f"{verdict(findings).upper()}: {', '.join(counts) or 'nothing to mend'}"
    if gpus is None:
        return told
    where = f" on {count(gpus, 'GPU')}{f' of {platform.name}' if platform else ''}"
    judged = "" if platform else "; memory and network are not judged without --platform"
    return f"{told}{where}{judged}"


def _blocks(findings: Sequence[Finding], width: int) -> Iterator[str]:
    for finding in findings:
        late = f" ({LATE})" if finding.late else ""
        rows: list[tuple[str, str]] = [(finding.severity, f"{finding.message}{late}")]
        if finding.fix:
            rows.append(("  fix", finding.fix))
        rows.append(("  rule", f"{finding.id}: {finding.source}"))
        yield "\n".join(_row(label, text, width) for label, text in rows)


def _row(label: str, text: str, width: int) -> str:
    """A label and a wrapped text; flags are not broken at their hyphens."""
    return textwrap.fill(
        text,
        width,
        initial_indent=label.ljust(INDENT),
        subsequent_indent=" " * INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )
