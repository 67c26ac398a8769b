"""Routing and experts: what trains badly or slowly although it is legal."""

import math

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

MANY_EXPERTS = 32  # from which Megatron advises an fp32 router (transformer_config.py:2792)


@rule("dispatcher.allgather", source="NVIDIA/Megatron-LM#716, #1456", severity="warning")
def expert_parallelism_wants_alltoall(c: Command) -> Problem | None:
    """With expert parallelism the allgather dispatcher sends all tokens to all ranks."""
    if not c.experts or c.ep == 1 or c.moe_token_dispatcher_type != "allgather":
        return None
    default = "" if "moe_token_dispatcher_type" in c.given else ", which is Megatron's default,"
    return Problem(
        f"the allgather dispatcher{default} gathers all tokens on all {c.ep * c.etp} ranks of EP "
        f"{c.ep} x ETP {c.etp}; alltoall sends a token only to the ranks of its "
        f"{c.moe_router_topk} experts and spends less time in collectives",
        "--moe-token-dispatcher-type alltoall",
    )


@rule("experts.one-by-one", source="NVIDIA/Megatron-LM#756", severity="warning")
def local_experts_want_one_grouped_product(c: Command) -> Problem | None:
    """Without grouped GEMM the local experts run one after the other."""
    if not c.experts or c.moe_grouped_gemm or c.transformer_impl != "transformer_engine":
        return None
    local = c.experts // c.ep
    if local <= 1 or (c.platform and c.platform.name == "cpu-lab"):
        return None
    return Problem(
        f"without --moe-grouped-gemm the {local} experts of a rank run one after the other",
        "add --moe-grouped-gemm (it nearly doubled the speed of a public run together with "
        "alltoall)",
    )


@rule("router.unbalanced", source="NVIDIA-NeMo/Megatron-Bridge#947", severity="warning")
def routing_is_balanced_by_something(c: Command) -> Problem | None:
    """Without any balancing, expert load and with it memory and time drift."""
    if not c.experts or c.experts == c.moe_router_topk or c.moe_router_force_load_balancing:
        return None
    if c.moe_router_force_biased is not None:
        return None
    if c.moe_router_enable_expert_bias and c.moe_router_bias_update_rate > 0:
        return None
    losses = zip(c.balancing, [*c.aux_coefficients, *[0.0] * len(c.balancing)], strict=False)
    if any(
        kind in ("sinkhorn", "quantile_balancing") or (kind != "none" and coefficient > 0)
        for kind, coefficient in losses
    ):
        return None
    if c.balancing == ["none"]:
        why = "--moe-router-load-balancing-type none and no expert bias"
    else:
        given = "0" if "moe_aux_loss_coeff" in c.given else "not given, and its default is 0"
        why = f"--moe-aux-loss-coeff is {given}, and there is no expert bias"
    return Problem(
        f"nothing balances the load of experts: {why}. Load drifts, and step time and memory with "
        "it (a public run slowed from 14.4 to 15.9 s)",
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3, or "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias; watch max/mean load",
    )


@rule("router.frozen-bias", source="megatron/core/transformer/moe/router.py", severity="warning")
def expert_bias_is_updated(c: Command) -> Problem | None:
    """An expert bias that never changes balances nothing."""
    if not (c.experts and c.moe_router_enable_expert_bias) or c.moe_router_bias_update_rate > 0:
        return None
    return Problem(
        f"--moe-router-bias-update-rate {c.moe_router_bias_update_rate} never changes the expert "
        "bias",
        "--moe-router-bias-update-rate 1e-3",
    )


@rule("router.forced", source="Megatron's --help: for benchmarks", severity="info")
def forced_balance_is_for_benchmarks(c: Command) -> Problem | None:
    """Forced routing is random: for benchmarks only."""
    if c.experts and c.moe_router_force_load_balancing:
        return Problem(
            "--moe-router-force-load-balancing routes at random: for benchmarks, not for training",
            "drop it to train",
        )
    return None


@rule("router.precision", "core/transformer/transformer_config.py:2797", severity="info")
def many_experts_want_an_fp32_router(c: Command) -> Problem | None:
    """From 32 experts on, Megatron advises an fp32 router."""
    if not c.experts or c.experts < MANY_EXPERTS or c.moe_router_dtype:
        return None
    return Problem(
        f"{c.experts} experts are routed in the training precision; Megatron advises fp32 from "
        f"{MANY_EXPERTS} experts on",
        "add --moe-router-dtype fp32",
    )


@rule(
    "router.group-choice",
    source="megatron/core/transformer/moe/moe_utils.py:655 scores a group by its best topk // "
    "group_topk experts",
    severity="warning",
)
def the_choice_of_groups_means_something(c: Command) -> Problem | None:
    """Too many chosen groups score every group zero; too few hold less than top-k experts."""
    groups, chosen, topk = c.moe_router_num_groups, c.moe_router_group_topk, c.moe_router_topk
    if not (c.experts and chosen and groups) or c.experts % groups:
        return None
    size = c.experts // groups
    if chosen > topk:
        return Problem(
            f"--moe-router-group-topk {chosen} is more than --moe-router-topk {topk}: all groups "
            "score 0 and the choice among them means nothing",
            f"--moe-router-group-topk {topk} or less",
        )
    if topk > chosen * size:
        return Problem(
            f"--moe-router-group-topk {chosen} groups hold {chosen * size} experts, and "
            f"--moe-router-topk {topk} chooses more: masked experts fill up",
            f"--moe-router-group-topk {-(-topk // size)}",
        )
    return None


@rule(
    "capacity.absurd",
    source="capacity = factor x tokens x top-k / experts (moe_utils.py)",
    late=True,
)
def capacity_is_between_none_and_all_tokens(c: Command) -> Problem | None:
    """An expert cannot get more than all tokens, and no rows at all train nothing."""
    factor = c.moe_expert_capacity_factor
    if not c.experts or factor is None or factor < 0:
        return None
    most = max(c.experts / c.moe_router_topk, 1.0)
    if math.isfinite(factor) and 0 < factor <= most:
        return None
    what = "drops every token" if factor == 0 else "is more than all tokens on one expert"
    return Problem(
        f"--moe-expert-capacity-factor {factor:g} {what}: with {c.experts} experts and top-"
        f"{c.moe_router_topk} it lies between 0 and {most:g}",
        "--moe-expert-capacity-factor 1.0 to 1.5",
    )


@rule("capacity.tight", source="capacity = factor x tokens x top-k / experts", severity="warning")
def capacity_keeps_most_tokens(c: Command) -> Problem | None:
    """A small capacity drops most tokens."""
    factor = c.capacity
    if not c.experts or factor is None or not 0 < factor < 0.5:
        return None
    return Problem(
        f"--moe-expert-capacity-factor {factor:g} drops at least {1 - factor:.0%} of the routed "
        "tokens",
        "--moe-expert-capacity-factor 1.0 or more",
    )


@rule(
    "experts.thin",
    source="SimuMax and Megatron MoE layer benchmarks: docs/platforms.md",
    severity="info",
)
def experts_see_tokens_enough(c: Command) -> Problem | None:
    """Few rows for each expert make grouped products slow."""
    if not c.experts or not c.dp or c.seq % c.cp:
        return None
    tokens = c.micro_batch_size * c.seq // c.cp // (c.tp if c.sequence_parallel else 1)
    rows = tokens * c.moe_router_topk * c.ep * c.etp / c.experts
    if rows >= 256:
        return None
    return Problem(
        f"an expert sees about {rows:,.0f} rows of a micro-batch; below some hundred, grouped "
        "products reach less than half of their speed",
        "a larger --micro-batch-size, or more --expert-model-parallel-size",
    )
