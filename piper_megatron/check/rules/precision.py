"""Number formats: 16, 8 and 4 bits."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"


@rule("precision.one-format", f"{ARGUMENTS}:1173", f"{ARGUMENTS}:1182", f"{CONFIG}:1315")
def one_sixteen_bit_format(c: Command) -> Problem | None:
    """One 16-bit format at a time."""
    if c.fp16 and c.bf16:
        return Problem("--fp16 and --bf16 exclude each other", "drop --fp16")
    return None


@rule("precision.fp16-loss", f"{ARGUMENTS}:1333", fix="drop --fp16-lm-cross-entropy")
def sixteen_bit_loss_needs_fp16(c: Command) -> bool:
    """--fp16-lm-cross-entropy needs --fp16."""
    return c.fp16_lm_cross_entropy and not c.fp16


@rule("precision.fp32-residual", f"{ARGUMENTS}:1335", fix="drop --fp32-residual-connection")
def fp32_residual_needs_sixteen_bits(c: Command) -> bool:
    """--fp32-residual-connection needs --bf16 or --fp16."""
    return c.fp32_residual_connection and not (c.fp16 or c.bf16)


@rule(
    "precision.gradients",
    f"{ARGUMENTS}:1187",
    fix="drop --accumulate-allreduce-grads-in-fp32, or --main-grads-dtype fp32",
)
def fp32_accumulation_needs_fp32_gradients(c: Command) -> bool:
    """--accumulate-allreduce-grads-in-fp32 contradicts --main-grads-dtype {c.main_grads_dtype}."""
    return c.bf16 and c.accumulate_allreduce_grads_in_fp32 and c.main_grads_dtype != "fp32"


@rule("precision.fp8-or-fp4", f"{ARGUMENTS}:1066", f"{CONFIG}:1455", fix="drop one of the two")
def one_small_format(c: Command) -> bool:
    """--fp8-format and --fp4-format exclude each other."""
    return bool(c.fp8 and c.fp4)


@rule("precision.fp4-gather", f"{ARGUMENTS}:1070", f"{CONFIG}:1452", fix="add --fp4-format e2m1")
def fp4_weights_need_fp4(c: Command) -> bool:
    """--fp4-param-gather needs --fp4-format."""
    return c.fp4_param_gather and not c.fp4


@rule("precision.fp8-gather", f"{CONFIG}:1440", fix="add --fp8-format hybrid, or drop it")
def fp8_weights_need_fp8(c: Command) -> bool:
    """--fp8-param-gather needs --fp8-format."""
    if c.use_torch_fsdp2:  # switches the gather off
        return False
    return c.fp8_param_gather and not c.fp8


@rule(
    "precision.fp8-gather-optimizer",
    f"{ARGUMENTS}:1061",
    fix="add --use-distributed-optimizer",
)
def fp8_weights_need_a_sharded_optimizer(c: Command) -> bool:
    """--fp8-param-gather needs --use-distributed-optimizer or FSDP."""
    return c.fp8_param_gather and not (
        c.use_distributed_optimizer or c.use_torch_fsdp2 or c.use_megatron_fsdp
    )


@rule("precision.bf16-ends", f"{CONFIG}:1403", fix="--fp8-recipe blockwise, tensorwise or mxfp8")
def delayed_scaling_has_no_bf16_ends(c: Command) -> bool:
    """--first-last-layers-bf16 does not work with --fp8-recipe delayed, which is the default."""
    return bool(c.fp8 and c.first_last_layers_bf16 and c.fp8_recipe == "delayed")


@rule("precision.bf16-layers", f"{CONFIG}:1416", f"{CONFIG}:1425")
def bf16_layers_fit_a_stage(c: Command) -> Problem | None:
    """The bf16 layers at each end fit a pipeline stage."""
    if not (c.fp8 and c.first_last_layers_bf16):
        return None
    most = c.layers // c.pp
    for where in ("start", "end"):
        count = getattr(c, f"num_layers_at_{where}_in_bf16")
        if not 0 <= count <= most:
            return Problem(
                f"--num-layers-at-{where}-in-bf16 {count} must lie between 0 and the {most} layers "
                "of a pipeline stage",
                f"--num-layers-at-{where}-in-bf16 {min(max(count, 0), most)}",
            )
    return None


@rule("precision.quantizer", f"{CONFIG}:1433", f"{CONFIG}:1459")
def custom_recipes_name_their_quantizer(c: Command) -> Problem | None:
    """A custom recipe names its quantizer."""
    for bits in ("fp8", "fp4"):
        custom = getattr(c, bits) and getattr(c, f"{bits}_recipe") == "custom"
        if custom and not getattr(c, f"{bits}_quantizer_factory"):
            return Problem(
                f"--{bits}-recipe custom needs --{bits}-quantizer-factory",
                f"add --{bits}-quantizer-factory module.function",
            )
    return None


@rule("precision.output-projection", f"{CONFIG}:1444", f"{CONFIG}:1446", since="0.18.2")
def eight_bit_output_needs_mxfp8(c: Command) -> Problem | None:
    """The output projection in 8 bits needs the mxfp8 recipe."""
    if c.fp8_output_proj and not (c.fp8 and c.fp8_recipe == "mxfp8"):
        return Problem(
            "--fp8-output-proj needs --fp8-format with --fp8-recipe mxfp8",
            "drop --fp8-output-proj, or --fp8-recipe mxfp8",
        )
    return None


@rule(
    "precision.loss-fusion",
    f"{ARGUMENTS}:1642",
    fix="--cross-entropy-fusion-impl native",
    since="0.18.2",
)
def transformer_engine_loss_is_off(c: Command) -> bool:
    """Megatron refuses --cross-entropy-loss-fusion with --cross-entropy-fusion-impl te since \
    0.18: it is unstable."""
    return c.cross_entropy_loss_fusion and c.cross_entropy_fusion_impl == "te"


@rule("precision.deterministic", "training/determinism.py:143", since="0.19.2")
def determinism_excludes(c: Command) -> Problem | None:
    """Deterministic training excludes a fused loss and overlapped tensor communication."""
    if not c.deterministic_mode:
        return None
    found = [
        flag
        for flag, there in (
            ("--cross-entropy-loss-fusion", c.cross_entropy_loss_fusion),
            ("--tp-comm-overlap", c.tp_comm_overlap),
        )
        if there
    ]
    if not found:
        return None
    return Problem(
        f"--deterministic-mode excludes {' and '.join(found)}", f"drop {' '.join(found)}"
    )


@rule("shards.fp4", f"{ARGUMENTS}:1477", since="0.19.2", fix="add --fp4-param-gather")
def weight_shards_in_fp4_are_gathered_in_fp4(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks with --fp4-format need --fp4-param-gather."""
    return bool(_sharded(c) and c.fp4 and not c.fp4_param_gather)


@rule("shards.average", f"{ARGUMENTS}:1513", since="0.19.2", fix="drop --ddp-average-in-collective")
def weight_shards_exclude_averaging(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks exclude --ddp-average-in-collective."""
    return _sharded(c) and c.ddp_average_in_collective


@rule("shards.checkpoint", f"{ARGUMENTS}:1518", since="0.19.2", fix="--ckpt-format torch_dist")
def weight_shards_need_a_checkpoint_format(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks need --ckpt-format torch or torch_dist."""
    return _sharded(c) and c.ckpt_format not in ("torch", "torch_dist")


@rule(
    "shards.reshardable",
    f"{ARGUMENTS}:1522",
    since="0.19.2",
    fix="drop --distrib-optim-fully-reshardable-mem-efficient",
)
def weight_shards_exclude_lean_resharding(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks exclude the memory-efficient, fully \
    reshardable checkpoint."""
    return (
        _sharded(c)
        and c.dist_ckpt_optim_fully_reshardable
        and c.distrib_optim_fully_reshardable_mem_efficient
    )


@rule(
    "shards.mxfp8",
    f"{ARGUMENTS}:1536",
    f"{ARGUMENTS}:1543",
    since="0.19.2",
    fix="add --fp8-param-gather and --reuse-grad-buf-for-mxfp8-param-ag",
)
def weight_shards_in_mxfp8_are_gathered_in_fp8(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks with --fp8-recipe mxfp8 need \
    --fp8-param-gather and --reuse-grad-buf-for-mxfp8-param-ag."""
    if not _sharded(c) or c.fp8_recipe != "mxfp8":
        return False
    return not (c.fp8_param_gather and c.reuse_grad_buf_for_mxfp8_param_ag)


def _sharded(c: Command) -> bool:
    return c.gtp > 1 or c.egtp > 1
