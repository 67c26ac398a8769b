"""Dispatch and combine of one MoE layer, with Megatron's dispatcher and each of Piper's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from piper_megatron.runtime.dispatch.groups import ExpertGroups

MEGATRON = "megatron"


def build_dispatchers(
    groups: ExpertGroups, names: Sequence[str], *, experts: int, topk: int, hidden: int, chunks: int
) -> dict[str, Any]:
    """Dispatchers over all ranks of the job, by name; `megatron` is its own alltoall.

    Args:
        groups: of all ranks.
        names: what to build.
        experts: of the layer.
        topk: experts of a token.
        hidden: width.
        chunks: parts of the traffic between nodes.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec

    world = dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        add_bias_linear=False,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=world,
    )
    local = experts // world
    indices = [dist.get_rank() * local + i for i in range(local)]
    megatron = (local, indices, config, ProcessGroupCollection.use_mpu_process_groups())
    return {
        name: MoEAlltoAllTokenDispatcher(*megatron)
        if name == MEGATRON
        else DispatcherSpec(name, groups, chunks).build(*megatron)
        for name in names
    }


def uniform_routing(
    tokens: int, experts: int, topk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing map of distinct random experts, and equal probabilities, [tokens, experts]."""
    chosen = torch.rand(tokens, experts, device=device).topk(topk).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
    routing_map.scatter_(1, chosen, True)
    return routing_map, routing_map / topk


def round_trip(
    dispatcher: Any, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """A layer's output with experts that change nothing.

    Args:
        dispatcher: of Megatron's interface.
        hidden: [tokens, 1, hidden].
        routing_map: [tokens, experts].
        probs: likewise.
    """
    rows, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, probs = dispatcher.token_dispatch(rows, probs)
    rows, _, probs = dispatcher.dispatch_postprocess(rows, probs)
    rows = dispatcher.combine_preprocess(rows * probs.unsqueeze(-1))
    return dispatcher.combine_postprocess(dispatcher.token_combine(rows))
