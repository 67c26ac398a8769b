"""Experts and the router."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
DROPPING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@rule("experts.missing", f"{ARGUMENTS}:1601", f"{CONFIG}:1469")
def expert_parallelism_needs_experts(c: Command) -> Problem | None:
    """Expert parallelism needs experts."""
    if c.ep == 1 or c.experts is not None:
        return None
    return Problem(
        f"--expert-model-parallel-size {c.ep} without --num-experts",
        "--expert-model-parallel-size 1, or add --num-experts",
    )


@rule("experts.divisible", f"{ARGUMENTS}:1602", "core/transformer/moe/moe_layer.py:185")
def experts_divide_over_expert_ranks(c: Command) -> Problem | None:
    """Every expert-parallel rank has the same number of experts."""
    if c.ep == 1 or not c.experts or c.experts % c.ep == 0:
        return None
    rest = c.expert_grid // c.ep
    fits = [ep for ep in divisors(c.experts) if c.gpus % (rest * ep) == 0] or divisors(c.experts)
    return Problem(
        f"{c.experts} experts are not divisible by EP {c.ep}",
        f"--expert-model-parallel-size {nearest(c.ep, fits)}",
    )


@rule("experts.positive", f"{CONFIG}:1532", fix="give 1 or more, or drop --num-experts")
def experts_are_at_least_one(c: Command) -> bool:
    """--num-experts {c.values.num_experts} must be positive."""
    return c.experts is not None and c.experts < 0


@rule(
    "experts.width-without",
    f"{CONFIG}:1551",
    fix="drop --moe-ffn-hidden-size, or add --num-experts",
    since="0.18.2",
)
def expert_width_needs_experts(c: Command) -> bool:
    """--moe-ffn-hidden-size is given without --num-experts."""
    if c.experts is not None or c.values.moe_ffn_hidden_size is None:
        return False
    frequency = c.values.moe_layer_freq
    return not (0 in frequency if isinstance(frequency, list) else frequency > 1)


@rule(
    "experts.bias",
    f"{CONFIG}:2280",
    fix="--expert-tensor-parallel-size 1, or add --disable-bias-linear",
)
def biased_experts_are_not_split(c: Command) -> bool:
    """Experts with biases need ETP 1, and it is {c.etp}."""
    return c.experts is not None and c.add_bias_linear and c.etp != 1


@rule("experts.shared-size", f"{CONFIG}:1639", fix="give the width of all shared experts together")
def shared_experts_have_a_width(c: Command) -> bool:
    """--moe-shared-expert-intermediate-size {c.moe_shared_expert_intermediate_size} must be \
    positive."""
    width = c.moe_shared_expert_intermediate_size
    return width is not None and width <= 0


@rule("experts.latent", f"{ARGUMENTS}:1900", f"{ARGUMENTS}:1901")
def latent_experts_have_a_width(c: Command) -> Problem | None:
    """Latent experts need a positive width and experts."""
    if c.moe_latent_size is None or (c.moe_latent_size > 0 and c.experts is not None):
        return None
    if c.experts is None:
        return Problem("--moe-latent-size without --num-experts", "drop --moe-latent-size")
    return Problem(f"--moe-latent-size {c.moe_latent_size} must be positive", "give 1 or more")


@rule(
    "experts.single-weight",
    f"{CONFIG}:1558",
    f"{CONFIG}:1575",
    f"{CONFIG}:1580",
    f"{CONFIG}:1587",
    since="0.18.2",
)
def single_grouped_weights_have_conditions(c: Command) -> Problem | None:
    """One tensor for all local experts needs grouped GEMM and the op fuser."""
    if not (c.moe_single_grouped_weight or c.moe_single_grouped_bias):
        return None
    needs = {"--moe-grouped-gemm": c.moe_grouped_gemm}
    if c.moe_single_grouped_weight:
        eight = (c.fp8 and c.fp8_recipe != "mxfp8") or (c.fp4 and c.fp4_recipe != "nvfp4")
        needs["an mxfp8 or nvfp4 recipe"] = not eight
        needs["--use-transformer-engine-op-fuser"] = c.use_transformer_engine_op_fuser
    if c.moe_single_grouped_bias:
        needs["linear biases (no --disable-bias-linear)"] = c.add_bias_linear
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--moe-single-grouped-weight and -bias need {' and '.join(missing)}",
        f"add {' and '.join(missing)}, or drop the flag",
    )


@rule(
    "experts.upcycling",
    f"{ARGUMENTS}:1783",
    fix="add --save",
)
def upcycling_needs_a_place(c: Command) -> bool:
    """--moe-use-upcycling needs --save."""
    return c.moe_use_upcycling and c.save is None


@rule(
    "router.expert-bias",
    f"{CONFIG}:2288",
    fix="--moe-router-score-function sigmoid, or drop --moe-router-enable-expert-bias",
)
def expert_bias_needs_sigmoid_scores(c: Command) -> bool:
    """--moe-router-enable-expert-bias works with --moe-router-score-function sigmoid or \
    sqrtsoftplus, not {c.moe_router_score_function}."""
    return c.moe_router_enable_expert_bias and c.moe_router_score_function not in (
        "sigmoid",
        "sqrtsoftplus",
    )


@rule("router.top-one", f"{CONFIG}:2336", fix="add --moe-router-pre-softmax")
def top_one_needs_softmax_before(c: Command) -> bool:
    """--moe-router-topk 1 with softmax scores needs --moe-router-pre-softmax: the softmax over \
    one choice has no gradient. Megatron asks for it in dense models too."""
    return (
        c.moe_router_topk == 1
        and c.moe_router_score_function == "softmax"
        and not c.moe_router_pre_softmax
        and c.balancing != ["sinkhorn"]
    )


@rule("router.groups", f"{CONFIG}:2345", f"{CONFIG}:2349", f"{CONFIG}:2353")
def expert_groups_come_out(c: Command) -> Problem | None:
    """Group-limited routing needs equal groups, and no more chosen than there are."""
    groups, chosen = c.moe_router_num_groups, c.moe_router_group_topk
    if not chosen:
        return None
    if not groups:
        return Problem(
            "--moe-router-group-topk without --moe-router-num-groups", "add --moe-router-num-groups"
        )
    if c.experts is None:
        return Problem(
            "--moe-router-group-topk without --num-experts", "drop --moe-router-group-topk"
        )
    if c.experts % groups:
        return Problem(
            f"{c.experts} experts are not divisible into --moe-router-num-groups {groups}",
            f"--moe-router-num-groups {nearest(groups, divisors(c.experts))}",
        )
    if chosen > groups:
        return Problem(
            f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}",
            f"--moe-router-group-topk {groups} or less",
        )
    return None


@rule("router.losses", f"{CONFIG}:1653")
def every_balancing_type_has_its_coefficient(c: Command) -> Problem | None:
    """Several load balancing types need as many coefficients."""
    if len(c.balancing) == 1 or len(c.aux_coefficients) == len(c.balancing):
        return None
    return Problem(
        f"--moe-router-load-balancing-type has {len(c.balancing)} types and --moe-aux-loss-coeff "
        f"{len(c.aux_coefficients)} coefficients",
        f"give {len(c.balancing)} coefficients",
    )


@rule(
    "capacity.balancing",
    f"{CONFIG}:1671",
    f"{CONFIG}:1681",
    fix="--moe-router-load-balancing-type aux_loss, or drop --moe-expert-capacity-factor",
)
def capacity_needs_an_auxiliary_loss(c: Command) -> bool:
    """--moe-expert-capacity-factor does not work with load balancing of type sinkhorn or \
    quantile."""
    # a negative factor is dropped after this check's own condition is read
    given = c.moe_expert_capacity_factor is not None
    return given and any(kind not in DROPPING for kind in c.balancing)


@rule(
    "capacity.padding",
    f"{CONFIG}:1688",
    fix="add --moe-expert-capacity-factor 1.0, or drop the padding",
)
def padding_needs_a_capacity(c: Command) -> bool:
    """--moe-pad-expert-input-to-capacity needs a --moe-expert-capacity-factor of 0 or more."""
    return c.moe_pad_expert_input_to_capacity and c.capacity is None
