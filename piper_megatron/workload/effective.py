"""What Megatron makes of its arguments before it builds anything.

Follows `validate_args` of megatron/training/arguments.py and `__post_init__` of
megatron/core/transformer/transformer_config.py, release 0.19.2, without their checks: whether
Megatron accepts a command at all is for `piper_megatron.check`.
"""

import argparse
import enum
from typing import Any

from piper_megatron.errors import LayoutError, WorkloadError
from piper_megatron.workload import flags
from piper_megatron.workload.layout_text import stages_of_text

_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
_PLAIN = (type(None), bool, int, float, str)
_REQUIRED = ("hidden_size", "num_attention_heads", "max_position_embeddings", "micro_batch_size")
_POSITIVE = (
    *_REQUIRED,
    "num_layers",
    "seq_length",
    "global_batch_size",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_vp_stage",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_topk",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_distributed_optimizer_instances",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
)
_NOT_NEGATIVE = ("num_experts", "mtp_num_layers", "moe_shared_expert_intermediate_size")
_GRAPH_FLAGS = (
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope_deprecated",
)
# destination -> what a command with it trains; none of these is a GPT as the model knows it
_OTHER_MODELS = {
    "hybrid_layer_pattern": "a hybrid model of Mamba and attention layers",
    "hybrid_override_pattern": "a hybrid model of Mamba and attention layers",
    "is_hybrid_model": "a hybrid model of Mamba and attention layers",
    "experimental_attention_variant": "an experimental attention variant",
    "heterogeneous_layers_config_path": "layers of different shapes",
    "heterogeneous_layers_config_encoded_json": "layers of different shapes",
    "decoder_num_layers": "an encoder-decoder model",
    "vision_pretraining": "a vision model",
    "perform_rl_step": "reinforcement learning",
    "yaml_cfg": "arguments in a YAML file",
}


def effective(values: argparse.Namespace, world: int) -> argparse.Namespace:
    """The arguments with everything filled in that Megatron derives from them.

    Works on parsed arguments, on what it returned before, and on the namespace of a running job of
    any supported release. Data types and enumerations become words (`bf16`, `flash`); what an older
    release does not have gets the newest release's default.

    Args:
        values: a namespace with the destinations of Megatron's parser.
        world: number of ranks.

    Raises:
        WorkloadError: a size is missing or not positive, or the model is none that is modelled.
        LayoutError: virtual stages do not divide the layers.
    """
    v = _in_words(values)
    _refuse_other_models(v)
    v.num_layers = v.encoder_num_layers = v.encoder_num_layers or v.num_layers
    v.seq_length = v.encoder_seq_length = v.encoder_seq_length or v.seq_length
    _check_sizes(v)
    _parallel_sizes(v, world)
    _batch(v)
    _virtual_stages(v)
    _widths(v)
    _precision(v)
    _optimizer(v)
    _fusions(v)
    _experts(v)
    _recompute(v)
    _cuda_graphs(v)
    return v


def cuda_graphs(values: argparse.Namespace) -> tuple[str, frozenset[str]]:
    """Implementation of CUDA graphs, and the modules that they capture; none for whole layers.

    Args:
        values: as for `effective`.
    """
    newest = flags.defaults()
    given = {dest: _word(getattr(values, dest, newest[dest])) for dest in _GRAPH_FLAGS}
    v = argparse.Namespace(**given, cuda_graph_scope=getattr(values, "cuda_graph_scope", []))
    _cuda_graphs(v)
    return v.cuda_graph_impl, frozenset(v.cuda_graph_modules)


def _in_words(values: argparse.Namespace) -> argparse.Namespace:
    """A copy with words in place of objects, and the newest release's defaults beside."""
    words = {dest: _word(value) for dest, value in vars(values).items()}
    return argparse.Namespace(**(flags.defaults() | words))


def _word(value: Any) -> Any:
    """Values of a running job as their flags spell them."""
    if type(value) in _PLAIN:  # nearly all are, and there are many
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list):
        return [_word(element) for element in value]
    return _DTYPES.get(str(value), value) if type(value).__module__ == "torch" else value


def _refuse_other_models(v: argparse.Namespace) -> None:
    for dest, what in _OTHER_MODELS.items():
        if getattr(v, dest, None):
            raise WorkloadError(
                f"{flags.spelling_of(dest)}: {what}, which the resource model does not know; it "
                "knows GPT models with dense and mixture-of-experts layers"
            )
    if v.spec and v.spec != ["local"]:
        raise WorkloadError(
            f"--spec {' '.join(v.spec)}: layers of one's own, which the resource model does not "
            "know; remove it if Megatron's own layers are close enough"
        )


def _check_sizes(v: argparse.Namespace) -> None:
    for dest in (*_REQUIRED, "num_layers", "seq_length"):
        if getattr(v, dest) is None:
            raise WorkloadError(f"{flags.spelling_of(dest)} is missing; add it")
    for dest in _POSITIVE:
        size = getattr(v, dest)
        if size is not None and size < 1:
            raise WorkloadError(f"{flags.spelling_of(dest)} must be at least 1, got {size}")
    for dest in _NOT_NEGATIVE:
        if (getattr(v, dest) or 0) < 0:
            raise WorkloadError(f"{flags.spelling_of(dest)} is negative: {getattr(v, dest)}")
    if v.moe_expert_capacity_factor == 0:
        raise WorkloadError("--moe-expert-capacity-factor 0 drops every token; give more")


def _parallel_sizes(v: argparse.Namespace, world: int) -> None:
    v.world_size = world
    tp, pp, cp = (
        getattr(v, f"{axis}_size")
        for axis in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    v.expert_tensor_parallel_size = v.expert_tensor_parallel_size or tp
    v.transformer_pipeline_model_parallel_size = pp
    v.gtp_weight_remat_size = (v.tensor_parallel_num_weight_shards or tp) // tp
    v.expert_gtp_weight_remat_size = (
        v.expert_tensor_parallel_num_weight_shards or v.expert_tensor_parallel_size
    ) // v.expert_tensor_parallel_size
    if v.gtp_weight_remat_size > 1 or v.expert_gtp_weight_remat_size > 1:
        raise WorkloadError(
            "--tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards "
            "above the tensor parallel size shard weights in a way that the resource model does "
            "not know; remove them"
        )
    v.data_parallel_size = max(world // (tp * pp * cp), 1)
    v.sequence_parallel = v.sequence_parallel and tp > 1


def _batch(v: argparse.Namespace) -> None:
    if v.global_batch_size is None:
        v.global_batch_size = v.micro_batch_size * v.data_parallel_size


def _virtual_stages(v: argparse.Namespace) -> None:
    v.virtual_pipeline_model_parallel_size = _vpp(v)
    if v.virtual_pipeline_model_parallel_size is None:
        v.overlap_p2p_comm = v.align_param_gather = False
    if v.microbatch_group_size_per_vp_stage is None:
        v.microbatch_group_size_per_vp_stage = v.pipeline_model_parallel_size


def _vpp(v: argparse.Namespace) -> int | None:
    """Chunks of a pipeline rank; None for one."""
    pp = v.pipeline_model_parallel_size
    if v.pipeline_model_parallel_layout is not None:
        vpp = len(stages_of_text(v.pipeline_model_parallel_layout)) // pp
    elif v.num_virtual_stages_per_pipeline_rank is not None:
        vpp = v.num_virtual_stages_per_pipeline_rank
    elif v.num_layers_per_virtual_pipeline_stage is not None:
        slots = (
            v.num_layers
            + v.account_for_embedding_in_pipeline_split
            + v.account_for_loss_in_pipeline_split
        )
        per_rank, per_chunk = slots // pp, v.num_layers_per_virtual_pipeline_stage
        if per_rank % per_chunk:
            legal = [str(n) for n in range(1, per_rank + 1) if per_rank % n == 0]
            raise LayoutError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the "
                f"{per_rank} layers of a pipeline rank; legal are {', '.join(legal)}"
            )
        vpp = per_rank // per_chunk
    else:
        return None
    return vpp if vpp > 1 else None


def _widths(v: argparse.Namespace) -> None:
    if v.ffn_hidden_size is None:
        v.ffn_hidden_size = (
            int((4 * v.hidden_size * 2 / 3) / 64) * 64 if v.swiglu else 4 * v.hidden_size
        )
    if v.kv_channels is None:
        if v.hidden_size % v.num_attention_heads:
            raise WorkloadError(
                f"--num-attention-heads {v.num_attention_heads} does not divide --hidden-size "
                f"{v.hidden_size}; change one, or add --kv-channels"
            )
        v.kv_channels = v.hidden_size // v.num_attention_heads
    if not v.group_query_attention:
        v.num_query_groups = v.num_attention_heads
    v.add_qkv_bias = v.add_qkv_bias or v.add_bias_linear
    if v.use_rotary_position_embeddings:
        v.position_embedding_type = "rope"


def _precision(v: argparse.Namespace) -> None:
    if v.fp16 and v.bf16:
        raise WorkloadError("--fp16 and --bf16 exclude each other; keep one")
    v.params_dtype = "bf16" if v.bf16 else "fp16" if v.fp16 else "fp32"
    if v.bf16 and v.grad_reduce_in_bf16:
        v.accumulate_allreduce_grads_in_fp32 = False
    elif v.bf16 and v.main_grads_dtype == "fp32":
        v.accumulate_allreduce_grads_in_fp32 = True
    if v.use_torch_fsdp2:
        v.fp8_param_gather = False
    if v.apply_query_key_layer_scaling:
        v.attention_softmax_in_fp32 = True


def _optimizer(v: argparse.Namespace) -> None:
    if v.use_megatron_fsdp:
        v.use_distributed_optimizer = True
        v.reuse_grad_buf_for_mxfp8_param_ag = False
    layer_wise = getattr(v, "use_layer_wise_distributed_optimizer", False)
    if v.optimizer == "dist_muon":
        v.optimizer, layer_wise = "muon", True
    if v.optimizer not in ("sgd", "adam") and v.use_distributed_optimizer:
        v.use_distributed_optimizer, layer_wise = False, True
    v.use_layer_wise_distributed_optimizer = layer_wise
    if v.freeze_all_layers:
        v.use_distributed_optimizer = v.overlap_param_gather = False


def _fusions(v: argparse.Namespace) -> None:
    if not v.add_bias_linear:
        v.bias_gelu_fusion = False
    if v.position_embedding_type != "rope":
        v.apply_rope_fusion = False


def _experts(v: argparse.Namespace) -> None:
    v.num_experts = v.num_experts or None
    if v.num_experts is not None and v.moe_ffn_hidden_size is None:
        v.moe_ffn_hidden_size = v.ffn_hidden_size
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(v, dest)
        if isinstance(value, list) and len(value) == 1:
            setattr(v, dest, value[0])
    if v.moe_expert_capacity_factor is not None and v.moe_expert_capacity_factor < 0:
        v.moe_expert_capacity_factor = None
    if v.moe_enable_deepep:
        v.moe_flex_dispatcher_backend = "deepep"
    if v.moe_router_padding_for_fp8:
        v.moe_router_padding_for_quantization = True


def _recompute(v: argparse.Namespace) -> None:
    if v.recompute_activations:
        v.recompute_granularity = "selective"
    if v.recompute_modules is None:
        v.recompute_modules = ["core_attn"]
    if v.moe_layer_recompute:
        v.recompute_granularity = "selective"
        if "moe" not in v.recompute_modules:
            v.recompute_modules = [*v.recompute_modules, "moe"]
    v.cpu_offloading = v.cpu_offloading_num_layers > 0


def _cuda_graphs(v: argparse.Namespace) -> None:
    if v.enable_cuda_graph:
        v.cuda_graph_impl = "local"
    elif v.external_cuda_graph:
        v.cuda_graph_impl = "transformer_engine"
    # the option was --cuda-graph-scope before 0.18
    words = (
        v.cuda_graph_modules or v.cuda_graph_scope_deprecated or getattr(v, "cuda_graph_scope", [])
    )
    if "full_iteration" in words:
        v.cuda_graph_impl = "full_iteration"
    whole = ("full", "full_iteration", "full_iteration_inference")
    v.cuda_graph_modules = [word for word in words if word not in whole]
    routing = ("moe_router", "moe_preprocess")
    if v.cuda_graph_impl == "local" and set(routing) & set(v.cuda_graph_modules):
        v.cuda_graph_modules += [word for word in routing if word not in v.cuda_graph_modules]
