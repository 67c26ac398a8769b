"""The check as a whole."""

from collections.abc import Mapping

from piper_megatron.check import rules  # noqa: F401  (registers them)
from piper_megatron.check.command import Command
from piper_megatron.check.finding import Finding
from piper_megatron.check.memory import memory_findings
from piper_megatron.check.rule import RULES
from piper_megatron.errors import LayoutError, WorkloadError
from piper_megatron.platform.platform import Platform
from piper_megatron.workload.arguments import Arguments

_ORDER = {"error": 0, "warning": 1, "info": 2}


def check(
    arguments: Arguments,
    gpus: int,
    platform: Platform | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """What a user should know before a command is started, the worst first.

    Args:
        arguments: the command.
        gpus: number of ranks.
        platform: where it is to run; without one, memory and network are not judged.
        environment: variables that the job is known to have.
    """
    command = Command(
        arguments.values, arguments.given, gpus, arguments.unknown, platform, environment or {}
    )
    found = judge(command)
    runs = all(finding.severity != "error" for finding in found)
    if runs and platform is not None and platform.accelerator is not None:
        found += memory_findings(command, _would_run)
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def _would_run(command: Command) -> bool:
    return all(finding.severity != "error" for finding in judge(command))


def unreadable(error: WorkloadError | LayoutError) -> Finding:
    """A command that Megatron's parser would refuse, as a finding."""
    message, _, fix = str(error).partition("; ")
    return Finding(
        id="arguments.unreadable",
        severity="error",
        message=message,
        fix=fix,
        source="megatron/training/arguments.py:138 (Megatron's parser)",
    )


def judge(command: Command) -> list[Finding]:
    """What the rules say of a command.

    Where a size is missing or not positive nothing else is asked: the other rules rely on them.
    """
    found: list[Finding] = []
    for first in (True, False):
        chosen = [rule for rule in RULES if rule.first is first]
        found += [finding for rule in chosen if (finding := rule.finding(command))]
        if any(finding.severity == "error" for finding in found):
            return found
    return found
