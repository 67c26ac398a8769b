"""The layouts that Megatron would take, and why it would not take the others.

Sizes are built up axis by axis; a combination is dropped as soon as a rule says no. What the rules
here let through is judged once more by `check`, for the layouts that are proposed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from piper_megatron.errors import LayoutError
from piper_megatron.layout.pipeline import balanced_layout_string, pipeline_faults, pipeline_layout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.dispatch import fast_level
from piper_megatron.resources.reach import domain_sizes
from piper_megatron.tuning.task import AXES, SPLIT, VIRTUAL, Task
from piper_megatron.workload.layout_text import stages_of_text

# a context rank's piece of the sequence; shorter ones leave kernels idle
LEAST_TOKENS = 1024
LARGEST_MICRO_BATCH = 16
MOST_VIRTUAL_STAGES = 24

Columns = dict[str, np.ndarray]
Rule = tuple[str, Callable[[Columns], np.ndarray]]


@dataclass(frozen=True)
class Space:
    """Layouts.

    Attributes:
        sizes: arrays [layouts] of every legal one.
        rejected: reason -> number of combinations of sizes that it ruled out.
    """

    sizes: Sizes
    rejected: Counter[str]

    def __len__(self) -> int:
        return self.sizes.layouts


def layouts(task: Task) -> Space:
    """Every legal layout of a task."""
    axes = _axes(task)
    builder = _Builder()
    for names, rules in (
        (("tp", "cp", "pp"), _dense_rules(task)),
        (("ep", "etp"), _expert_rules(task)),
        (("vpp", "micro_batch"), _schedule_rules(task)),
    ):
        for name in names:
            builder.cross(name, axes[name])
        later = np.prod(
            [len(axes[name]) for name in axes if name not in builder.columns], dtype=int
        )
        for reason, legal in rules:
            builder.keep(reason, legal, int(later))
    columns = dict(builder.columns)
    if task.model.experts is None:
        columns["etp"] = columns["tp"]
    values = task.base
    sizes = Sizes(
        world=task.gpus, global_batch=values.global_batch_size, seq=values.seq_length, **columns
    )
    return Space(sizes, builder.rejected)


def culprits(task: Task) -> list[str]:
    """Arguments of the user that leave no layout, each by itself: without it there are some."""
    groups: list[tuple[str, ...]] = [(dest,) for dest in AXES.values()]
    groups += [(*VIRTUAL, *SPLIT), ("sequence_parallel", "overlap_moe_expert_parallel_comm")]
    found = []
    for group in groups:
        given = task.given & set(group)
        if given and len(layouts(task.without(given))):
            found += sorted(given)
    return found


class _Builder:
    """Combinations of sizes, axis by axis."""

    def __init__(self) -> None:
        self.columns: Columns = {}
        self.rejected: Counter[str] = Counter()

    def cross(self, name: str, values: Sequence[int]) -> None:
        count = len(next(iter(self.columns.values()), [0]))
        self.columns = {key: np.repeat(c, len(values)) for key, c in self.columns.items()}
        self.columns[name] = np.tile(np.array(values, dtype=np.int64), count)

    def keep(self, reason: str, legal: Callable[[Columns], np.ndarray], later: int) -> None:
        mask = np.broadcast_to(legal(self.columns), len(self.columns["tp"]))
        dropped = int((~mask).sum())
        if dropped:
            self.rejected[reason] += dropped * later
            self.columns = {name: column[mask] for name, column in self.columns.items()}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def fast_ranks(task: Task) -> int:
    """Ranks that a job has in the domain of its fastest links."""
    ranks = domain_sizes(task.platform)[fast_level(task.platform)]
    return task.gpus if ranks is None else min(ranks, task.gpus)


def _axes(task: Task) -> dict[str, Sequence[int]]:
    of_gpus = divisors(task.gpus)
    batch = task.base.global_batch_size
    experts = task.model.experts
    free: dict[str, Sequence[int]] = {
        "tp": of_gpus,
        "cp": of_gpus,
        "pp": [pp for pp in of_gpus if pp <= task.model.layers + 2],
        "ep": [ep for ep in of_gpus if experts.count % ep == 0] if experts else [1],
        "etp": of_gpus if experts else [1],
        "vpp": range(1, MOST_VIRTUAL_STAGES + 1),
        "micro_batch": [size for size in divisors(batch) if size <= LARGEST_MICRO_BATCH],
    }
    for axis, dest in AXES.items():
        if dest in task.given:
            free[axis] = [getattr(task.base, dest)]
    if experts is None:
        free["etp"] = [1]
    return free


def _dense_rules(task: Task) -> list[Rule]:
    model, gpus, seq, fast = task.model, task.gpus, task.base.seq_length, fast_ranks(task)
    attention = model.attention
    widths = [] if all(model.moe_layers) else [model.ffn]
    if model.experts and model.experts.shared_ffn:
        widths.append(model.experts.shared_ffn)
    fixed_tp, fixed_cp = (AXES[axis] in task.given for axis in ("tp", "cp"))
    groups = attention.heads if attention.latent else attention.groups
    return [
        (
            "TP x CP x PP does not divide the GPUs",
            lambda c: gpus % (c["tp"] * c["cp"] * c["pp"]) == 0,
        ),
        ("TP beyond the fast network", lambda c: fixed_tp | (c["tp"] <= fast)),
        (
            "TP does not divide heads or widths",
            lambda c: (
                (attention.heads % c["tp"] == 0)
                & ((groups % c["tp"] == 0) | (c["tp"] % groups == 0))
                & np.all([width % c["tp"] == 0 for width in [0, *widths]], axis=0)
            ),
        ),
        (
            "CP does not divide the sequence",
            lambda c: (c["cp"] == 1) | (seq % (2 * c["cp"]) == 0),
        ),
        (
            f"CP leaves less than {LEAST_TOKENS:,} tokens to a rank",
            lambda c: fixed_cp | (c["cp"] == 1) | (seq // c["cp"] >= LEAST_TOKENS),
        ),
        (
            "TP does not divide the tokens (sequence parallelism)",
            lambda c: (c["tp"] == 1) | (seq // c["cp"] % c["tp"] == 0),
        ),
    ]


def _expert_rules(task: Task) -> list[Rule]:
    experts = task.model.experts
    if experts is None:
        return []
    gpus, fast = task.gpus, fast_ranks(task)
    biased = task.model.linear_bias
    fixed_etp = AXES["etp"] in task.given
    instances = task.base.num_distributed_optimizer_instances
    return [
        (
            "ETP x EP x PP does not divide the GPUs",
            lambda c: gpus % (c["etp"] * c["ep"] * c["pp"]) == 0,
        ),
        ("EP does not divide the experts", lambda c: experts.count % c["ep"] == 0),
        ("ETP beyond the fast network", lambda c: fixed_etp | (c["etp"] <= fast)),
        (
            "ETP does not divide the experts' width",
            lambda c: (experts.ffn % c["etp"] == 0) & ((c["etp"] == 1) | (not biased)),
        ),
        (
            "optimizer instances do not divide the replicas",
            lambda c: (
                (gpus // (c["tp"] * c["pp"]) % instances == 0)
                & (gpus // (c["etp"] * c["ep"] * c["pp"]) % instances == 0)
            ),
        ),
    ]


def _schedule_rules(task: Task) -> list[Rule]:
    gpus, batch, values = task.gpus, task.base.global_batch_size, task.base
    group = values.microbatch_group_size_per_vp_stage
    least_pp = 2 if values.overlap_p2p_comm else 3

    def replicas(c: Columns) -> np.ndarray:
        return gpus // (c["tp"] * c["cp"] * c["pp"])

    def micro_batches(c: Columns) -> np.ndarray:
        return batch // (c["micro_batch"] * replicas(c))

    def scheduled(c: Columns) -> np.ndarray:
        groups = c["pp"] if group is None else np.full_like(c["pp"], group)
        count = micro_batches(c)
        rest = count % groups
        full = (groups >= c["pp"]) & (groups <= count) & ((rest == 0) | (rest >= c["pp"]))
        return (c["vpp"] == 1) | ((c["pp"] >= least_pp) & full)

    rules: list[Rule] = [
        ("layers cannot be shared out", lambda c: _pairs(c, lambda *pair: _splits(task, *pair))),
        (
            "virtual stages that hold no less than fewer would",
            lambda c: _pairs(c, lambda *pair: _smaller_chunks(task, *pair)),
        ),
        (
            "micro-batches do not divide the batch",
            lambda c: batch % (c["micro_batch"] * replicas(c)) == 0,
        ),
        ("micro-batches do not fill the interleaved schedule", scheduled),
    ]
    if values.overlap_moe_expert_parallel_comm:
        rules.append(
            (
                "all-to-all overlap needs EP, and virtual stages with PP",
                lambda c: (c["ep"] > 1) & ((c["pp"] == 1) | (c["vpp"] > 1)),
            )
        )
    return rules


def _pairs(c: Columns, legal: Callable[[int, int], bool]) -> np.ndarray:
    """A rule on PP and VPP, asked once for each pair."""
    keys = c["pp"] * (MOST_VIRTUAL_STAGES + 1) + c["vpp"]
    some, which = np.unique(keys, return_inverse=True)
    said = [legal(*divmod(int(key), MOST_VIRTUAL_STAGES + 1)) for key in some]
    return np.array(said, dtype=bool)[which]


def _splits(task: Task, pp: int, vpp: int) -> bool:
    """Whether the layers can be shared out as the user wants it, or at all."""
    values, layers, mtp = task.base, task.model.layers, task.model.mtp_layers
    if pp == 1 and vpp > 1:
        return False
    text = values.pipeline_model_parallel_layout
    try:
        if text is not None:
            stages = stages_of_text(text)
            return len(stages) == pp * vpp and not pipeline_faults(
                pipeline_layout(layers, pp, vpp, mtp_layers=mtp, text=text), layers
            )
        if task.fixed(SPLIT):
            pipeline_layout(
                layers,
                pp,
                vpp,
                first=values.decoder_first_pipeline_num_layers,
                last=values.decoder_last_pipeline_num_layers,
                account_for_embedding=values.account_for_embedding_in_pipeline_split,
                account_for_loss=values.account_for_loss_in_pipeline_split,
                mtp_layers=mtp,
            )
            return _as_asked(task, pp, vpp)
        if layers % (pp * vpp):
            if task.fixed(VIRTUAL):  # a layout excludes them
                return False
            balanced_layout_string(layers, pp, vpp, mtp)
    except LayoutError:
        return False
    return _as_asked(task, pp, vpp)


def _as_asked(task: Task, pp: int, vpp: int) -> bool:
    """Whether VPP is what the user's arguments make of it."""
    values = task.base
    if values.num_virtual_stages_per_pipeline_rank is not None:
        return vpp == values.num_virtual_stages_per_pipeline_rank
    each = values.num_layers_per_virtual_pipeline_stage
    if each is None:
        return True
    slots = (
        task.model.layers
        + values.account_for_embedding_in_pipeline_split
        + values.account_for_loss_in_pipeline_split
    )
    return slots % pp == 0 and slots // pp == each * vpp


def _smaller_chunks(task: Task, pp: int, vpp: int) -> bool:
    """Virtual stages cost communication; without smaller chunks they bring nothing."""
    if vpp == 1 or task.fixed((*VIRTUAL, *SPLIT)):
        return True
    slots = task.model.layers + task.model.mtp_layers + 1
    return -(-slots // (pp * vpp)) < -(-slots // (pp * (vpp - 1)))
