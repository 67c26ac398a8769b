"""What `check` says of thousands of combinations: every rule asked once for all that look alike.

A rule is a function of a command. Which of the axes and settings it depends on shows when it looks
at them: two combinations that agree in all it looked at get the same answer. So a rule is asked of
the distinct values of these alone, and no rule is written down a second time for the search.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from piper_megatron.check import rules  # noqa: F401  (registers them)
from piper_megatron.check.command import Command
from piper_megatron.check.rule import RULES, Rule
from piper_megatron.tuning.task import AXES, SPLIT, VIRTUAL, Choice, Task

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """Combinations that something refuses.

    Attributes:
        reason: what refuses.
        settings: names of the settings on which it depends.
        which: [layouts] place in `refused`.
        refused: [places, choices of each of these settings].
        explanation: of one refusal, with what would mend it.
    """

    reason: str
    settings: tuple[str, ...]
    which: np.ndarray
    refused: np.ndarray
    explanation: str = ""

    @cached_property
    def _masks(self) -> dict[tuple[int, ...], np.ndarray]:
        return {}

    def of(self, choices: Mapping[str, int]) -> np.ndarray:
        """Whether each layout is refused with choices, setting -> place."""
        places = tuple(choices[name] for name in self.settings)
        if places not in self._masks:
            self._masks[places] = self.refused[(self.which, *places)]
        return self._masks[places]

    def taken(self, rows: np.ndarray) -> "Verdict":
        """The same for some of the layouts."""
        return replace(self, which=self.which[rows])


class Judge:
    """The rules that can refuse, each asked as soon as all is known that it looks at."""

    def __init__(self, task: Task, settings: Mapping[str, Sequence[Choice]]) -> None:
        self._task, self._settings = task, settings
        self._pending = [rule for rule in RULES if rule.severity == "error"]
        self._given = task.given.union(
            *(choice.values for choices in settings.values() for choice in choices)
        )
        self._axes_of = _axes_of(task, settings)

    def verdicts(self, layouts: Callable[[], Columns], *, settings: bool) -> Iterator[Verdict]:
        """Those of the rules that need no more than is known; they are not asked again.

        Args:
            layouts: axis -> its size in every layout, as far as they are made up; asked anew for
                every rule, so that what one refuses need not be shown to the next.
            settings: whether rules may look at settings too.
        """
        for rule in list(self._pending):
            columns = layouts()
            if not len(next(iter(columns.values()))):
                return
            verdict = self._verdict(rule, columns, self._settings.keys() if settings else set())
            if verdict is None:
                continue
            self._pending.remove(rule)
            if verdict.refused.any():
                yield verdict

    def _verdict(self, rule: Rule, columns: Columns, settings: Set[str]) -> Verdict | None:
        """None where the rule looks at more than is known."""
        looks_at: list[str] = []
        while True:
            try:
                return self._asked(rule, columns, looks_at)
            except _UnknownError as unknown:
                looks_at += unknown.axes
                if not columns.keys() | settings >= set(looks_at):
                    return None

    def _asked(self, rule: Rule, columns: Columns, looks_at: Sequence[str]) -> Verdict:
        axes = [name for name in looks_at if name in columns]
        settings = tuple(name for name in looks_at if name not in columns)
        rows, which = distinct(columns, axes)
        shape = (len(rows), *(len(self._settings[name]) for name in settings))
        refused = np.zeros(shape, dtype=bool)
        for place in np.ndindex(*shape):
            sizes = {axis: int(columns[axis][rows[place[0]]]) for axis in axes}
            chosen = {
                name: self._settings[name][number]
                for name, number in zip(settings, place[1:], strict=True)
            }
            refused[place] = bool(rule.judge(self._command(sizes, chosen)))
        return Verdict(
            reason=f"{rule.id}: {rule.judge.__name__.replace('_', ' ')}",
            settings=settings,
            which=which,
            refused=refused,
            explanation=self._explained(rule, columns, settings, which, refused),
        )

    def _command(self, sizes: Mapping[str, int], chosen: Mapping[str, Choice]) -> Command:
        changes = self._task.size_values(sizes)
        for choice in chosen.values():
            changes |= choice.values
        values = _Watched(self._task.base, changes, self._axes_of, sizes.keys() | chosen.keys())
        return Command(values, self._given, self._task.gpus, (), self._task.platform)

    def _explained(
        self,
        rule: Rule,
        columns: Columns,
        settings: tuple[str, ...],
        which: np.ndarray,
        refused: np.ndarray,
    ) -> str:
        if not refused.any():
            return ""
        place = np.argwhere(refused)[-1]
        row = int(np.flatnonzero(which == place[0])[0])
        changes = self._task.size_values({axis: int(c[row]) for axis, c in columns.items()})
        for name, number in zip(settings, place[1:], strict=True):
            changes |= self._settings[name][number].values
        finding = rule.finding(self._task.command(changes))
        assert finding is not None, rule.id
        return f"{finding.message}; {finding.fix}"


def distinct(columns: Columns, axes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """A layout for every combination of sizes of some axes, and for every layout its place there.

    Args:
        columns: axis -> [layouts].
        axes: those that count; without any, all layouts are alike.
    """
    keys = np.zeros(len(next(iter(columns.values()))), dtype=np.int64)
    for axis in axes:
        values, codes = np.unique(columns[axis], return_inverse=True)
        keys = keys * len(values) + codes
    _, rows, which = np.unique(keys, return_index=True, return_inverse=True)
    return rows, which


def _axes_of(task: Task, settings: Mapping[str, Sequence[Choice]]) -> dict[str, tuple[str, ...]]:
    """Destination -> axes and settings that decide it; of those that the user has left open."""
    found: dict[str, tuple[str, ...]] = {dest: (axis,) for axis, dest in AXES.items()}
    if task.model.experts is None:
        del found[AXES["ep"]], found[AXES["etp"]]
    found["sequence_parallel"] = ("tp",)
    found |= dict.fromkeys((VIRTUAL[0], SPLIT[0]), ("pp", "vpp"))
    found = {dest: axes for dest, axes in found.items() if dest not in task.given}
    if task.fixed((*VIRTUAL, *SPLIT)):
        found.pop(SPLIT[0], None)
    for name, choices in settings.items():
        for choice in choices:
            found |= dict.fromkeys(choice.values, (name,))
    return found


class _UnknownError(Exception):
    """A rule looked at what is not known yet."""

    def __init__(self, axes: list[str]) -> None:
        self.axes = axes


class _Watched(argparse.Namespace):
    """Values of a command; whoever looks at one that is not known yet is stopped."""

    def __init__(
        self,
        base: argparse.Namespace,
        changes: Mapping[str, Any],
        axes_of: Mapping[str, tuple[str, ...]],
        known: Set[str],
    ) -> None:
        self._base, self._changes, self._axes_of, self._known = vars(base), changes, axes_of, known

    def __getattr__(self, name: str) -> Any:
        if name in self._changes:
            return self._changes[name]
        unknown = [axis for axis in self._axes_of.get(name, ()) if axis not in self._known]
        if unknown:
            raise _UnknownError(unknown)
        try:
            return self._base[name]
        except KeyError:
            raise AttributeError(name) from None
