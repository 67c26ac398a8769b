"""One MoE layer of Megatron's on any number of ranks; what the dispatcher's benchmarks share."""

import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LayerSizes:
    """A layer and its input.

    Attributes:
        hidden: width of a token.
        expert_ffn: width of an expert.
        experts: over all ranks.
        topk: experts of a token.
        tokens: of a rank.
    """

    hidden: int
    expert_ffn: int
    experts: int
    topk: int
    tokens: int


def build_layer(sizes: LayerSizes, seed: int = 1) -> Any:
    """A layer with Megatron's own alltoall dispatcher, equal for equal seeds.

    Needs Megatron's process groups.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes.hidden,
        num_attention_heads=1,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_ffn_hidden_size=sizes.expert_ffn,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    spec = get_moe_module_spec(use_te=False, num_experts=sizes.experts, moe_grouped_gemm=False)
    # a partial call in some releases, a ModuleSpec in others
    parts = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    layer = MoELayer(config, parts, layer_number=1).cuda()
    layer.set_layer_number(1)
    return layer


def train_layer(layer: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Forward and backward once.

    Args:
        layer: gradients of its parameters are taken anew.
        tokens: [tokens, hidden].

    Returns:
        The output, and the gradients of the input ("tokens") and of every parameter.
    """
    layer.zero_grad(set_to_none=True)
    tokens = tokens.detach().requires_grad_()
    output = layer(tokens.unsqueeze(1))[0].squeeze(1)
    # weights that differ from number to number, so that rows in wrong places show
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    (output * weights.to(output.dtype)).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return output.detach(), {"tokens": tokens.grad, **gradients}


def expert_groups(nodes: int) -> Any:
    """This rank's expert group on that many nodes, pretended ones if need be."""
    from megatron.core import parallel_state

    from piper_megatron.runtime.dispatch.groups import split_group

    group = parallel_state.get_expert_model_parallel_group()
    per_node = group.size() // nodes
    hosts = [f"node {member // per_node}" for member in range(group.size())]
    return split_group(group, hosts, timedelta(minutes=5))


def with_dispatcher(layer: Any, algorithm: str, groups: Any, recorder: Any = None) -> Any:
    """The layer with one of Piper's dispatchers; it shares the weights of the given one.

    Args:
        layer: of `build_layer`.
        algorithm: one of the dispatcher's `ALGORITHMS`.
        groups: of `expert_groups`.
        recorder: a LayerRecorder that counts, if any.
    """
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec

    other = copy.copy(layer)
    other.token_dispatcher = DispatcherSpec(algorithm, groups).build(
        layer.num_local_experts,
        layer.local_expert_indices,
        layer.config,
        get_default_pg_collection(),
        recorder=recorder,
    )
    return other
