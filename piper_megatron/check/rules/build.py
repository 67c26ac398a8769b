"""What start-up lets through and the building of the model, DDP or the optimizer does not."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest
from piper_megatron.check.rule import Problem, rule

MOE = "core/transformer/moe"
OPTIMIZER = "core/optimizer/optimizer_config.py"
DDP = "core/distributed/distributed_data_parallel_config.py"


@rule("build.widths", "core/utils.py:558", late=True)
def widths_divide_over_tensor_ranks(c: Command) -> Problem | None:
    """Matrices are cut evenly over tensor-parallel ranks."""
    dense = not c.experts or not all(c.moe_layers)
    for flag, width, size, name in (
        ("--ffn-hidden-size", c.values.ffn_hidden_size if dense else None, c.tp, "TP"),
        ("--moe-ffn-hidden-size", c.moe_width if c.experts else None, c.etp, "ETP"),
        (
            "--moe-shared-expert-intermediate-size",
            c.moe_shared_expert_intermediate_size if c.experts else None,
            c.tp,
            "TP",
        ),
        ("--padded-vocab-size", c.padded_vocab_size, c.tp, "TP"),
    ):
        if width is not None and width % size:
            return Problem(
                f"{flag} {width} is not divisible by {name} {size}",
                f"make {name} one of {nearest(size, divisors(width))}",
            )
    return None


@rule(
    "experts.pattern",
    "core/models/gpt/gpt_layer_specs.py:653",
    "core/models/gpt/gpt_layer_specs.py:671",
    late=True,
)
def expert_layers_are_given_for_all_layers(c: Command) -> Problem | None:
    """The pattern of MoE layers has an entry of 0 or 1 for every layer."""
    frequency = c.values.moe_layer_freq
    if not c.experts or c.hybrid_pattern is not None:
        return None
    if isinstance(frequency, int):
        if frequency > 0:
            return None
        return Problem(f"--moe-layer-freq {frequency} must be positive", "--moe-layer-freq 1")
    if len(frequency) != c.layers:
        return Problem(
            f"--moe-layer-freq lists {len(frequency)} layers, and the model has {c.layers}",
            f"list {c.layers} layers, for instance ([0]*1+[1]*{c.layers - 1})",
        )
    if set(frequency) - {0, 1}:
        return Problem("--moe-layer-freq has entries other than 0 and 1", "use 0 and 1")
    return None


@rule("experts.grouped-bias", f"{MOE}/experts.py:204", late=True)
def grouped_experts_fuse_no_bias_with_dropout(c: Command) -> Problem | None:
    """Grouped experts with biases cannot fuse bias and dropout."""
    if not (c.experts and c.moe_grouped_gemm and c.transformer_impl == "transformer_engine"):
        return None
    if not (c.add_bias_linear and c.bias_dropout_fusion):
        return None
    return Problem(
        "--moe-grouped-gemm with linear biases needs --no-bias-dropout-fusion",
        "add --no-bias-dropout-fusion, or --disable-bias-linear",
    )


@rule(
    "experts.shared-bias",
    f"{MOE}/shared_experts.py:124",
    late=True,
    fix="add --disable-bias-linear",
)
def shared_experts_have_no_bias(c: Command) -> bool:
    """Shared experts have no biases."""
    return bool(
        c.experts and c.moe_shared_expert_intermediate_size is not None and c.add_bias_linear
    )


@rule(
    "experts.latent-overlap",
    f"{MOE}/moe_layer.py:472",
    late=True,
    since="0.18.2",
    fix="drop --moe-shared-expert-overlap",
)
def latent_experts_exclude_shared_overlap(c: Command) -> bool:
    """--moe-shared-expert-overlap does not work with --moe-latent-size in training."""
    return bool(
        c.experts
        and c.moe_latent_size
        and c.moe_shared_expert_overlap
        and c.moe_shared_expert_intermediate_size is not None
    )


@rule("experts.op-fuser", f"{MOE}/experts.py:287", late=True, since="0.18.2")
def fused_experts_have_conditions(c: Command) -> Problem | None:
    """Transformer Engine's op fuser supports few kinds of grouped experts."""
    if not (c.experts and c.moe_grouped_gemm and c.use_transformer_engine_op_fuser):
        return None
    if c.transformer_impl != "transformer_engine":
        return None
    offloaded = {"expert_fc1", "moe_act"} & set(c.offload_modules)
    relu = c.squared_relu and c.use_fused_weighted_squared_relu
    needs = {
        "--expert-tensor-parallel-size 1": c.etp == 1,
        "no expert_fc1 or moe_act in --offload-modules": not (
            c.fine_grained_activation_offloading and offloaded
        ),
        "no --moe-apply-probs-on-input": not c.moe_apply_probs_on_input,
        "--swiglu, --quick-geglu or a fused squared ReLU": c.swiglu or c.quick_geglu or relu,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--use-transformer-engine-op-fuser with grouped experts needs {', '.join(missing)}",
        "drop --use-transformer-engine-op-fuser, or change that",
    )


@rule(
    "dispatcher.one-rank",
    f"{MOE}/token_dispatcher.py:1770",
    f"{MOE}/token_dispatcher.py:1788",
    late=True,
)
def flex_kernels_need_peers(c: Command) -> Problem | None:
    """DeepEP and NCCL EP need more than one rank to exchange tokens with."""
    if not c.experts or c.flex_backend not in ("deepep", "ncclep") or c.ep * c.etp > 1:
        return None
    return Problem(
        f"the flex dispatcher with {c.flex_backend} needs EP x ETP above 1, and both are 1",
        "--moe-token-dispatcher-type alltoall",
    )


@rule(
    "dispatcher.ncclep-build",
    f"{MOE}/token_dispatcher.py:1530",
    f"{MOE}/token_dispatcher.py:1540",
    f"{MOE}/token_dispatcher.py:1547",
    f"{MOE}/token_dispatcher.py:1564",
    late=True,
    since="0.19.2",
)
def nccl_ep_has_conditions(c: Command) -> Problem | None:
    """NCCL EP needs a buffer size, and static shapes need fused experts."""
    if not c.experts or c.flex_backend != "ncclep":
        return None
    if c.moe_expert_rank_capacity_factor is None:
        return Problem(
            "--moe-flex-dispatcher-backend ncclep needs --moe-expert-rank-capacity-factor, the "
            "size of its receive buffer",
            "add --moe-expert-rank-capacity-factor, for instance 2.0; more rows than that stop the "
            "job",
        )
    if c.moe_ncclep_zero_copy and not c.moe_ncclep_static_shape:
        return Problem(
            "--moe-ncclep-zero-copy needs --moe-ncclep-static-shape",
            "add --moe-ncclep-static-shape",
        )
    if not c.moe_ncclep_static_shape:
        return None
    if not (c.use_transformer_engine_op_fuser and c.moe_grouped_gemm):
        return Problem(
            "--moe-ncclep-static-shape needs --use-transformer-engine-op-fuser and "
            "--moe-grouped-gemm",
            "add both, or drop --moe-ncclep-static-shape",
        )
    if (c.fp8 or c.fp4) and c.architecture < 10:
        return Problem(
            "--moe-ncclep-static-shape in 8 or 4 bits needs Blackwell GPUs",
            "drop --moe-ncclep-static-shape",
        )
    return None


@rule("attention.local-context", "core/transformer/dot_product_attention.py:57", late=True)
def local_attention_has_no_context_parallelism(c: Command) -> Problem | None:
    """Only Transformer Engine's attention splits the sequence over ranks."""
    if c.cp == 1 or c.transformer_impl != "local":
        return None
    return Problem(
        f"CP {c.cp} needs --transformer-impl transformer_engine", "drop --transformer-impl local"
    )


@rule(
    "attention.unfused-context",
    source="Transformer Engine, DotProductAttention: no context parallelism in the unfused backend",
    late=True,
    fix="--attention-backend flash or fused",
)
def unfused_attention_has_no_context_parallelism(c: Command) -> bool:
    """--attention-backend unfused does not work with context parallelism (CP {c.cp})."""
    return c.cp > 1 and c.attention_backend == "unfused"


@rule(
    "attention.context-heads",
    source="Transformer Engine, AttnFuncWithCPAndQKVOA2A: heads are split over context ranks",
    late=True,
)
def heads_divide_over_context_ranks(c: Command) -> Problem | None:
    """An all-to-all over context ranks splits the heads among them."""
    if c.cp == 1 or "a2a" not in c.cp_comm_type:
        return None
    heads = c.num_attention_heads // c.tp
    groups = heads if c.mla else max(c.query_groups // c.tp, 1)
    if heads % c.cp == 0 and groups % c.cp == 0:
        return None
    return Problem(
        f"--cp-comm-type a2a splits {heads} heads and {groups} key-value heads of a "
        f"tensor-parallel rank over CP {c.cp}, which does not come out",
        "--cp-comm-type p2p, or a smaller --context-parallel-size",
    )


@rule(
    "attention.latent-norm",
    "core/models/gpt/gpt_layer_specs.py:245",
    "core/models/gpt/gpt_layer_specs.py:414",
    late=True,
    fix="drop --qk-l2-norm",
)
def latent_attention_has_no_l2_norm(c: Command) -> bool:
    """--qk-l2-norm does not work with --multi-latent-attention."""
    return c.mla and c.qk_l2_norm


@rule("optimizer.precision-aware", f"{OPTIMIZER}:431", f"{OPTIMIZER}:434", late=True)
def precision_aware_optimizer_is_sharded_adam(c: Command) -> Problem | None:
    """The precision-aware optimizer is the distributed Adam."""
    if not c.use_precision_aware_optimizer:
        return None
    if c.emerging_optimizer or c.optimizer != "adam":
        return Problem(
            f"--use-precision-aware-optimizer does not know --optimizer {c.optimizer}",
            "--optimizer adam, or drop it",
        )
    if not c.distributed_optimizer:
        return Problem(
            "--use-precision-aware-optimizer needs --use-distributed-optimizer",
            "add --use-distributed-optimizer",
        )
    return None


@rule(
    "optimizer.dtypes",
    f"{OPTIMIZER}:470",
    f"{OPTIMIZER}:473",
    f"{OPTIMIZER}:476",
    f"{OPTIMIZER}:479",
    late=True,
)
def small_optimizer_states_need_the_precision_aware_one(c: Command) -> Problem | None:
    """Other states than fp32 need the precision-aware optimizer."""
    if c.use_precision_aware_optimizer:
        return None
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    found = [
        f"--{name.replace('_', '-')} {getattr(c, name)}"
        for name in names
        if getattr(c, name) != "fp32"
    ]
    if not found:
        return None
    return Problem(
        f"{' '.join(found)} needs --use-precision-aware-optimizer",
        "add --use-precision-aware-optimizer and --use-distributed-optimizer",
    )


@rule(
    "optimizer.mxfp8-step",
    f"{OPTIMIZER}:425",
    late=True,
    since="0.19.2",
    fix="drop one of the two",
)
def reused_gradient_buffer_excludes_the_overlapped_step(c: Command) -> bool:
    """--reuse-grad-buf-for-mxfp8-param-ag excludes --overlap-param-gather-with-optimizer-step."""
    reuse = c.reuse_grad_buf_for_mxfp8_param_ag and not c.use_megatron_fsdp
    return reuse and c.overlap_param_gather_with_optimizer_step


@rule(
    "optimizer.emerging-fp16",
    "core/optimizer/__init__.py:770",
    late=True,
    since="0.18.2",
    fix="--bf16",
)
def emerging_optimizers_exclude_fp16(c: Command) -> bool:
    """--optimizer {c.optimizer} does not work with --fp16."""
    return c.emerging_optimizer and c.fp16


@rule(
    "ddp.reused-buffer",
    f"{DDP}:254",
    late=True,
    fix="add --fp8-param-gather, or drop --reuse-grad-buf-for-mxfp8-param-ag",
)
def reused_gradient_buffer_needs_fp8_weights(c: Command) -> bool:
    """--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather."""
    reuse = c.reuse_grad_buf_for_mxfp8_param_ag and not c.use_megatron_fsdp
    return reuse and not c.fp8_param_gather and not c.use_torch_fsdp2


@rule("ddp.buckets", f"{DDP}:270", f"{DDP}:271", late=True, since="0.18.2")
def buckets_are_counted_or_sized(c: Command) -> Problem | None:
    """Gradient buckets have a number or a size."""
    if c.ddp_num_buckets is None or c.use_torch_fsdp2:
        return None
    if c.ddp_bucket_size is not None:
        return Problem(
            "--ddp-num-buckets and --ddp-bucket-size exclude each other", "drop --ddp-num-buckets"
        )
    if c.ddp_num_buckets <= 0:
        return Problem("--ddp-num-buckets must be positive", "--ddp-num-buckets 1")
    return None


@rule("ddp.fp32-patterns", f"{DDP}:264", late=True)
def local_fp32_gradients_need_smaller_ones(c: Command) -> Problem | None:
    """Accumulating some gradients in fp32 only makes sense beside others in less."""
    if not c.ddp_param_name_patterns_for_fp32_local_accumulation or c.use_torch_fsdp2:
        return None
    if not c.gradients_in_fp32:
        return None
    return Problem(
        "--ddp-param-name-patterns-for-fp32-local-accumulation with gradients that are in fp32 "
        "already",
        "drop it, or add --grad-reduce-in-bf16",
    )
