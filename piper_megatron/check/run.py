"""The check as a whole."""

from collections.abc import Mapping

from piper_megatron.check.command import Command
from piper_megatron.check.finding import Finding
from piper_megatron.check.rule import RULES
from piper_megatron.check import rules  # noqa: F401


def judge(command: Command) -> list[Finding]:
    """What the rules say of a command."""
    for first in (True, False):
        found = [
            finding
            for rule in RULES
            if rule.first is first and (finding := rule.finding(command))
        ]
        if any(finding.severity == "error" for finding in found):
            return found
    return found
