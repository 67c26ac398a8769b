"""Recomputation and offloading of activations."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
RECOMPUTED = {
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
}
OFFLOADED = {
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
}


@rule(
    "recompute.method",
    f"{CONFIG}:1737",
    fix="add --recompute-method uniform and --recompute-num-layers 1",
)
def full_recomputation_needs_a_method(c: Command) -> bool:
    """--recompute-granularity full needs --recompute-method uniform or block."""
    return c.recompute_granularity == "full" and c.recompute_method is None


@rule("recompute.layers", f"{CONFIG}:1743", fix="add --recompute-num-layers 1")
def full_recomputation_needs_a_number_of_layers(c: Command) -> bool:
    """--recompute-granularity full needs --recompute-num-layers."""
    return c.recompute_granularity == "full" and c.recompute_num_layers is None


@rule("recompute.selective", f"{ARGUMENTS}:1386", f"{CONFIG}:1752")
def selective_recomputation_names_modules_only(c: Command) -> Problem | None:
    """Selective recomputation has neither a method nor a number of layers."""
    if c.recompute_granularity != "selective":
        return None
    found = [
        flag
        for flag, value in (
            ("--recompute-method", c.recompute_method),
            ("--recompute-num-layers", c.recompute_num_layers),
        )
        if value is not None
    ]
    if not found:
        return None
    return Problem(
        f"selective recomputation excludes {' and '.join(found)}",
        f"drop {' and '.join(found)}, or --recompute-granularity full",
    )


@rule(
    "recompute.distributed",
    f"{ARGUMENTS}:1371",
    f"{ARGUMENTS}:1374",
    f"{ARGUMENTS}:1377",
    f"{CONFIG}:1758",
)
def distributed_activations_have_conditions(c: Command) -> Problem | None:
    """Distributed saved activations need TP and full recomputation, no sequence parallelism."""
    if not c.distribute_saved_activations:
        return None
    needs = {
        "TP above 1": c.tp > 1,
        "--recompute-granularity full": c.recompute_granularity == "full",
        "--recompute-method": c.recompute_method is not None,
        "no --sequence-parallel": not c.sequence_parallel,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--distribute-saved-activations needs {', '.join(missing)}",
        "drop --distribute-saved-activations",
    )


@rule("recompute.modules", f"{CONFIG}:1779")
def recomputed_modules_exist(c: Command) -> Problem | None:
    """Modules to recompute are those that Megatron knows."""
    unknown = [name for name in c.recompute_modules if name not in RECOMPUTED]
    if c.recompute_granularity != "selective" or not unknown:
        return None
    return Problem(
        f"--recompute-modules {' '.join(unknown)}: no such module",
        f"legal are {', '.join(sorted(RECOMPUTED))}",
    )


@rule(
    "recompute.module-conditions",
    f"{CONFIG}:1785",
    f"{CONFIG}:1790",
    f"{CONFIG}:1799",
    f"{CONFIG}:1817",
    f"{CONFIG}:1824",
)
def recomputed_modules_fit_the_model(c: Command) -> Problem | None:
    """Some modules can only be recomputed in some models."""
    if c.recompute_granularity != "selective":
        return None
    overlapped = c.moe_shared_expert_intermediate_size is not None and c.moe_shared_expert_overlap
    delayed = c.fp8 and c.fp8_recipe == "delayed"
    obstacles = (
        ("moe_act", not c.moe_grouped_gemm, "needs --moe-grouped-gemm"),
        ("moe_act", delayed, "does not work with --fp8-recipe delayed"),
        ("layernorm", delayed, "does not work with --fp8-recipe delayed"),
        ("mla_up_proj", not c.mla, "needs --multi-latent-attention"),
        (
            "gdn_norm_out",
            c.experimental_attention_variant != "gated_delta_net",
            "needs --experimental-attention-variant gated_delta_net",
        ),
        ("shared_experts", overlapped, "does not work with --moe-shared-expert-overlap"),
    )
    for module, hindered, why in obstacles:
        if hindered and module in c.recompute_modules:
            return Problem(
                f"'{module}' in --recompute-modules {why}",
                f"drop '{module}' from --recompute-modules, or change that",
            )
    return None


@rule(
    "recompute.moe-layer",
    f"{CONFIG}:1841",
    fix="drop --moe-layer-recompute",
)
def recomputing_the_moe_layer_is_selective(c: Command) -> bool:
    """--moe-layer-recompute excludes --recompute-granularity full."""
    return c.moe_layer_recompute and c.recompute_granularity == "full"


@rule("offload.layers", f"{CONFIG}:1710", f"{CONFIG}:1715", f"{CONFIG}:1720")
def offloaded_layers_have_conditions(c: Command) -> Problem | None:
    """Offloading whole layers excludes pipelines and recomputation."""
    count = c.cpu_offloading_num_layers
    if count <= 0:
        return None
    if count >= c.layers:
        return Problem(
            f"--cpu-offloading-num-layers {count} must be less than the {c.layers} layers",
            f"--cpu-offloading-num-layers {max(c.layers - 1, 0)}",
        )
    if c.pp > 1:
        return Problem(
            "--cpu-offloading-num-layers does not work with pipeline parallelism",
            "drop it, or --pipeline-model-parallel-size 1",
        )
    if c.recompute_granularity is not None:
        return Problem(
            "--cpu-offloading-num-layers does not work with recomputation", "keep one of the two"
        )
    return None


@rule(
    "offload.fine-grained",
    f"{ARGUMENTS}:1855",
    f"{CONFIG}:1849",
    f"{CONFIG}:1852",
    f"{CONFIG}:1869",
    f"{CONFIG}:1878",
    f"{CONFIG}:1897",
    f"{CONFIG}:1900",
)
def fine_grained_offloading_has_conditions(c: Command) -> Problem | None:
    """Offloading of single modules has conditions."""
    if not c.fine_grained_activation_offloading:
        return None
    modules = set(c.offload_modules)
    recomputes_moe = (
        c.recompute_granularity == "selective" and "moe" in c.recompute_modules
    ) or c.moe_layer_recompute
    fused = "fused_group_mlp" in modules
    needs = {
        "--transformer-impl transformer_engine": c.transformer_impl == "transformer_engine",
        "no --cpu-offloading-num-layers": c.cpu_offloading_num_layers <= 0,
        "--offload-modules": bool(modules),
        "core_attn beside attn_proj in --offload-modules": (
            "attn_proj" not in modules or "core_attn" in modules
        ),
        "no expert modules to offload while 'moe' is recomputed": not (
            recomputes_moe and {"moe_act", "expert_fc1", "fused_group_mlp"} & modules
        ),
        "--use-transformer-engine-op-fuser for fused_group_mlp": (
            not fused or c.use_transformer_engine_op_fuser
        ),
        "fused_group_mlp without expert_fc1 and moe_act": not (
            fused and {"expert_fc1", "moe_act"} & modules
        ),
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--fine-grained-activation-offloading needs {'; '.join(missing)}",
        "change that, or drop --fine-grained-activation-offloading",
    )


@rule("offload.modules", f"{CONFIG}:1864")
def offloaded_modules_exist(c: Command) -> Problem | None:
    """Modules to offload are those that Megatron knows."""
    unknown = [name for name in c.offload_modules if name not in OFFLOADED]
    if not c.fine_grained_activation_offloading or not unknown:
        return None
    return Problem(
        f"--offload-modules {' '.join(unknown)}: no such module",
        f"legal are {', '.join(sorted(OFFLOADED))}",
    )


@rule("offload.amounts", f"{CONFIG}:1885", f"{CONFIG}:1888", f"{CONFIG}:1891", since="0.19.2")
def amounts_to_offload_are_possible(c: Command) -> Problem | None:
    """Sizes and shares of what is offloaded are possible ones."""
    if not c.fine_grained_activation_offloading:
        return None
    wrong = {
        f"--min-offloaded-tensor-size {c.min_offloaded_tensor_size}": (
            c.min_offloaded_tensor_size < 0
        ),
        f"--activation-offload-fraction {c.activation_offload_fraction}": not (
            0 <= c.activation_offload_fraction <= 1
        ),
        f"--delta-offload-bytes-across-pp-ranks {c.delta_offload_bytes_across_pp_ranks}": (
            c.delta_offload_bytes_across_pp_ranks < 0
        ),
    }
    found = [flag for flag, is_wrong in wrong.items() if is_wrong]
    if not found:
        return None
    return Problem(
        f"{', '.join(found)}: not possible", "no negative size, and a fraction of 0 to 1"
    )
