"""Exchanges that happen once a step: among data-parallel replicas, and of what ranks replicate."""

from dataclasses import replace

import numpy as np

from piper_megatron.layout.collectives import (
    Collective,
    Operation,
    gradient_collectives,
    replicated_parameters,
)
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.exchange import Compute, Exchange, Pass, Pricing
from piper_megatron.resources.network import Cost, collective_cost, no_cost
from piper_megatron.resources.reach import Order, Reach, domain_sizes, instances_at_levels
from piper_megatron.workload.spec import DTYPE_BYTES, ModelSpec, TrainingSpec


def step_communication(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    dense_elements: Number,
    expert_elements: Number,
    order: Order = "megatron",
) -> dict[str, Exchange]:
    """Exchanges that happen once a step on a pipeline stage, by part.

    Args:
        model: for what is replicated.
        training: optimizer, formats, overlap.
        sizes: one layout, or arrays of them.
        platform: levels and curves.
        dense_elements: parameters that a rank of the stage holds, without routed experts.
        expert_elements: of routed experts.
        order: of the ranks on the devices.

    Returns:
        gradients and parameters (dense and `expert_`), replicated_gradients (all-reduced in the
        tensor-parallel group), tied_embedding, gradient_norm. Gradients hide behind the backward
        pass of the stage's last micro-batch, parameters behind the forward pass of the first; what
        cannot hide is the last bucket of gradients and the first of parameters. Stages but the
        first have one bucket for each chunk, which hides behind the stages before them. With FSDP,
        both can hide behind the passes of every micro-batch.
    """
    pricing = Pricing(platform, sizes, order)
    exchanges: dict[str, Exchange] = {}
    for collective in gradient_collectives(training, dense_elements, expert_elements):
        expert = collective.kind == "edp"
        elements = expert_elements if expert else dense_elements
        name = f"expert_{collective.part}" if expert else collective.part
        cost = _replica_cost(pricing, training, collective)
        exchanges[name] = _step_exchange(training, sizes, collective, cost, elements)
    exchanges["replicated_gradients"] = _exposed(_replicated(model, training, pricing))
    exchanges["tied_embedding"] = _exposed(_tied_embedding(model, training, pricing))
    exchanges["gradient_norm"] = _exposed(_gradient_norm(pricing))
    return exchanges


def _replica_cost(pricing: Pricing, training: TrainingSpec, collective: Collective) -> Cost:
    """Cost among data-parallel replicas.

    With several optimizer instances gradients are reduce-scattered in each and the shards
    all-reduced across (param_and_grad_buffer.py:start_grad_sync, 0.19.2).
    """
    platform, instances = pricing.platform, training.num_distributed_optimizer_instances
    if instances == 1 or collective.operation is Operation.ALL_REDUCE:
        return collective_cost(platform, pricing.reach(collective.kind), collective)
    inside, across = instances_at_levels(
        platform, pricing.sizes, collective.kind, instances, pricing.order
    )
    cost = collective_cost(platform, inside, collective)
    if collective.part == "parameters":
        return cost
    shard = replace(
        collective,
        operation=Operation.ALL_REDUCE,
        tensor_bytes=collective.tensor_bytes / inside.members,
    )
    return cost + collective_cost(platform, across, shard)


def _step_exchange(
    training: TrainingSpec, sizes: Sizes, collective: Collective, cost: Cost, elements: Number
) -> Exchange:
    gradients = collective.part == "gradients"
    sharding = "optim_grads_params" if training.fsdp == "torch" else None
    sharding = sharding or training.data_parallel_sharding_strategy
    if training.fsdp and sharding in ("optim_grads", "optim_grads_params"):
        return _fully_sharded(sizes, cost, gradients=gradients, sharding=sharding)
    shown: Number = 1.0
    if collective.behind:
        shown = np.minimum(_bucket_elements(training, sizes) / np.maximum(elements, 1), 1.0)
    when: Compute = ("last", "backward") if gradients else ("first", "forward")
    busy = Pass(
        shown * cost.seconds, (1 - shown) * cost.seconds, (when,) if collective.behind else ()
    )
    passes = (Pass(), busy) if gradients else (busy, Pass())
    return Exchange(*passes, 0.0, cost.bytes_by_level, cost.messages)


def _fully_sharded(sizes: Sizes, cost: Cost, *, gradients: bool, sharding: str) -> Exchange:
    """Every micro-batch reduces gradients, and gathers sharded parameters in both passes.

    megatron/core/distributed/fsdp (0.19.2).
    """
    times = sizes.micro_batches
    forward, backward = Pass(), Pass()
    if gradients:
        backward = Pass(0.0, times * cost.seconds, (("every", "backward"),))
    elif sharding == "optim_grads_params":
        forward = Pass(0.0, times * cost.seconds, (("every", "forward"),))
        backward = Pass(0.0, times * cost.seconds, (("every", "backward"),))
        times = 2 * times
    else:
        times = 1
        forward = Pass(cost.seconds)
    sent = tuple(times * each for each in cost.bytes_by_level)
    return Exchange(forward, backward, 0.0, sent, times * cost.messages)


def _bucket_elements(training: TrainingSpec, sizes: Sizes) -> Number:
    """distributed_data_parallel.py:DistributedDataParallel.__init__ (0.19.2)."""
    return training.ddp_bucket_size or np.maximum(40_000_000, 1_000_000 * sizes.dp * sizes.cp)


def _exposed(cost: Cost) -> Exchange:
    return Exchange(Pass(), Pass(cost.seconds), 0.0, cost.bytes_by_level, cost.messages)


def _replicated(model: ModelSpec, training: TrainingSpec, pricing: Pricing) -> Cost:
    if not training.sequence_parallel:
        return no_cost(pricing.platform)
    elements = replicated_parameters(model) / pricing.sizes.pp
    gradients = elements * DTYPE_BYTES[training.main_grads_dtype]
    return _all_reduce(pricing.platform, pricing.reach("tp"), gradients)


def _tied_embedding(model: ModelSpec, training: TrainingSpec, pricing: Pricing) -> Cost:
    """First and last stage add the gradients of one weight that both hold.

    finalize_model_grads.py:_allreduce_word_embedding_grads (0.19.2).
    """
    if not (model.tied_embeddings or model.mtp_layers):
        return no_cost(pricing.platform)
    stages = pricing.reach("pp")
    ends = Reach(np.minimum(stages.members, 2), tuple(np.minimum(n, 2) for n in stages.domains))
    elements = model.padded_vocab(1) * model.hidden / pricing.sizes.tp
    gradients = elements * DTYPE_BYTES[training.main_grads_dtype]
    return _all_reduce(pricing.platform, ends, gradients)


def _gradient_norm(pricing: Pricing) -> Cost:
    """Dense and expert norms over all ranks: clip_grads.py:get_grad_norm_fp32 (0.19.2)."""
    world = np.asarray(pricing.sizes.world)
    domains = tuple(
        np.ones_like(world) if size is None else -(-world // size)
        for size in domain_sizes(pricing.platform)
    )
    once = _all_reduce(pricing.platform, Reach(world, domains), DTYPE_BYTES["fp32"])
    return once + once


def _all_reduce(platform: Platform, reach: Reach, tensor_bytes: Number) -> Cost:
    collective = Collective("step", "tp", Operation.ALL_REDUCE, tensor_bytes, "backward")
    return collective_cost(platform, reach, collective)
