"""Settings without effect: Megatron accepts them and does something else than was meant."""

from collections.abc import Callable

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule
from piper_megatron.workload.flags import spelling_of

Condition = Callable[[Command], bool]
# destinations, the flag that gives them effect, and whether that is there
_NEEDS: tuple[tuple[tuple[str, ...], str, Condition], ...] = (
    (
        ("num_query_groups",),
        "--group-query-attention",
        lambda c: c.group_query_attention or c.num_query_groups == c.num_attention_heads,
    ),
    (
        ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim", "v_head_dim"),
        "--multi-latent-attention",
        lambda c: c.mla,
    ),
    (
        ("recompute_modules",),
        "--recompute-granularity selective",
        lambda c: c.recompute_granularity == "selective" or c.moe_layer_recompute,
    ),
    (
        ("recompute_method", "recompute_num_layers"),
        "--recompute-granularity full",
        lambda c: c.recompute_granularity is not None,
    ),
    (
        ("offload_modules",),
        "--fine-grained-activation-offloading",
        lambda c: c.fine_grained_activation_offloading,
    ),
    (("optimizer_offload_fraction",), "--optimizer-cpu-offload", lambda c: c.optimizer_cpu_offload),
    (("fp8_recipe", "first_last_layers_bf16"), "--fp8-format", lambda c: c.fp8 or c.fp4),
    (("fp4_recipe",), "--fp4-format", lambda c: c.fp4),
    (
        ("num_distributed_optimizer_instances",),
        "--use-distributed-optimizer",
        lambda c: c.distributed_optimizer or c.num_distributed_optimizer_instances == 1,
    ),
    (("moe_router_num_groups",), "--moe-router-group-topk", lambda c: c.moe_router_group_topk),
    (
        ("moe_router_bias_update_rate",),
        "--moe-router-enable-expert-bias",
        lambda c: c.moe_router_enable_expert_bias,
    ),
    (
        ("moe_shared_expert_overlap", "moe_shared_expert_gate"),
        "--moe-shared-expert-intermediate-size",
        lambda c: c.moe_shared_expert_intermediate_size is not None,
    ),
    (
        ("moe_token_drop_policy",),
        "--moe-expert-capacity-factor",
        lambda c: c.capacity is not None,
    ),
    (("window_attn_skip_freq",), "--window-size", lambda c: c.window_size is not None),
    (
        ("microbatch_group_size_per_vp_stage",),
        "virtual pipeline stages",
        lambda c: c.vpp is not None,
    ),
)
_OF_EXPERTS = (
    "expert_tensor_parallel_size",
    "moe_token_dispatcher_type",
    "moe_router_topk",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_expert_capacity_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
)


@rule(
    "ignored.backend",
    source="NVIDIA-NeMo/Megatron-Bridge documentation; transformer_config.py:1589",
    severity="warning",
)
def flex_backends_need_the_flex_dispatcher(c: Command) -> Problem | None:
    """Settings of DeepEP and HybridEP do nothing with other dispatchers."""
    if not c.experts or c.moe_token_dispatcher_type == "flex":
        return None
    names = (
        "moe_flex_dispatcher_backend",
        "moe_flex_dispatcher_num_sms",
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
        "moe_expert_rank_capacity_factor",
    )
    given = [spelling_of(name) for name in names if name in c.given]
    if not given:
        return None
    return Problem(
        f"{', '.join(given)} has no effect without --moe-token-dispatcher-type flex: the run would "
        f"silently use {c.moe_token_dispatcher_type}",
        f"--moe-token-dispatcher-type flex, or drop {', '.join(given)}",
    )


@rule(
    "ignored.settings",
    source="Megatron-Core 0.19.2 reads these settings only together with others",
    severity="warning",
)
def settings_have_what_gives_them_effect(c: Command) -> Problem | None:
    """Settings that only mean something beside another one."""
    found = {
        need: flags
        for destinations, need, met in _NEEDS
        if not met(c) and (flags := [spelling_of(name) for name in destinations if name in c.given])
    }
    if not found:
        return None
    return Problem(
        "; ".join(
            f"{', '.join(flags)} has no effect without {need}" for need, flags in found.items()
        ),
        "; ".join(f"add {need} or drop {', '.join(flags)}" for need, flags in found.items()),
    )


@rule(
    "ignored.experts",
    source="Megatron-Core 0.19.2 builds experts only with --num-experts",
    severity="warning",
)
def settings_of_experts_need_experts(c: Command) -> Problem | None:
    """Settings of experts in a dense model."""
    if c.experts is not None or c.hybrid_pattern is not None:
        return None
    given = [spelling_of(name) for name in _OF_EXPERTS if name in c.given]
    if not given:
        return None
    return Problem(
        f"{', '.join(given)} without --num-experts: the model is dense", "add --num-experts"
    )
