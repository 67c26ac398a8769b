"""The layouts that Megatron would take, and why it would not take the others.

Sizes are built up axis by axis. After every step those rules of `check` are asked that look at no
more than these axes (`legality.py`), and the bounds of the search itself; what they refuse is not
built upon.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import isqrt, prod
from typing import Any

import numpy as np

from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.dispatch import fast_level
from piper_megatron.resources.reach import domain_sizes
from piper_megatron.tuning.legality import Columns, Judge, Verdict, distinct
from piper_megatron.tuning.settings import GROUPS, settings_of
from piper_megatron.tuning.task import AXES, SPLIT, VIRTUAL, Choice, Task

# a context rank's piece of the sequence; shorter ones leave kernels idle
LEAST_TOKENS = 1024
LARGEST_MICRO_BATCH = 16
MOST_VIRTUAL_STAGES = 24
# axes in the order in which they are built up
_STEPS = (("pp", "vpp"), ("tp", "cp"), ("micro_batch",), ("ep",), ("etp",))

FAST_TP = "bound: TP within the fastest network"
FAST_ETP = "bound: ETP within the fastest network"
TOKENS = f"bound: at least {LEAST_TOKENS:,} tokens of a sequence on a context rank"
SHARED_OUT = "bound: a pipeline layout that shares out the layers"
AS_ASKED = "bound: VPP as the arguments say"
SMALLER = "bound: virtual stages that hold less than fewer would"
Bound = tuple[str, Callable[[Columns], np.ndarray]]
USEFUL = "bound: a dispatcher that works on this network and has something to do"


@dataclass(frozen=True)
class Space:
    """Layouts and settings.

    Attributes:
        sizes: arrays [layouts] of every one that is legal with some settings.
        settings: setting -> its choices.
        verdicts: what refuses layouts with some of the choices.
        searched: combinations of all axes and settings.
        legal: those that Megatron would take.
        rejected: reason -> number of these that it refused.
        refusal: where no layout is left, why not.
    """

    sizes: Sizes
    settings: dict[str, tuple[Choice, ...]]
    verdicts: tuple[Verdict, ...]
    searched: int
    legal: int
    rejected: Counter[str]
    refusal: str

    def __len__(self) -> int:
        return self.sizes.layouts

    def allowed(self, choices: Mapping[str, int]) -> np.ndarray:
        """Whether each layout is legal with choices, setting -> place."""
        allowed = np.ones(len(self), dtype=bool)
        for verdict in self.verdicts:
            allowed &= ~verdict.of(choices)
        return allowed

    def counts(self) -> tuple[np.ndarray, Counter[str]]:
        """Legal candidates of each layout, and how many each reason refused."""
        looked_at = dict.fromkeys(name for verdict in self.verdicts for name in verdict.settings)
        alike = prod(len(some) for name, some in self.settings.items() if name not in looked_at)
        legal = np.zeros(len(self), dtype=np.int64)
        rejected: Counter[str] = Counter()
        for places in product(*(range(len(self.settings[name])) for name in looked_at)):
            allowed = np.ones(len(self), dtype=bool)
            for verdict in self.verdicts:
                refused = verdict.of(dict(zip(looked_at, places, strict=True)))
                rejected[verdict.reason] += int((allowed & refused).sum()) * alike
                allowed &= ~refused
            legal += allowed
        return legal * alike, rejected

    def taken(self, rows: np.ndarray) -> "Space":
        """Some of the layouts."""
        verdicts = tuple(verdict.taken(rows) for verdict in self.verdicts)
        return replace(self, sizes=taken(self.sizes, rows), verdicts=verdicts)


def taken(sizes: Sizes, rows: np.ndarray) -> Sizes:
    """Some of many layouts."""
    varying: dict[str, Any] = {
        field.name: getattr(sizes, field.name)[rows]
        for field in fields(sizes)
        if isinstance(getattr(sizes, field.name), np.ndarray)
    }
    return replace(sizes, **varying)


def layouts(task: Task) -> Space:
    """Every legal layout of a task."""
    axes, settings = _axes(task), settings_of(task)
    judge, bounds = Judge(task, settings), _bounds(task)
    builder = _Builder()
    searched = prod(map(len, (*axes.values(), *settings.values())))
    later = searched
    for step in _STEPS:
        for name in step:
            builder.cross(name, axes[name])
            later //= len(axes[name])
        for reason, fits in bounds.get(step[-1], ()):
            builder.keep(fits(builder.columns), reason, reason, later)
        for verdict in judge.verdicts(lambda: builder.columns, settings=False):
            builder.keep(~verdict.of({}), verdict.reason, verdict.explanation, later)
    columns = dict(builder.columns)
    verdicts = [*_useful(task, settings, columns), *judge.verdicts(lambda: columns, settings=True)]
    if task.model.experts is None:
        columns["etp"] = columns["tp"]
    values = task.base
    sizes = Sizes(
        world=task.gpus, global_batch=values.global_batch_size, seq=values.seq_length, **columns
    )
    space = Space(sizes, settings, tuple(verdicts), searched, 0, builder.rejected, builder.refusal)
    return _counted(space)


def culprits(task: Task) -> list[str]:
    """Arguments of the user that leave no layout, each by itself: without it there are some."""
    found = []
    for group in (*tunable_groups(), ("overlap_moe_expert_parallel_comm",)):
        given = task.given & set(group)
        if given and len(layouts(task.without(given))):
            found += sorted(given)
    return found


def tunable_groups() -> list[tuple[str, ...]]:
    """Destinations that the search sets where the user has not, those together that belong so."""
    return [*((dest,) for dest in AXES.values()), (*VIRTUAL, *SPLIT), *GROUPS]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def fast_ranks(task: Task) -> int:
    """Ranks that a job has in the domain of its fastest links."""
    ranks = domain_sizes(task.platform)[fast_level(task.platform)]
    return task.gpus if ranks is None else min(ranks, task.gpus)


class _Builder:
    """Combinations of sizes, axis by axis."""

    def __init__(self) -> None:
        self.columns: Columns = {}
        self.rejected: Counter[str] = Counter()
        self.refusal = ""

    def cross(self, name: str, values: Sequence[int]) -> None:
        count = len(next(iter(self.columns.values()), [0]))
        self.columns = {key: np.repeat(c, len(values)) for key, c in self.columns.items()}
        self.columns[name] = np.tile(np.array(values, dtype=np.int64), count)

    def keep(self, kept: np.ndarray, reason: str, explanation: str, later: int) -> None:
        dropped = int((~kept).sum())
        if dropped == 0:
            return
        if dropped == len(kept):
            self.refusal = explanation
        self.rejected[reason] += dropped * later
        self.columns = {name: column[kept] for name, column in self.columns.items()}


def _axes(task: Task) -> dict[str, Sequence[int]]:
    of_gpus = divisors(task.gpus)
    experts, layers = task.model.experts, task.model.layers
    asked = task.fixed((*VIRTUAL, SPLIT[0]))
    free: dict[str, Sequence[int]] = {
        "tp": of_gpus,
        "cp": of_gpus,
        "pp": [pp for pp in of_gpus if pp <= layers + 2],
        "ep": [ep for ep in of_gpus if experts.count % ep == 0] if experts else [1],
        "etp": of_gpus if experts else [1],
        "vpp": range(1, (layers + 2 if asked else MOST_VIRTUAL_STAGES) + 1),
        "micro_batch": [
            size for size in divisors(task.base.global_batch_size) if size <= LARGEST_MICRO_BATCH
        ],
    }
    for axis, dest in AXES.items():
        if dest in task.given and not (experts is None and axis == "etp"):
            free[axis] = [getattr(task.base, dest)]
    return free


def _bounds(task: Task) -> dict[str, list[Bound]]:
    """What the search does not look into although Megatron would: axis -> bounds up to it."""
    seq, fast = task.base.seq_length, fast_ranks(task)
    fixed = {axis: AXES[axis] in task.given for axis in AXES}

    def shared_out(pp: int, vpp: int) -> bool:
        return task.split_values(pp, vpp) is not None

    def as_asked(pp: int, vpp: int) -> bool:
        command = task.command(task.size_values({"pp": pp, "vpp": vpp}))
        return (command.vpp or 1) == vpp

    def smaller(pp: int, vpp: int) -> bool:
        if vpp == 1 or task.fixed((*VIRTUAL, *SPLIT)):
            return True
        fewer = range(1, vpp)
        return _most_layers(task, pp * vpp) < min(_most_layers(task, pp * few) for few in fewer)

    return {
        "vpp": [
            (SHARED_OUT, lambda c: _of_pairs(c, shared_out)),
            (AS_ASKED, lambda c: _of_pairs(c, as_asked)),
            (SMALLER, lambda c: _of_pairs(c, smaller)),
        ],
        "cp": [
            (FAST_TP, lambda c: fixed["tp"] | (c["tp"] <= fast)),
            (TOKENS, lambda c: fixed["cp"] | (c["cp"] == 1) | (seq // c["cp"] >= LEAST_TOKENS)),
        ],
        "etp": [(FAST_ETP, lambda c: fixed["etp"] | (c["etp"] <= fast))],
    }


def _most_layers(task: Task, chunks: int) -> int:
    """Layers of the fullest chunk; the output layer takes the place of one where a text is used."""
    model = task.model
    if model.layers % chunks == 0:
        return model.layers // chunks
    return -(-(model.layers + model.mtp_layers + 1) // chunks)


def _of_pairs(c: Columns, holds: Callable[[int, int], bool]) -> np.ndarray:
    """A bound on PP and VPP, asked once for each pair."""
    rows, which = distinct(c, ("pp", "vpp"))
    said = [holds(int(c["pp"][row]), int(c["vpp"][row])) for row in rows]
    return np.array(said, dtype=bool)[which]


def _useful(task: Task, settings: Mapping[str, Sequence[Choice]], c: Columns) -> Iterator[Verdict]:
    """Fused dispatchers need peers, and on Slingshot they end with the node."""
    fast = fast_ranks(task) if "Slingshot" in task.platform.description else task.gpus
    rows, which = distinct(c, ("ep", "etp"))
    group = (c["ep"] * c["etp"])[rows]
    refused = [
        np.where(_is_fused(choice), (group == 1) | (group > fast), False)
        for choice in settings["dispatcher"]
    ]
    verdict = Verdict(USEFUL, ("dispatcher",), which, np.stack(refused, axis=1))
    if verdict.refused.any():
        yield verdict


def _is_fused(choice: Choice) -> bool:
    return choice.values.get("moe_token_dispatcher_type") == "flex"


def _counted(space: Space) -> Space:
    """Counts legal candidates and refusals, and drops layouts that no settings make legal."""
    legal, refused = space.counts()
    refusal = space.refusal
    if len(space) and not legal.any():
        refusal = next(v.explanation or v.reason for v in reversed(space.verdicts))
    kept = space.taken(np.flatnonzero(legal))
    rejected = space.rejected + refused
    return replace(kept, legal=int(legal.sum()), rejected=rejected, refusal=refusal)
