"""What only the first training step refuses, after the job has waited, loaded and built."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest, next_multiple
from piper_megatron.check.rule import Problem, rule

MOE = "core/transformer/moe"
SCHEDULES = "core/pipeline_parallel/schedules.py"


@rule("moe.sequence-parallel", f"{MOE}/moe_layer.py:630", late=True, fix="add --sequence-parallel")
def experts_with_tensor_parallelism_need_sequence_parallelism(c: Command) -> Problem | None:
    """With TP, experts need sequence parallelism, or every rank dispatches the same tokens."""
    if not c.experts or c.tp == 1 or c.sequence_parallel:
        return None
    if c.overlap_moe_expert_parallel_comm:
        return None  # that schedule never asks
    return Problem(
        f"mixture of experts with TP {c.tp} needs --sequence-parallel: without it every "
        "tensor-parallel rank dispatches the same tokens, and Megatron stops in the first forward "
        "pass",
        "add --sequence-parallel",
    )


@rule(
    "sequence.tensor",
    "core/tensor_parallel/mappings.py:72",
    "core/tensor_parallel/mappings.py:176",
    late=True,
)
def sequence_divides_over_tensor_ranks(c: Command) -> Problem | None:
    """With sequence parallelism the tokens of a context rank divide over TP."""
    if not c.sequence_parallel or c.seq % c.cp or c.seq // c.cp % c.tp == 0:
        return None
    factor = c.tp * c.cp * (2 if c.cp > 1 else 1)
    return Problem(
        f"--seq-length {c.seq} over CP {c.cp} is {c.seq // c.cp} tokens, not divisible by TP "
        f"{c.tp} with sequence parallelism",
        f"--seq-length {next_multiple(c.seq, factor)}",
    )


@rule("schedule.micro-batches", f"{SCHEDULES}:1141", f"{SCHEDULES}:1153", late=True)
def micro_batches_fill_the_interleaved_schedule(c: Command) -> Problem | None:
    """The interleaved schedule takes micro-batches in groups of at least PP."""
    if c.vpp is None or c.pp == 1 or not c.micro_batches or c.step_batch_size_schedule is not None:
        return None
    group = c.microbatch_group_size_per_vp_stage or c.pp
    count = c.micro_batches
    if group < c.pp:
        return Problem(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than PP {c.pp}",
            f"--microbatch-group-size-per-virtual-pipeline-stage {c.pp}",
        )
    rest = count % group
    if group <= count and (rest == 0 or rest >= c.pp):
        return None
    assert c.dp
    whole = next_multiple(count, group)
    batch = whole * c.micro_batch_size * c.dp * c.gtp
    return Problem(
        f"the interleaved schedule ({c.vpp} virtual stages) takes micro-batches in groups of "
        f"{group}, and a step has {count} (micro-batch {c.micro_batch_size}, DP {c.dp})",
        f"--global-batch-size {batch} ({whole} micro-batches), or no virtual stages",
    )


@rule("router.top-k", f"{MOE}/moe_utils.py:823", late=True)
def top_k_is_at_most_the_experts(c: Command) -> Problem | None:
    """A token cannot visit more experts than there are."""
    if not c.experts or c.moe_router_topk <= c.experts:
        return None
    return Problem(
        f"--moe-router-topk {c.moe_router_topk} is more than {c.experts} experts",
        f"--moe-router-topk {c.experts} or less",
    )


@rule("router.group-top-k", f"{MOE}/moe_utils.py:656", late=True)
def groups_have_experts_enough(c: Command) -> Problem | None:
    """A group has as many experts as are scored in it."""
    groups, chosen, topk = c.moe_router_num_groups, c.moe_router_group_topk, c.moe_router_topk
    if not (c.experts and groups and chosen) or c.experts % groups or chosen > groups:
        return None
    size = c.experts // groups
    if topk // chosen <= size:
        return None
    return Problem(
        f"--moe-router-topk {topk} from --moe-router-group-topk {chosen} groups of {size} experts "
        f"scores {topk // chosen} experts of each group",
        f"--moe-router-group-topk {min(-(-topk // size), groups)}",
    )


@rule("router.sinkhorn-loss", f"{MOE}/router.py:295", late=True, fix="--moe-aux-loss-coeff 0")
def sinkhorn_has_no_auxiliary_loss(c: Command) -> bool:
    """--moe-router-load-balancing-type sinkhorn does not work with --moe-aux-loss-coeff other \
    than 0."""
    return bool(c.experts) and c.balancing == ["sinkhorn"] and c.aux_coefficients != [0]


@rule(
    "router.quantile",
    f"{MOE}/router.py:324",
    f"{MOE}/router.py:327",
    f"{MOE}/moe_utils.py:230",
    late=True,
    since="0.19.2",
)
def quantile_balancing_has_conditions(c: Command) -> Problem | None:
    """Quantile balancing excludes the fused router and groups, and needs divisible tokens."""
    if not c.experts or c.balancing != ["quantile_balancing"]:
        return None
    tokens = c.micro_batch_size * c.seq // c.cp // (c.tp if c.sequence_parallel else 1)
    needs = {
        "no --moe-router-fusion": not c.moe_router_fusion,
        "no --moe-router-num-groups": (
            c.moe_router_num_groups is None and c.moe_router_group_topk is None
        ),
        f"{tokens} tokens x top-k divisible by {c.experts} experts": (
            tokens * c.moe_router_topk % c.experts == 0
        ),
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--moe-router-load-balancing-type quantile_balancing needs {', '.join(missing)}",
        "change that, or --moe-router-load-balancing-type aux_loss",
    )


@rule("experts.probs-on-input", f"{MOE}/experts.py:783", f"{MOE}/experts.py:1327", late=True)
def weighting_inputs_needs_top_one(c: Command) -> Problem | None:
    """Weighting the input of experts needs top-1 routing."""
    if not c.experts or not c.moe_apply_probs_on_input or c.moe_router_topk == 1:
        return None
    return Problem(
        "--moe-apply-probs-on-input needs --moe-router-topk 1", "drop --moe-apply-probs-on-input"
    )


@rule(
    "mtp.recomputation",
    "core/transformer/multi_token_prediction.py:1419",
    late=True,
    fix="--recompute-num-layers 1",
)
def prediction_layers_are_recomputed_one_by_one(c: Command) -> bool:
    """Multi-token prediction with --recompute-method uniform needs --recompute-num-layers 1, not \
    {c.recompute_num_layers}."""
    full = c.recompute_granularity == "full" and c.recompute_method == "uniform"
    return bool(c.mtp) and full and c.recompute_num_layers not in (None, 1)


@rule(
    "mtp.overlap-dense",
    source="Megatron-Core 0.19.2 run with a dense last layer: fine_grained_callables.py",
    late=True,
    fix="make the last decoder layer a MoE layer, or drop the overlap",
)
def overlapped_prediction_needs_experts_in_the_last_layer(c: Command) -> bool:
    """--overlap-moe-expert-parallel-comm with multi-token prediction fails at the first step when \
    the last decoder layer is dense: the prediction layer copies it."""
    frequency = c.values.moe_layer_freq
    if not (c.overlap_moe_expert_parallel_comm and c.mtp and c.experts):
        return False
    if isinstance(frequency, list) and len(frequency) != c.layers:
        return False
    return not c.moe_layers[-1]


@rule(
    "precision.aligned",
    source="Transformer Engine: matrices in 8 bits have sides divisible by 16, mxfp8 blocks by 32",
    late=True,
)
def sides_of_eight_bit_matrices_are_aligned(c: Command) -> Problem | None:
    """Matrices in 8 bits have sides that are multiples of 16, or 32 with mxfp8."""
    if not c.fp8:
        return None
    step = 32 if c.fp8_recipe == "mxfp8" else 16
    dense = not c.experts or not all(c.moe_layers)
    for flag, width, size in (
        ("--hidden-size", c.hidden_size, 1),
        ("--ffn-hidden-size", c.values.ffn_hidden_size if dense else None, c.tp),
        ("--moe-ffn-hidden-size", c.moe_width if c.experts else None, c.etp),
    ):
        if width is not None and width % size == 0 and width // size % step:
            return Problem(
                f"{flag} {width} over {size} ranks is {width // size}, not a multiple of {step} as "
                f"--fp8-format needs",
                f"{flag} {next_multiple(width, step * size)}, or fewer ranks "
                f"({nearest(size, [d for d in divisors(width) if width // d % step == 0])})",
            )
    return None
