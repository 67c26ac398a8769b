"""Settings that are tuned beside the sizes: recomputation, dispatcher and optimizer.

Each function gives the choices for one of them; where the user has set any of its arguments there
is one, which sets nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

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
    """What is computed again instead of kept; nothing first."""
    if task.fixed(RECOMPUTATION) or task.base.cpu_offloading_num_layers > 0:
        return _AS_GIVEN
    selective = [_selective(modules, rare=rare) for modules, rare in _module_sets(task)]
    uniform = _full("full", "uniform", 1)
    blocks = [_full(f"full, {count} a chunk", "block", count) for count in _BLOCKS]
    return (Choice("none"), *selective, uniform, *blocks)


def _module_sets(task: Task) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Modules that are worth it together: cheap ones, with those of MLPs or without.

    Rare are some of the cheap ones without the others.
    """
    values, model = task.base, task.model
    cheap = ["layernorm"]
    if model.attention.latent:
        cheap.append("mla_up_proj")
    if values.attention_backend == "unfused" or values.transformer_impl == "local":
        cheap.append("core_attn")
    activation = ["moe_act"] if model.experts and values.moe_grouped_gemm else []
    dense = [] if all(model.moe_layers) else ["mlp"]
    shared = ["shared_experts"] if model.experts and model.experts.shared_ffn else []
    heavy = [(), tuple(activation), (*dense, *shared), (*activation, *dense, *shared)]
    if model.experts:
        heavy.append((*dense, "moe"))
    for some in _subsets(cheap):
        for more in dict.fromkeys(heavy):
            if some or more:
                yield (*some, *more), 0 < len(some) < len(cheap)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def _selective(modules: tuple[str, ...], *, rare: bool) -> Choice:
    tokens = ("--recompute-granularity", "selective", "--recompute-modules", *modules)
    return Choice("+".join(modules), tokens, rare)


def _full(name: str, method: str, layers: int) -> Choice:
    tokens = ("--recompute-granularity", "full", "--recompute-method", method)
    return Choice(name, (*tokens, "--recompute-num-layers", str(layers)))


def dispatchers(task: Task) -> tuple[Choice, ...]:
    """How tokens travel to their experts.

    Inside one node Piper's dispatchers are Megatron's, so that they stand for both.
    """
    if task.model.experts is None or task.fixed(DISPATCHER):
        return _AS_GIVEN
    kind = "--moe-token-dispatcher-type"
    choices = [Choice("alltoall", (kind, "alltoall", "--piper-dispatcher", "auto"))]
    choices += [
        Choice(backend, (kind, "flex", "--moe-flex-dispatcher-backend", backend))
        for backend in _fused_backends(task)
    ]
    return (*choices, Choice("allgather", (kind, "allgather"), rare=True))


def _fused_backends(task: Task) -> tuple[str, ...]:
    """Kernels of the flex dispatcher that there are for the platform.

    DeepEP ends with the node, so that it is no choice where the fast network is a rack's; AMD's
    port of it is for GPUs that compute in FP8, MI300 and later.
    """
    accelerator = task.platform.need_accelerator()
    if task.command({}).is_nvidia:
        rack = fast_level(task.platform) > task.platform.node_level
        return ("hybridep",) if rack else ("deepep", "hybridep")
    amd = accelerator.name.startswith("AMD")
    return ("deepep",) if amd and accelerator.tflops.fp8 is not None else ()


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
