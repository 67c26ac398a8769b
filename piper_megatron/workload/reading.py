"""The workload that Megatron's arguments describe.

All functions but `effective` take what it returned, or the validated arguments of a running job.
"""

import argparse
from collections import Counter
from typing import Any

from pydantic import ValidationError

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import StrictModel, first_problem
from piper_megatron.workload.dispatcher_flags import dispatcher_flags
from piper_megatron.workload.effective import effective
from piper_megatron.workload.flags import spelling_of
from piper_megatron.workload.spec import (
    Attention,
    BatchSpec,
    Experts,
    LatentAttention,
    ModelSpec,
    TrainingSpec,
)

__all__ = ["batch_spec", "effective", "model_spec", "training_spec"]

# tokenizers whose vocabulary is part of Megatron's arguments or known without a file
_VOCABULARIES = {"GPT2BPETokenizer": 50257}


def model_spec(values: argparse.Namespace) -> ModelSpec:
    """The model.

    Raises:
        WorkloadError: the vocabulary is unknown, a pattern of layers has the wrong length, or a
            size makes no sense.
    """
    vocab, divisor = _vocabulary(values)
    moe_layers = _moe_layers(values)
    return _built(
        ModelSpec,
        hidden=values.hidden_size,
        ffn=values.ffn_hidden_size,
        gated=values.swiglu or values.quick_geglu,
        quick_geglu=values.quick_geglu,
        attention=_attention(values),
        moe_layers=moe_layers,
        experts=_experts(values) if any(moe_layers) else None,
        mtp_layers=values.mtp_num_layers or 0,
        mtp_repeated=values.mtp_use_repeated_layer,
        vocab=vocab,
        vocab_divisor=divisor,
        tied_embeddings=not values.untie_embeddings_and_output_weights,
        position=values.position_embedding_type.removesuffix("_absolute"),
        max_positions=values.max_position_embeddings,
        norm=values.normalization,
        linear_bias=values.add_bias_linear,
    )


def batch_spec(values: argparse.Namespace) -> BatchSpec:
    """The batch.

    Raises:
        WorkloadError: the global batch is no multiple of a micro-batch on every replica.
    """
    at_once = values.micro_batch_size * values.data_parallel_size
    whole = values.global_batch_size // at_once * at_once
    # megatron/core/num_microbatches_calculator.py:ConstantNumMicroBatchesCalculator (0.19.2)
    if whole != values.global_batch_size and not (whole and values.decrease_batch_size_if_needed):
        near = " or ".join(str(batch) for batch in (whole, whole + at_once) if batch)
        raise WorkloadError(
            f"--global-batch-size {values.global_batch_size} is not a multiple of "
            f"--micro-batch-size {values.micro_batch_size} x data parallel size "
            f"{values.data_parallel_size}; nearest: {near}"
        )
    return _built(
        BatchSpec, seq=values.seq_length, micro_batch=values.micro_batch_size, global_batch=whole
    )


def training_spec(values: argparse.Namespace) -> TrainingSpec:
    """The settings that change memory or time."""
    same_name = {
        name: getattr(values, name) for name in TrainingSpec.model_fields if hasattr(values, name)
    }
    selective = values.recompute_granularity == "selective"
    fsdp = "megatron" if values.use_megatron_fsdp else "torch" if values.use_torch_fsdp2 else None
    return _built(
        TrainingSpec,
        **same_name
        | {
            "precision": values.params_dtype,
            "fp4": values.fp4 is not None,
            "main_grads_dtype": _gradient_dtype(values),
            "grad_reduce_in_fp32": _gradient_dtype(values) == "fp32",
            "fsdp": fsdp,
            "data_parallel_sharding_strategy": (
                values.data_parallel_sharding_strategy if fsdp == "megatron" else "no_shard"
            ),
            "cp_comm_type": Counter(values.cp_comm_type).most_common(1)[0][0],
            "bias_activation_fusion": (
                values.bias_swiglu_fusion if values.swiglu else values.bias_gelu_fusion
            ),
            "cuda_graph_scope": tuple(values.cuda_graph_modules),
            **_dispatcher(values),
            "flex_backend": values.moe_flex_dispatcher_backend,
            "moe_router_load_balancing_type": _tuple(values.moe_router_load_balancing_type),
            "moe_aux_loss_coeff": _tuple(values.moe_aux_loss_coeff),
            "recompute_modules": tuple(values.recompute_modules) if selective else (),
            "offload_modules": (
                tuple(values.offload_modules) if values.fine_grained_activation_offloading else ()
            ),
        },
    )


def _dispatcher(values: argparse.Namespace) -> dict[str, Any]:
    """Piper's takes the place of Megatron's alltoall; a job without the plug-in has no flag."""
    megatrons = values.moe_token_dispatcher_type
    if megatrons != "alltoall" or getattr(values, "piper_dispatcher", None) is None:
        return {"dispatcher": megatrons}
    flags = dispatcher_flags(values)
    return {"dispatcher": flags.algorithm, "dispatcher_chunks": flags.chunks}


def _gradient_dtype(values: argparse.Namespace) -> str:
    """Of the gradient buffers: distributed_data_parallel.py:__init__ (0.19.2)."""
    return "fp32" if values.accumulate_allreduce_grads_in_fp32 else values.params_dtype


def _vocabulary(values: argparse.Namespace) -> tuple[int, int]:
    """Rows of the embedding before padding, and what they are padded to a multiple of."""
    if values.padded_vocab_size:
        return values.padded_vocab_size, 1
    vocab = values.vocab_size or _VOCABULARIES.get(values.tokenizer_type)
    if vocab is None:
        tokenizer = f" of --tokenizer-type {values.tokenizer_type}" if values.tokenizer_type else ""
        raise WorkloadError(f"the vocabulary{tokenizer} is not known; add --vocab-size")
    return vocab, values.make_vocab_size_divisible_by if values.pad_vocab_size else 1


def _moe_layers(values: argparse.Namespace) -> tuple[bool, ...]:
    """megatron/core/models/gpt/gpt_layer_specs.py:get_gpt_decoder_layer_specs (0.19.2)."""
    layers = values.num_layers
    if not values.num_experts:
        return (False,) * layers
    return _per_layer(
        "--moe-layer-freq",
        values.moe_layer_freq,
        layers,
        lambda every: [index % every == 0 for index in range(layers)],
    )


def _attention(values: argparse.Namespace) -> Attention:
    window = values.window_size and values.window_size[0] + 1
    return _built(
        Attention,
        heads=values.num_attention_heads,
        groups=values.num_query_groups,
        head_dim=values.kv_channels,
        latent=_latent(values) if values.multi_latent_attention else None,
        qk_norm=values.qk_layernorm,
        qkv_bias=values.add_qkv_bias,
        sink=values.softmax_type == "learnable",
        output_gate=values.attention_output_gate,
        window=window or None,
        windowed=_windowed(values) if window else (),
    )


def _windowed(values: argparse.Namespace) -> tuple[bool, ...]:
    """megatron/core/transformer/utils.py:is_layer_window_attention (0.19.2)."""
    layers, skip = values.num_layers, values.window_attn_skip_freq
    if skip is None:
        return (True,) * layers
    return _per_layer(
        "--window-attn-skip-freq",
        skip,
        layers,
        lambda every: [number % every != 0 for number in range(1, layers + 1)],
    )


def _per_layer(flag: str, pattern: Any, layers: int, spread: Any) -> tuple[bool, ...]:
    """A pattern of one truth for each layer: as a list, or every so many layers."""
    if isinstance(pattern, int):
        if pattern < 1:
            raise WorkloadError(f"{flag} must be at least 1, got {pattern}")
        pattern = spread(pattern)
    if len(pattern) != layers:
        raise WorkloadError(
            f"{flag} is a pattern of {len(pattern)} layers, but --num-layers is {layers}"
        )
    if not all(layer in (0, 1) for layer in pattern):
        raise WorkloadError(f"{flag} is a pattern of 0 and 1, one for each layer; got {pattern}")
    return tuple(map(bool, pattern))


def _latent(values: argparse.Namespace) -> LatentAttention:
    return _built(
        LatentAttention,
        q_rank=values.q_lora_rank,
        kv_rank=values.kv_lora_rank,
        qk_head_dim=values.qk_head_dim,
        rope_head_dim=values.qk_pos_emb_head_dim,
        v_head_dim=values.v_head_dim,
    )


def _experts(values: argparse.Namespace) -> Experts:
    return _built(
        Experts,
        count=values.num_experts,
        topk=values.moe_router_topk,
        ffn=values.moe_ffn_hidden_size,
        shared_ffn=values.moe_shared_expert_intermediate_size or 0,
        shared_gate=values.moe_shared_expert_gate,
        latent=values.moe_latent_size,
        groups=values.moe_router_num_groups,
        topk_groups=values.moe_router_group_topk,
        capacity_factor=values.moe_expert_capacity_factor,
        pad_to_capacity=values.moe_pad_expert_input_to_capacity,
        score_function=values.moe_router_score_function,
        expert_bias=values.moe_router_enable_expert_bias,
        # megatron/core/transformer/moe/router.py:Router.__init__ (0.19.2)
        router_bias=values.add_bias_linear,
    )


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, list) else (value,)


def _built[Model: StrictModel](model: type[Model], **fields: Any) -> Model:
    try:
        return model(**fields)
    except ValidationError as error:
        problem = first_problem(error)
        for field in error.errors()[0]["loc"][:1]:
            problem = problem.replace(str(field), spelling_of(str(field)), 1)
        raise WorkloadError(problem) from None
