"""Rules: small functions that look at a command and say what is wrong with it.

A rule returns False or None when all is well, True when its docstring is the message, or a
`Problem` when the message needs numbers of its own. Docstrings and fixes are format strings over
`c`, the command.
"""

from collections.abc import Callable
from dataclasses import dataclass

from piper_megatron.check.command import Command
from piper_megatron.check.finding import Finding, Severity

RELEASES = ("0.17.1", "0.18.2", "0.19.2")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a command, and the smallest change that mends it."""

    message: str
    fix: str


Judgement = Callable[[Command], "bool | Problem | None"]


@dataclass(frozen=True)
class Rule:
    """A rule with where it comes from.

    Attributes:
        id: stable name; shown to users.
        judge: finds the problem.
        severity: of the finding.
        at: places in Megatron 0.19.2 that refuse, as `training/arguments.py:430`.
        since: first release of `RELEASES` that has it.
        source: who reported it, for rules that are not Megatron's.
        fix: default fix.
        late: Megatron notices only when the model is built or at the first step.
        first: the other rules can assume that it holds.
    """

    id: str
    judge: Judgement
    severity: Severity
    at: tuple[str, ...]
    since: str
    source: str
    fix: str
    late: bool
    first: bool

    def finding(self, command: Command) -> Finding | None:
        """What the rule says of a command; None when all is well."""
        problem = self.judge(command)
        if not problem:
            return None
        if problem is True:
            message = " ".join((self.judge.__doc__ or "").split()).removesuffix(".")
            problem = Problem(message.format(c=command), self.fix.format(c=command))
        return Finding(
            id=self.id,
            severity=self.severity,
            message=problem.message,
            fix=problem.fix,
            source=self.citation(),
            late=self.late,
        )

    def citation(self) -> str:
        """Where the rule comes from, for users."""
        if not self.at:
            return self.source
        places = ", ".join(f"megatron/{place}" for place in self.at)
        releases = ", ".join(RELEASES[RELEASES.index(self.since) :])
        return f"{places} (Megatron-Core {releases})"


RULES: list[Rule] = []


def rule(
    id: str,
    *at: str,
    fix: str = "",
    severity: Severity = "error",
    since: str = RELEASES[0],
    source: str = "",
    late: bool = False,
    first: bool = False,
) -> Callable[[Judgement], Judgement]:
    """Registers a rule; the arguments are those of `Rule`."""
    assert bool(at) != bool(source), id
    assert all(known.id != id for known in RULES), id

    def register(judge: Judgement) -> Judgement:
        RULES.append(Rule(id, judge, severity, at, since, source, fix, late, first))
        return judge

    return register
