"""What is trained: the model, its batch, and the settings of Megatron that change what it costs.

All three are read from one namespace of Megatron's arguments (`reading.py`), whoever wrote it: a
command line, a preset, a Hugging Face configuration, or Megatron's own parser in a running job.
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from piper_megatron.strict import StrictModel

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class LatentAttention(StrictModel):
    """Multi-latent attention (MLA), as in DeepSeek-V2.

    Attributes:
        q_rank: of the query's low-rank projection; None projects queries directly.
        kv_rank: of the common projection of keys and values.
        qk_head_dim, rope_head_dim, v_head_dim: per head; the rotary part is shared by all heads.
    """

    q_rank: PositiveInt | None = None
    kv_rank: PositiveInt
    qk_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class Attention(StrictModel):
    """Self-attention of every layer.

    Attributes:
        heads: query heads.
        groups: key-value heads; equals `heads` without grouped queries.
        head_dim: channels of a head (Megatron's kv_channels); unused with `latent`.
        latent: MLA, or None.
        qk_norm: norms on queries and keys (MLA: on the two low-rank projections).
        qkv_bias: bias of the QKV projection, whatever `ModelSpec.linear_bias` says.
        sink: one learnable softmax offset a head (GPT-OSS).
        output_gate: a gate as wide as the attention output comes out of the QKV projection.
        window: tokens that a query sees in a windowed layer, itself included; None sees all.
        windowed: per layer, whether the window applies; empty without a window.
    """

    heads: PositiveInt
    groups: PositiveInt
    head_dim: PositiveInt
    latent: LatentAttention | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    sink: bool = False
    output_gate: bool = False
    window: PositiveInt | None = None
    windowed: tuple[bool, ...] = ()


class Experts(StrictModel):
    """The mixture of experts of a MoE layer.

    Attributes:
        count: routed experts.
        topk: experts that a token visits.
        ffn: width of one routed expert.
        shared_ffn: width of all shared experts of a layer together; 0 for none.
        shared_gate: the shared experts' output is gated by a token-wise scalar.
        latent: width in which routed experts work (latent MoE), or None for the model's.
        groups, topk_groups: group-limited routing; None without.
        capacity_factor: rows of an expert over the mean; None keeps all rows (dropless).
        pad_to_capacity: every expert gets exactly its capacity of rows.
        score_function: of the router.
        expert_bias: the router's balancing bias (aux-loss-free).
        router_bias: the router's projection has a bias.
    """

    count: PositiveInt
    topk: PositiveInt
    ffn: PositiveInt
    shared_ffn: NonNegativeInt = 0
    shared_gate: bool = False
    latent: PositiveInt | None = None
    groups: PositiveInt | None = None
    topk_groups: PositiveInt | None = None
    capacity_factor: PositiveFloat | None = None
    pad_to_capacity: bool = False
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    expert_bias: bool = False
    router_bias: bool = False

    @model_validator(mode="after")
    def _can_be(self) -> "Experts":
        if self.topk > self.count:
            raise ValueError(
                f"--moe-router-topk {self.topk} is more than the {self.count} experts there are"
            )
        most = max(self.count / self.topk, 1.0)
        if self.capacity_factor and self.capacity_factor > most:
            raise ValueError(
                f"--moe-expert-capacity-factor {self.capacity_factor:g} is more than all tokens on "
                f"one expert; with {self.count} experts and top-{self.topk} it is at most {most:g}"
            )
        return self


class ModelSpec(StrictModel):
    """A GPT-like model.

    Attributes:
        name: what reports call it.
        hidden: width of the residual stream.
        ffn: width of a dense MLP.
        gated: MLPs and experts have a gate, so three matrices instead of two.
        quick_geglu: that gate is GPT-OSS's; Megatron's FLOP count takes it for two matrices.
        attention: of every layer, those of multi-token prediction included.
        moe_layers: per decoder layer, whether it has experts.
        experts: None in a dense model.
        mtp_layers: multi-token-prediction layers behind the decoder.
        mtp_repeated: these are one and the same layer, applied `mtp_layers` times.
        vocab: rows of the embedding before padding.
        vocab_divisor: the padded vocabulary is a multiple of this times TP.
        tied_embeddings: the output layer is the embedding.
        position: `learned` has an embedding of `max_positions` rows.
        max_positions: longest sequence.
        norm: LayerNorm has a bias, RMSNorm has none.
        linear_bias: linear layers have biases.
    """

    name: str = "this command's model"
    hidden: PositiveInt
    ffn: PositiveInt
    gated: bool
    quick_geglu: bool = False
    attention: Attention
    moe_layers: tuple[bool, ...] = Field(min_length=1)
    experts: Experts | None = None
    mtp_layers: NonNegativeInt = 0
    mtp_repeated: bool = False
    vocab: PositiveInt
    vocab_divisor: PositiveInt = 128
    tied_embeddings: bool = True
    position: Literal["learned", "rope", "yarn", "mrope", "relative", "none"] = "learned"
    max_positions: PositiveInt
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    linear_bias: bool = True

    @model_validator(mode="after")
    def _experts_where_layers_have_them(self) -> "ModelSpec":
        if any(self.moe_layers) and self.experts is None:
            raise ValueError("moe_layers names MoE layers but experts is missing")
        return self

    @property
    def layers(self) -> int:
        """Decoder layers, without those of multi-token prediction."""
        return len(self.moe_layers)

    @property
    def mtp_moe(self) -> bool:
        """Whether a multi-token-prediction layer has experts: it copies the last decoder layer."""
        return self.moe_layers[-1]

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks (megatron/training/tokenizer)."""
        multiple = self.vocab_divisor * tp
        return -(-self.vocab // multiple) * multiple


class BatchSpec(StrictModel):
    """The batch of a step.

    Attributes:
        seq: tokens of a sequence.
        micro_batch: sequences of a micro-batch on one data-parallel replica.
        global_batch: sequences of a step.
    """

    seq: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt


class TrainingSpec(StrictModel):
    """Settings of Megatron that change memory or time, by the names that Megatron gives them.

    Values are the effective ones, after Megatron's own validation (`None` there where it matters
    nothing). Fields without a comment here mean what `--help` of Megatron says.

    Attributes:
        precision: of weights and activations (`--bf16`, `--fp16`, else fp32).
        main_grads_dtype: of the gradient buffers: the precision's own where `--fp16`,
            `--grad-reduce-in-bf16` or the precision-aware optimizer's `--main-grads-dtype bf16`
            say so, else fp32.
        use_layer_wise_distributed_optimizer: an optimizer such as Muon shards its states by whole
            parameters.
        grad_reduce_in_fp32: gradients are accumulated and reduced in fp32.
        dispatcher: the MoE token dispatcher, Megatron's or one of `--piper-dispatcher`.
        dispatcher_chunks: parts of the traffic between nodes; None for as many as pay.
        flex_backend: of the `flex` dispatcher.
        attention_backend: `unfused` and `local` keep the scores; the others do not.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: str = "delayed"
    fp8_param_gather: bool = False
    fp4: bool = False
    first_last_layers_bf16: bool = False

    optimizer: str = "adam"
    use_distributed_optimizer: bool = False
    use_layer_wise_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: PositiveInt = 1
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    exp_avg_dtype: Dtype = "fp32"
    exp_avg_sq_dtype: Dtype = "fp32"
    grad_reduce_in_fp32: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = Field(default=1.0, ge=0, le=1)
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    ddp_bucket_size: PositiveInt | None = None
    ddp_num_buckets: PositiveInt | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    gradient_accumulation_fusion: bool = True
    fsdp: Literal["megatron", "torch"] | None = None
    data_parallel_sharding_strategy: str = "no_shard"

    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    cp_comm_type: str = "p2p"
    overlap_p2p_comm: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    moe_shared_expert_overlap: bool = False
    microbatch_group_size_per_vp_stage: PositiveInt | None = None
    overlap_p2p_comm_warmup_flush: bool = False

    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = (
        "transformer_engine"
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    masked_softmax_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    apply_rope_fusion: bool = True
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = "native"
    use_transformer_engine_op_fuser: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_scope: tuple[str, ...] = ()

    dispatcher: Literal[
        "allgather", "alltoall", "flex", "flat", "2dh", "halo", "rail", "rbd", "auto"
    ] = "allgather"
    dispatcher_chunks: PositiveInt | None = None
    flex_backend: Literal["deepep", "hybridep", "ncclep"] = "deepep"
    moe_grouped_gemm: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_router_pre_softmax: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    moe_router_padding_for_quantization: bool = False
    moe_apply_probs_on_input: bool = False
    moe_expert_rank_capacity_factor: PositiveFloat | None = None

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: NonNegativeInt | None = None
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False
    fine_grained_activation_offloading: bool = False
    offload_modules: tuple[str, ...] = ()
    cpu_offloading_num_layers: NonNegativeInt = 0

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or weight in the training precision (not the 8-bit copies)."""
        return DTYPE_BYTES[self.precision]
