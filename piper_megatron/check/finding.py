"""What a check says: findings, and the verdict that follows from them."""

from collections.abc import Iterable
from typing import Literal

from piper_megatron.strict import StrictModel

Severity = Literal["error", "warning", "info"]
Verdict = Literal["ok", "warning", "error"]


class Finding(StrictModel):
    """One thing that a user should know before the job is started.

    Attributes:
        id: of the rule, stable.
        severity: `error` when the job will not run, `warning` when it will run slowly or not do
            what was meant, `info` for the rest.
        message: what is wrong, with the values of this command.
        fix: the smallest change that mends it; empty when there is nothing to mend.
        source: file and line in Megatron and the releases that have it, or who reported it.
        late: Megatron starts with it; it fails when the model is built or at the first step, or
            trains nothing of use.
    """

    id: str
    severity: Severity
    message: str
    fix: str
    source: str
    late: bool = False


def verdict(findings: Iterable[Finding]) -> Verdict:
    """The worst severity; information alone is ok."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return "error"
    return "warning" if "warning" in severities else "ok"
