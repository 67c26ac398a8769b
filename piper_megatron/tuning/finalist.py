"""A candidate worked out: its arguments, their legality, and an estimate event by event."""

from dataclasses import dataclass
from typing import Any

from piper_megatron.check.run import judge
from piper_megatron.layout.job import Job, job_of
from piper_megatron.resources.dispatch import fast_level
from piper_megatron.resources.estimate import Estimate, estimate
from piper_megatron.resources.reach import Order, domain_sizes
from piper_megatron.resources.step import step_time
from piper_megatron.tuning.plan import Plan, PlanLayout, confidence
from piper_megatron.tuning.score import Candidate
from piper_megatron.tuning.stages import balanced_by_time
from piper_megatron.tuning.task import PLACEMENT, SPLIT, VIRTUAL, Choice, Task, tokens_of, values_of
from piper_megatron.workload.flags import spelling_of


@dataclass(frozen=True)
class Way:
    """One way to run a candidate, which Megatron takes.

    Attributes:
        tokens: arguments that the user did not give.
        order: of the ranks on the devices.
        step_s: predicted pass by pass.
    """

    tokens: tuple[str, ...]
    order: Order
    step_s: float


@dataclass(frozen=True)
class WorkedOut:
    """A candidate run one way.

    Attributes:
        candidate: what it was made of.
        way: in which it is run.
        estimate: what it will need.
    """

    candidate: Candidate
    way: Way
    estimate: Estimate

    @property
    def step_s(self) -> float:
        """Of a step."""
        return self.estimate.time.step_s

    @property
    def needed_gib(self) -> float:
        """Of the device, by the fullest stage."""
        return max(stage.needed_gib for stage in self.estimate.memory.stages)


def worked_out(task: Task, candidate: Candidate, limit: float) -> WorkedOut | str:
    """The quickest way to run a candidate that fits, or the one that needs least.

    Args:
        task: what is tuned.
        candidate: of it.
        limit: GiB of the device that it may need.

    Returns:
        The id of the rule that refuses it where no way is legal.
    """
    found = ways(task, candidate)
    if isinstance(found, str):
        return found
    least: WorkedOut | None = None
    for way in found:
        each = WorkedOut(candidate, way, estimated(task, way))
        if each.needed_gib <= limit:
            return each
        if least is None or each.needed_gib < least.needed_gib:
            least = each
    assert least is not None
    return least


def ways(task: Task, candidate: Candidate) -> list[Way] | str:
    """Legal ways to run a candidate, the quickest first, or the id of the rule that refuses it."""
    refusal = ""
    found: list[Way] = []
    choices = _choice_tokens(task, candidate)
    for sizes in _splits(task, candidate.sizes, choices):
        tokens = (*sizes, *choices)
        errors = [f for f in judge(task.command(values_of(tokens))) if f.severity == "error"]
        if errors:
            refusal = refusal or errors[0].id
            continue
        job = _job(task, tokens)
        for order in task.orders:
            step_s = step_time(job, task.platform, task.stack, task.imbalance, order).step_s
            found.append(Way((*tokens, *_placement_tokens(task, order)), order, step_s))
    # of equally quick ones the first, which needs the fewest arguments
    return sorted(found, key=lambda way: float(f"{way.step_s:.4g}")) or refusal


def _placement_tokens(task: Task, order: Order) -> tuple[str, ...]:
    if order == "megatron" or task.fixed(PLACEMENT):
        return ()
    return ("--piper-topology", "auto", "--piper-placement", "auto")


def estimated(task: Task, way: Way) -> Estimate:
    """What a way will need."""
    return estimate(
        _job(task, way.tokens),
        task.platform,
        stack=task.stack,
        imbalance=task.imbalance,
        order=way.order,
    )


def plan(task: Task, chosen: WorkedOut, rank: int, model: str) -> Plan:
    """A finalist as a plan."""
    tokens = chosen.way.tokens
    job = _job(task, tokens)
    recompute, _, optimizer = (choice.name for choice in chosen.candidate.choices)
    layout = job.layout
    values = task.changed(values_of(tokens))
    return Plan(
        rank=rank,
        platform=task.platform.name,
        gpus=task.gpus,
        model=model,
        global_batch=job.batch.global_batch,
        seq=job.batch.seq,
        spec=job.model,
        megatron_args=tokens,
        layout=PlanLayout(
            **{name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep", "etp")},
            vpp=job.pipeline.vpp,
            dp=layout.dp,
            edp=layout.edp,
            micro_batch=job.batch.micro_batch,
            micro_batches=int(job.sizes.micro_batches),
            pipeline=values.pipeline_model_parallel_layout,
            recompute=recompute,
            dispatcher=_dispatcher(job) if job.model.experts else "none",
            optimizer=optimizer,
        ),
        training=job.training,
        estimate=chosen.estimate,
        confidence=confidence(task.platform, _farthest(task, job)),
        notes=_notes(task, job, values),
    )


def _job(task: Task, tokens: tuple[str, ...]) -> Job:
    return job_of(task.changed(values_of(tokens)), task.gpus)


def _dispatcher(job: Job) -> str:
    training = job.training
    return training.flex_backend if training.dispatcher == "flex" else training.dispatcher


def _splits(task: Task, sizes: dict[str, int], choices: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Arguments for the sizes, with the layers shared out as evenly as can be, and by time."""
    values = task.size_values(sizes)
    ways = [tokens_of(values)]
    if sizes["pp"] == 1 or task.fixed((*VIRTUAL, *SPLIT)):
        return ways
    even = _job(task, (*ways[0], *choices))
    texts = balanced_by_time(even, task.platform, task.stack, task.imbalance)
    sizes_alone = {dest: value for dest, value in values.items() if dest != VIRTUAL[0]}
    ways += [tokens_of(sizes_alone | {SPLIT[0]: text}) for text in texts]
    return list(dict.fromkeys(ways))


def _choice_tokens(task: Task, candidate: Candidate) -> tuple[str, ...]:
    recompute, dispatcher, optimizer = candidate.choices
    group = candidate.sizes["ep"] * candidate.sizes["etp"]
    if "piper_dispatcher" in dispatcher.values and group <= task.platform.ranks_per_node:
        at = dispatcher.tokens.index("--piper-dispatcher")
        dispatcher = Choice(dispatcher.name, dispatcher.tokens[:at])
    given: dict[str, Any] = vars(task.base)
    tokens = (*recompute.tokens, *dispatcher.tokens, *optimizer.tokens)
    assert not task.given & values_of(tokens).keys(), (task.given, given)
    return tokens


def _farthest(task: Task, job: Job) -> int:
    """The outermost level that a layer's exchanges cross."""
    layout = job.layout
    members = max(layout.tp * layout.cp, layout.ep * layout.etp)
    for index, ranks in enumerate(domain_sizes(task.platform)):
        if ranks is None or members <= ranks:
            return index
    return len(task.platform.levels) - 1


def _notes(task: Task, job: Job, values: Any) -> tuple[str, ...]:
    notes = []
    if job.training.dispatcher == "flex" and "moe_token_dispatcher_type" not in task.given:
        backend = job.training.flex_backend
        rack = fast_level(task.platform) > task.platform.node_level
        notes.append(
            f"{backend} has to be installed and to know the network{' of the rack' if rack else ''}"
            "; --moe-token-dispatcher-type alltoall excludes it"
        )
    ours = ("piper_dispatcher", "piper_placement")
    asked = [spelling_of(dest) for dest in ours if getattr(values, dest)]
    if asked:
        notes.append(f"{' and '.join(asked)}: with piper-megatron run, or register() in the script")
    if job.training.num_distributed_optimizer_instances > 1:
        notes.append("several optimizer instances need the package einops")
    return tuple(notes)
