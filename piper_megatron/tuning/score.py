"""Every layout under every setting: step time and memory in closed form."""

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields

import numpy as np

from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.communicators import communicators_gib, needed_gib
from piper_megatron.resources.estimate import GIB
from piper_megatron.resources.evaluate import Evaluation, Evaluator
from piper_megatron.tuning.pareto import front
from piper_megatron.tuning.parts import Run, run_here
from piper_megatron.tuning.space import Space, taken
from piper_megatron.tuning.task import SPLIT, VIRTUAL, Choice, Task

# the settings are searched in so many parts
PARTS = 4
# layouts for which rare settings are tried
REFINED = 64
STATES = "stage: weights, gradients and optimizer alone do not fit"
ACTIVATIONS = "stage: activations do not fit beside the states"
SLOWER = "stage: slower than the best even without recomputation"
COMMON = "stage: rare settings of layouts that are not among the best"

# places of recomputation and dispatcher
Pair = tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """One layout under one setting, as the closed form sees it.

    Attributes:
        sizes: axis -> size.
        choices: of recomputation, dispatcher and optimizer.
        step_s, needed_gib: predicted.
    """

    sizes: dict[str, int]
    choices: tuple[Choice, ...]
    step_s: float
    needed_gib: float


@dataclass(frozen=True)
class Scores:
    """What is left of a space.

    Attributes:
        searched: number of candidates, legal or not.
        legal: number of legal candidates.
        rejected: reason -> number of candidates, illegal and too large ones.
        best: quickest fitting candidate of every layout that has one, the quickest first.
        leanest: candidates by memory, one of every layout, the smallest first; whether they fit or
            not.
        front: fitting candidates of which none is quicker and smaller than another.
    """

    searched: int
    legal: int
    rejected: Counter[str]
    best: "Ranking"
    leanest: "Ranking"
    front: tuple[Candidate, ...]


class Ranking:
    """Candidates in order, made when they are asked for."""

    def __init__(self, table: "_Table", value: np.ndarray, choice: np.ndarray) -> None:
        order = np.argsort(value, kind="stable")
        self._rows = order[np.isfinite(value[order])]
        self._table, self._choice = table, choice

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Candidate:
        row = int(self._rows[place])
        return self._table.candidate(row, int(self._choice[row]))

    def within(self, limits: Mapping[int, float], run: Run) -> list[Candidate]:
        """The quickest of the layouts of some places within other limits, in GiB; where any is."""
        rows = self._rows[list(limits)]
        table = self._table.few(rows, np.array(list(limits.values())))
        pairs = [pair for some in table.pairs() for pair in some]
        found = _merged(run("leaner finalists", _Table.scored, table.shares(pairs)))
        return [
            table.candidate(row, int(found.quickest_of[row]))
            for row in np.flatnonzero(np.isfinite(found.quickest)).tolist()
        ]


def score(task: Task, space: Space, limit: float, slack: float, run: Run = run_here) -> Scores:
    """Scores a whole space.

    Args:
        task: what is tuned.
        space: its layouts.
        limit: GiB of the device that a candidate may need.
        slack: layouts that cannot come within so many times the best step are not looked into.
        run: runs parts of the work.
    """
    table = _Table(task, space, limit)
    if np.isfinite(slack):
        table.keep_quick(run("bounds", _Table.bounds, table.shares(table.ends())), slack)
    common, rare = table.pairs()
    every = _merged(run("candidates", _Table.scored, table.shares(common)))
    best = np.argsort(every.quickest, kind="stable")[:REFINED]
    if rare:
        for part in run("settings", _Table.scored, table.few(best).shares(rare)):
            every.refine(best, part)
    lost = Counter({ACTIVATIONS: every.too_large, COMMON: table.legal() - every.seen})
    points = np.array(every.points).reshape(-1, 4)
    return Scores(
        searched=space.searched,
        legal=space.legal,
        rejected=+(table.rejected + lost),
        best=Ranking(table, every.quickest, every.quickest_of),
        leanest=Ranking(table, every.smallest, every.smallest_of),
        front=tuple(
            Candidate(_row(table.sizes, int(row)), table.choices(int(product)), step_s, needed)
            for step_s, needed, row, product in points[front(points[:, :2])].tolist()
        ),
    )


def fits(task: Task, space: Space, limit: float) -> bool:
    """Whether any candidate needs no more than the limit.

    Args:
        task: what is tuned.
        space: its layouts.
        limit: GiB of the device that a candidate may need.
    """
    table = _Table(task, space, limit)
    recomputes = table.space.settings["recompute"]
    lean = [i for i, each in enumerate(recomputes) if each.name == "full"]
    pairs = [pair for pair in table.pairs()[0] if not lean or pair[0] in lean]
    return any(
        bool((legal & (found.needed_gib <= limit)).any())
        for _, found, legal in table.evaluations(pairs)
    )


@dataclass
class _Part:
    """What some of the settings gave: for each layout its best value and its setting.

    Attributes:
        quickest, quickest_of: seconds of the quickest that fits, and its number.
        smallest, smallest_of: GiB of the smallest, and its number.
        points: seconds, GiB, layout and number of those that none of these beats in both.
        seen, too_large: legal candidates, and those of them that do not fit.
    """

    quickest: np.ndarray
    quickest_of: np.ndarray
    smallest: np.ndarray
    smallest_of: np.ndarray
    points: list[tuple[float, float, int, int]]
    seen: int = 0
    too_large: int = 0

    def refine(self, rows: np.ndarray, part: "_Part") -> None:
        """Takes over what is better in a part that is about some of the layouts."""
        for name in ("quickest", "smallest"):
            value, choice = getattr(self, name), getattr(self, f"{name}_of")
            other, other_choice = getattr(part, name), getattr(part, f"{name}_of")
            better = other < value[rows]
            value[rows[better]], choice[rows[better]] = other[better], other_choice[better]
        self.points += [(step_s, gib, int(rows[row]), of) for step_s, gib, row, of in part.points]
        self.seen += part.seen
        self.too_large += part.too_large


def _merged(parts: list[_Part]) -> _Part:
    every, *others = parts
    for part in others:
        every.refine(np.arange(len(every.quickest)), part)
    return every


class _Table:
    """Layouts beside settings; a setting is numbered by its place in the product of the choices."""

    def __init__(self, task: Task, space: Space, limit: float) -> None:
        self.task, self.space = task, space
        self.limit: float | np.ndarray = limit
        self.rejected = Counter(space.rejected)
        self._keep(self._room_for_states(), STATES)

    @property
    def sizes(self) -> Sizes:
        """Those of the layouts that are left."""
        return self.space.sizes

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(len(choices) for choices in self.space.settings.values())

    def legal(self) -> int:
        """Legal candidates that are left."""
        return int(self.space.counts()[0].sum())

    def few(self, rows: np.ndarray, limits: np.ndarray | None = None) -> "_Table":
        """Some of the layouts, with limits of their own."""
        table = copy(self)
        table.space = self.space.taken(rows)
        if limits is not None:
            table.limit = limits
        return table

    def choices(self, product: int) -> tuple[Choice, ...]:
        """Those of a number."""
        places = np.unravel_index(product, self._shape)
        return tuple(
            choices[place]
            for choices, place in zip(self.space.settings.values(), places, strict=True)
        )

    def candidate(self, row: int, product: int) -> Candidate:
        """One of the table."""
        chosen = self.choices(product)
        training = self.task.training(*chosen)
        evaluator = self._evaluator(taken(self.sizes, np.array([row])))
        found = evaluator.together(evaluator.passes(training), evaluator.states(training))
        return Candidate(
            _row(self.sizes, row), chosen, float(found.step_s[0]), float(found.needed_gib[0])
        )

    def pairs(self) -> tuple[list[Pair], list[Pair]]:
        """Common recomputations with common dispatchers, and what is left."""
        settings = self.space.settings
        common: list[Pair] = []
        rare: list[Pair] = []
        for i, recompute in enumerate(settings["recompute"]):
            for j, dispatcher in enumerate(settings["dispatcher"]):
                (rare if recompute.rare or dispatcher.rare else common).append((i, j))
        return common, rare

    def shares(self, pairs: list[Pair]) -> list[tuple["_Table", list[Pair]]]:
        """The work on some settings in parts."""
        parts = [pairs[place::PARTS] for place in range(PARTS)]
        return [(self, part) for part in parts if part]

    def scored(self, pairs: list[Pair]) -> _Part:
        """Runs through some of the settings."""
        worst, none = np.full(self.sizes.layouts, np.inf), np.zeros(self.sizes.layouts, int)
        part = _Part(worst, none, worst.copy(), none.copy(), [])
        for product, found, legal in self.evaluations(pairs):
            fits = legal & (found.needed_gib <= self.limit)
            part.seen += int(legal.sum())
            part.too_large += int((legal & ~fits).sum())
            _improve(part.quickest, part.quickest_of, found.step_s, fits, product)
            _improve(part.smallest, part.smallest_of, found.needed_gib, legal, product)
            part.points += _front_points(found.step_s, found.needed_gib, fits, product)
        return part

    def evaluations(self, pairs: list[Pair]) -> Iterator[tuple[int, Evaluation, np.ndarray]]:
        """Number in the product, what it costs, and which layouts can have it."""
        if not self.sizes.layouts:
            return
        settings, training = self.space.settings, self.task.training
        evaluator = self._evaluator(self.sizes)
        with np.errstate(divide="ignore", invalid="ignore"):
            states = [evaluator.states(training(each)) for each in settings["optimizer"]]
        for i, j in pairs:
            passes = None
            for k, state in enumerate(states):
                legal = self.space.allowed({"recompute": i, "dispatcher": j, "optimizer": k})
                if not legal.any():
                    continue
                with np.errstate(divide="ignore", invalid="ignore"):
                    passes = passes or evaluator.passes(
                        training(settings["recompute"][i], settings["dispatcher"][j])
                    )
                    found = evaluator.together(passes, state)
                yield int(np.ravel_multi_index((i, j, k), self._shape)), found, legal

    def _keep(self, kept: np.ndarray, reason: str) -> None:
        """Drops layouts; where none would stay, all do, so that the nearest miss can be told."""
        if not kept.any():
            return
        legal, _ = self.space.counts()
        self.rejected[reason] += int(legal[~kept].sum())
        self.space = self.space.taken(np.flatnonzero(kept))

    def _room_for_states(self) -> np.ndarray:
        """Layouts whose states fit under the leanest optimizer."""
        if not self.sizes.layouts:
            return np.zeros(0, dtype=bool)
        evaluator, least = self._evaluator(self.sizes), np.full(self.sizes.layouts, np.inf)
        for optimizer in self.space.settings["optimizer"]:
            with np.errstate(divide="ignore", invalid="ignore"):
                states = evaluator.states(self.task.training(optimizer))
                bytes_ = np.max([each.resident + each.floor for each in states.settled], axis=0)
            least = np.fmin(least, bytes_)
        overheads = self.task.platform.need_accelerator().overheads
        needed = needed_gib(least / GIB, communicators_gib(self.sizes, overheads))
        return np.asarray(needed <= self.limit)

    def ends(self) -> list[Pair]:
        """Settings that bound the step time of a layout, and such as are likely to fit."""
        recomputes, dispatchers = (self.space.settings[n] for n in ("recompute", "dispatcher"))
        lean = [i for i, each in enumerate(recomputes) if each.name in ("moe", "full")]
        every = [(0, j) for j in range(len(dispatchers))]
        return [*every, *((i, j) for i in lean for j in range(len(dispatchers))[:1])]

    def bounds(self, pairs: list[Pair]) -> tuple[np.ndarray, float]:
        """Least time of every layout without recomputation, and the least of all that fit."""
        least, quickest = np.full(self.sizes.layouts, np.inf), np.inf
        for product, found, legal in self.evaluations(pairs):
            if np.unravel_index(product, self._shape)[0] == 0:
                least = np.where(legal, np.fmin(least, found.step_s), least)
            fits = legal & (found.needed_gib <= self.limit)
            quickest = min(quickest, found.step_s[fits].min(initial=np.inf))
        return least, float(quickest)

    def keep_quick(self, bounds: list[tuple[np.ndarray, float]], slack: float) -> None:
        """Drops layouts that cannot come within the slack of the best.

        What recomputes nothing is quickest, whether it fits or not; the quickest that fits bounds
        all others.
        """
        least = np.min([each for each, _ in bounds], axis=0)
        quickest = min(quickest for _, quickest in bounds)
        self._keep(least <= slack * quickest, SLOWER)

    def _evaluator(self, sizes: Sizes) -> Evaluator:
        task = self.task
        return Evaluator(
            task.model,
            task.training(),
            sizes,
            task.platform,
            stack=task.stack,
            imbalance=task.imbalance,
            orders=task.orders,
            by_time=not task.fixed((*VIRTUAL, *SPLIT)),
        )


def _improve(
    best: np.ndarray, best_of: np.ndarray, value: np.ndarray, allowed: np.ndarray, product: int
) -> None:
    better = allowed & (value < best)
    best[better] = value[better]
    best_of[better] = product


def _front_points(
    step_s: np.ndarray, needed: np.ndarray, fits: np.ndarray, product: int
) -> list[tuple[float, float, int, int]]:
    rows = np.flatnonzero(fits)
    chosen = rows[front(np.stack([step_s[rows], needed[rows]], axis=1))]
    return [(float(step_s[r]), float(needed[r]), int(r), product) for r in chosen]


def _row(sizes: Sizes, row: int) -> dict[str, int]:
    return {
        field.name: int(getattr(sizes, field.name)[row])
        for field in fields(sizes)
        if isinstance(getattr(sizes, field.name), np.ndarray)
    }
