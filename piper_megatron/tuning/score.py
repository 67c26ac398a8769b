"""Every layout under every setting: step time and memory in closed form."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.communicators import communicators_gib, needed_gib
from piper_megatron.resources.estimate import GIB
from piper_megatron.resources.evaluate import Evaluation, Evaluator
from piper_megatron.tuning.pareto import front
from piper_megatron.tuning.parts import Run, run_here
from piper_megatron.tuning.space import Space, taken
from piper_megatron.tuning.task import Choice, Task

# the settings are searched in so many parts
PARTS = 2
STATES = "weights, gradients and optimizer alone do not fit"
ACTIVATIONS = "activations do not fit beside the states"
SLOWER = "slower than the best even without recomputation"


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
    if np.isfinite(slack) and len(table.settings[0]) > 1:
        least, most = table.ends()
        bounds = run(
            "bounds", _Table.bounds, [(table, *least), *([(table, *most)] if most else [])]
        )
        table.keep_quick(bounds, slack)
    shares = [table.settings[0][place::PARTS] for place in range(PARTS)]
    parts = run("candidates", _Table.scored, [(table, share) for share in shares if share])
    every = _merged(parts)
    points = np.array(every.points).reshape(-1, 4)
    return Scores(
        searched=space.searched,
        legal=space.legal,
        rejected=+(table.rejected + Counter({ACTIVATIONS: every.too_large})),
        best=Ranking(table, every.quickest, every.quickest_of),
        leanest=Ranking(table, every.smallest, every.smallest_of),
        front=tuple(
            Candidate(_row(table.sizes, int(row)), table.products[int(product)], step_s, needed)
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
    recomputes, dispatchers, optimizers = table.settings
    lean = [each for each in recomputes if each.name == "full"] or list(recomputes)
    return any(
        bool((legal & (found.needed_gib <= limit)).any())
        for _, found, legal in table.evaluations(tuple(lean), dispatchers, optimizers[-1:])
    )


@dataclass
class _Part:
    """What a part of the settings gave: for each layout its best value and its setting."""

    quickest: np.ndarray
    quickest_of: np.ndarray
    smallest: np.ndarray
    smallest_of: np.ndarray
    points: list[tuple[float, float, int, int]]
    too_large: int = 0


def _merged(parts: list[_Part]) -> _Part:
    every = parts[0]
    for part in parts[1:]:
        for name in ("quickest", "smallest"):
            value, choice = getattr(every, name), getattr(every, f"{name}_of")
            other, other_choice = getattr(part, name), getattr(part, f"{name}_of")
            better = other < value
            value[better], choice[better] = other[better], other_choice[better]
        every.points += part.points
        every.too_large += part.too_large
    return every


class _Table:
    """Layouts beside settings; a setting is numbered by its place in the product of the choices."""

    def __init__(self, task: Task, space: Space, limit: float) -> None:
        self.task, self.limit, self.space = task, limit, space
        self.settings = tuple(space.settings.values())
        self.products = list(itertools.product(*self.settings))
        self.rejected = Counter(space.rejected)
        self._keep(self._room_for_states(), STATES)

    @property
    def sizes(self) -> Sizes:
        """Those of the layouts that are left."""
        return self.space.sizes

    def candidate(self, row: int, product: int) -> Candidate:
        """One of the table."""
        recompute, dispatcher, optimizer = self.products[product]
        training = self.task.training(recompute, dispatcher, optimizer)
        evaluator = self._evaluator(taken(self.sizes, np.array([row])))
        found = evaluator.together(evaluator.passes(training), evaluator.states(training))
        return Candidate(
            _row(self.sizes, row),
            self.products[product],
            float(found.step_s[0]),
            float(found.needed_gib[0]),
        )

    def scored(self, recomputes: tuple[Choice, ...]) -> _Part:
        """Runs through a part of the product."""
        count = self.sizes.layouts
        part = _Part(
            np.full(count, np.inf),
            np.zeros(count, int),
            np.full(count, np.inf),
            np.zeros(count, int),
            [],
        )
        for product, found, legal in self.evaluations(recomputes, *self.settings[1:]):
            fits = legal & (found.needed_gib <= self.limit)
            part.too_large += int((legal & ~fits).sum())
            _improve(part.quickest, part.quickest_of, found.step_s, fits, product)
            _improve(part.smallest, part.smallest_of, found.needed_gib, legal, product)
            part.points += _front_points(found.step_s, found.needed_gib, fits, product)
        return part

    def evaluations(
        self,
        recomputes: tuple[Choice, ...],
        dispatchers: tuple[Choice, ...],
        optimizers: tuple[Choice, ...],
    ) -> Iterator[tuple[int, Evaluation, np.ndarray]]:
        """Number in the product, what it costs, and which layouts can have it."""
        if not self.sizes.layouts:
            return
        evaluator, training = self._evaluator(self.sizes), self.task.training
        with np.errstate(divide="ignore", invalid="ignore"):
            states = [(each, evaluator.states(training(each))) for each in optimizers]
        for recompute, dispatcher in itertools.product(recomputes, dispatchers):
            passes = None
            for optimizer, state in states:
                product = self.products.index((recompute, dispatcher, optimizer))
                legal = self._allowed(product)
                if not legal.any():
                    continue
                with np.errstate(divide="ignore", invalid="ignore"):
                    passes = passes or evaluator.passes(training(recompute, dispatcher))
                    yield product, evaluator.together(passes, state), legal

    def _allowed(self, product: int) -> np.ndarray:
        """Layouts that are legal with a setting."""
        places = np.unravel_index(product, [len(choices) for choices in self.settings])
        return self.space.allowed(dict(zip(self.space.settings, map(int, places), strict=True)))

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
        training = self.task.training(self.settings[2][-1])
        states = self._evaluator(self.sizes).states(training)
        bytes_ = np.max([each.resident + each.floor for each in states.settled], axis=0)
        overheads = self.task.platform.need_accelerator().overheads
        needed = needed_gib(bytes_ / GIB, communicators_gib(self.sizes, overheads))
        return np.asarray(needed <= self.limit)

    def ends(self) -> tuple[tuple, tuple]:
        """Choices that bound the step time of a layout, and such as are likely to fit."""
        recomputes, dispatchers, optimizers = self.settings
        some = tuple(dict.fromkeys((optimizers[0], optimizers[-1])))
        lean = tuple(each for each in recomputes[1:] if each.name in ("moe", "full"))
        return (recomputes[:1], dispatchers, some), (lean, dispatchers[:1], some) if lean else ()

    def bounds(
        self,
        recomputes: tuple[Choice, ...],
        dispatchers: tuple[Choice, ...],
        optimizers: tuple[Choice, ...],
    ) -> tuple[np.ndarray, float]:
        """Least time of every layout under some choices, and the least of all that fit."""
        least, quickest = np.full(self.sizes.layouts, np.inf), np.inf
        for _, found, legal in self.evaluations(recomputes, dispatchers, optimizers):
            least = np.where(legal, np.fmin(least, found.step_s), least)
            fits = legal & (found.needed_gib <= self.limit)
            quickest = min(quickest, found.step_s[fits].min(initial=np.inf))
        return least, float(quickest)

    def keep_quick(self, bounds: list[tuple[np.ndarray, float]], slack: float) -> None:
        """Drops layouts that cannot come within the slack of the best.

        What recomputes nothing is quickest, whether it fits or not; the quickest that fits bounds
        all others.
        """
        least = bounds[0][0]
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
