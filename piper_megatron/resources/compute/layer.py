"""A transformer layer."""

from collections.abc import Iterable

from piper_megatron.layout.sizes import Sizes
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.resources.compute.attention import attention_operations
from piper_megatron.resources.compute.experts import expert_operations
from piper_megatron.resources.compute.setting import Operation, Setting
from piper_megatron.resources.kernels import Work
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# parts whose kernels a graph of each scope launches (transformer_config.py: cuda_graph_modules)
_GRAPHED: dict[str, frozenset[str]] = {
    "attn": frozenset({"norms", "projections", "attention"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"router", "permute", "experts", "shared_experts"}),
    "moe_router": frozenset({"router", "shared_experts"}),
}


def layer_compute(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    accelerator: Accelerator,
    *,
    moe: bool,
    windowed: bool = False,
    imbalance: float = 1.0,
) -> dict[str, Work]:
    """Work of one transformer layer for one micro-batch, by part.

    Args:
        model: what is trained.
        training: precision, kernels, recomputation.
        sizes: one layout, or arrays of them.
        accelerator: curves and peaks.
        moe: the layer has experts.
        windowed: its attention sees a window.
        imbalance: rows of the most loaded rank's experts over the mean.

    Returns:
        norms, projections, attention, and mlp or router, permute, experts, shared_experts. Full
        recomputation repeats all forward work; a layer that it spares (`block`) is one of a
        training without recomputation.

    Raises:
        PlatformError: the accelerator lacks the precision.
    """
    setting = Setting(model, training, sizes, accelerator)
    operations = [*_norms(setting, moe), *attention_operations(setting, windowed=windowed)]
    if moe:
        operations += expert_operations(setting, imbalance=imbalance)
    else:
        mlp = setting.mlp(model.ffn / sizes.tp)
        operations.append(Operation("mlp", mlp, frozenset({"mlp"})))
    parts: dict[str, Work] = {}
    for operation in operations:
        work = _recomputed(operation, training)
        parts[operation.part] = parts.get(operation.part, Work()) + work
    graphed = _graphed(training, parts)
    return {name: work.replayed() if name in graphed else work for name, work in parts.items()}


def _norms(setting: Setting, moe: bool) -> list[Operation]:
    """Two norms, two additions to the residual stream, and that of the shared experts' output."""
    elements = setting.local_rows * setting.model.hidden
    norms = setting.pointwise(2 * 2 * elements, 2 * 4 * elements, kernels=2)
    additions = 3 if moe and setting.experts.shared_ffn else 2
    residual = setting.pointwise(
        additions * 3 * elements,
        additions * 2 * elements,
        fused=setting.training.bias_dropout_fusion,
        kernels=additions,
    )
    return [
        Operation("norms", norms, frozenset({"layernorm"})),
        Operation("norms", residual),
    ]


def _recomputed(operation: Operation, training: TrainingSpec) -> Work:
    granularity = training.recompute_granularity
    chosen = operation.modules & set(training.recompute_modules)
    if granularity == "full" or (granularity == "selective" and chosen):
        return operation.work.repeated_in_backward()
    return operation.work


def _graphed(training: TrainingSpec, parts: Iterable[str]) -> frozenset[str]:
    if training.cuda_graph_impl == "none":
        return frozenset()
    if training.cuda_graph_impl == "full_iteration" or not training.cuda_graph_scope:
        return frozenset(parts)
    return frozenset().union(
        *(_GRAPHED.get(scope, frozenset()) for scope in training.cuda_graph_scope)
    )
