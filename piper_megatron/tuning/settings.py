"""Settings that are tuned beside the sizes: recomputation, dispatcher and optimizer.

Each function gives the choices for one of them; where the user has set any of its arguments there
is one, which sets nothing.
"""

from piper_megatron.check.changes import recomputation
from piper_megatron.resources.dispatch import fast_level
from piper_megatron.resources.state_costs import is_emerging
from piper_megatron.tuning.task import Choice, Task

RECOMPUTATION = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "moe_layer_recompute",
    "distribute_saved_activations",
)
DISPATCHER = (
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_enable_deepep",
    "piper_dispatcher",
)
SHARDING = ("use_distributed_optimizer", "num_distributed_optimizer_instances")
OFFLOADING = ("optimizer_cpu_offload", "optimizer_offload_fraction")
# arguments of which one fixes the others
GROUPS = (RECOMPUTATION, DISPATCHER, SHARDING, OFFLOADING)
_AS_GIVEN = (Choice("as given"),)
# layers of a chunk that full recomputation takes
_BLOCKS = (1, 2, 4, 8)
_INSTANCES = (2, 4, 8)
_OFFLOADED = (0.5, 1.0)


def settings_of(task: Task) -> dict[str, tuple[Choice, ...]]:
    """All of them: setting -> its choices."""
    return {
        "recompute": recomputations(task),
        "dispatcher": dispatchers(task),
        "optimizer": optimizers(task),
    }


def recomputations(task: Task) -> tuple[Choice, ...]:
    """What is computed again instead of kept, the least first."""
    values = task.base
    if task.fixed(RECOMPUTATION) or values.cpu_offloading_num_layers > 0:
        return _AS_GIVEN
    overlap = values.overlap_moe_expert_parallel_comm
    choices = [Choice("none")]
    for change in recomputation(task.command({})):
        modules = change.values["recompute_modules"]
        full = modules is None
        if overlap and (full or "moe" in modules):
            continue
        choices.append(Choice("full" if full else "+".join(modules), tuple(change.text.split())))
    if not overlap:
        choices += [
            Choice(
                f"full, {count} a chunk",
                (
                    *("--recompute-granularity", "full"),
                    *("--recompute-method", "block"),
                    "--recompute-num-layers",
                    str(count),
                ),
            )
            for count in _BLOCKS
        ]
    return tuple(choices)


def dispatchers(task: Task) -> tuple[Choice, ...]:
    """How tokens travel to their experts.

    Inside one node Piper's dispatchers are Megatron's, so that they stand for both.
    """
    if task.model.experts is None or task.fixed(DISPATCHER):
        return _AS_GIVEN
    alltoall = ("--moe-token-dispatcher-type", "alltoall")
    choices = [Choice("alltoall", (*alltoall, "--piper-dispatcher", "auto"))]
    if task.command({}).is_nvidia:
        rack = fast_level(task.platform) > task.platform.node_level
        backend = "hybridep" if rack else "deepep"
        flex = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend)
        choices.append(Choice(backend, flex))
    return tuple(choices)


def optimizers(task: Task) -> tuple[Choice, ...]:
    """How the optimizer's states are shared out, and whether they leave the device."""
    values, training = task.base, task.training()
    if training.fsdp or is_emerging(training) or values.freeze_all_layers:
        return _AS_GIVEN
    sharded = _sharded(task)
    if values.use_distributed_optimizer:
        choices = [sharded]
    elif "use_distributed_optimizer" in task.given:
        return _AS_GIVEN
    else:
        choices = [sharded, Choice("replicated", _overlap(task, gather=False))]
    if "num_distributed_optimizer_instances" not in task.given:
        choices += [
            Choice(
                f"sharded, {count} instances",
                (*sharded.tokens, "--num-distributed-optimizer-instances", str(count)),
            )
            for count in _INSTANCES
        ]
    if not task.fixed(OFFLOADING) and values.optimizer == "adam":
        choices += [_offloaded(task, sharded, share) for share in _OFFLOADED]
    return tuple(choices)


def _sharded(task: Task) -> Choice:
    flag = "" if task.base.use_distributed_optimizer else "--use-distributed-optimizer"
    return Choice("sharded", (*flag.split(), *_overlap(task, gather=True)))


def _overlap(task: Task, *, gather: bool) -> tuple[str, ...]:
    """Gradients and parameters travel behind the passes, unless the user has said how."""
    if task.fixed(("overlap_grad_reduce", "overlap_param_gather")):
        return ()
    return ("--overlap-grad-reduce", *(["--overlap-param-gather"] if gather else []))


def _offloaded(task: Task, sharded: Choice, share: float) -> Choice:
    aware = () if task.base.use_precision_aware_optimizer else ("--use-precision-aware-optimizer",)
    return Choice(
        f"sharded, {share:.0%} on the host",
        (
            *sharded.tokens,
            *aware,
            "--optimizer-cpu-offload",
            "--optimizer-offload-fraction",
            f"{share:g}",
        ),
    )
