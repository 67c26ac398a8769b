"""Parallel sizes against the number of GPUs, and the process groups that they make."""

from math import lcm, prod

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest, next_multiple
from piper_megatron.check.rule import Problem, rule


@rule("world.dense", "training/arguments.py:430", "core/parallel_state.py:823")
def gpus_hold_whole_copies_of_the_dense_weights(c: Command) -> Problem | None:
    """The GPUs divide into copies of TP x PP x CP ranks."""
    if c.gpus % c.dense_grid == 0:
        return None
    shards = f" x {c.gtp} further weight shards" if c.gtp > 1 else ""
    return Problem(
        f"{c.gpus} GPUs are not a multiple of TP {c.tp} x PP {c.pp} x CP {c.cp}{shards} = "
        f"{c.dense_grid}",
        _gpu_counts(c) + _single_changes(c),
    )


def _gpu_counts(c: Command) -> str:
    """The GPU counts around the wanted one that both grids divide."""
    grid = lcm(c.dense_grid, c.expert_grid)
    above = next_multiple(c.gpus, grid)
    below = above - grid
    counts = f"{below} or {above}" if below else f"{above}"
    return f"run on {counts} GPUs ({above - c.gpus} more)" if not below else f"run on {counts} GPUs"


def _single_changes(c: Command) -> str:
    """For each size, the legal values if only that one changes."""
    changes = []
    for flag, size in (("tensor", c.tp), ("pipeline", c.pp), ("context", c.cp)):
        others = c.dense_grid // size
        if size > 1 and c.gpus % others == 0:
            name = (
                f"--{flag}-model-parallel-size" if flag != "context" else "--context-parallel-size"
            )
            changes.append(f"{name} {nearest(size, divisors(c.gpus // others))}")
    return f", or change one size: {'; '.join(changes)}" if changes else ""


@rule("world.expert", "core/parallel_state.py:882")
def gpus_hold_whole_copies_of_the_experts(c: Command) -> Problem | None:
    """The GPUs divide into copies of ETP x EP x PP ranks."""
    if c.gpus % c.expert_grid == 0:
        return None
    defaulted = c.expert_tensor_parallel_size is None and c.tp > 1
    etp = f"ETP {c.etp}"
    if defaulted:
        etp += f" (the default, TP {c.tp}: --expert-tensor-parallel-size is not given)"
    shards = f" x {c.egtp} further weight shards" if c.egtp > 1 else ""
    message = (
        f"{c.gpus} GPUs are not a multiple of the expert grid EP {c.ep} x {etp} x PP "
        f"{c.pp}{shards} = {c.expert_grid}"
    )
    fixes = []
    if defaulted and c.gpus % (c.expert_grid // c.etp) == 0:
        fixes.append("--expert-tensor-parallel-size 1")
    rest = c.expert_grid // c.ep
    if c.gpus % rest == 0:
        fitting = [ep for ep in divisors(c.gpus // rest) if (c.experts or 0) % ep == 0]
        fixes.append(f"--expert-model-parallel-size {nearest(c.ep, fitting)}")
    if c.gpus % c.dense_grid == 0:
        fixes.append(_gpu_counts(c))
    return Problem(message, ", or ".join(fixes) or _gpu_counts(c))


@rule(
    "world.order",
    "core/parallel_state.py:898",
    "core/parallel_state.py:904",
    fix="drop --use-tp-pp-dp-mapping, or make TP x CP equal to EP x ETP",
)
def pipeline_inside_data_needs_equal_grids(c: Command) -> bool:
    """--use-tp-pp-dp-mapping with PP {c.pp} needs the same data parallelism for dense layers and \
    experts, and it is {c.dp} and {c.edp} (EP {c.ep} x ETP {c.etp}, TP {c.tp} x CP {c.cp})."""
    return bool(c.use_tp_pp_dp_mapping and c.pp > 1 and c.dp and c.edp and c.dp != c.edp)


@rule("world.instances", "core/parallel_state.py:922", "core/parallel_state.py:1447")
def optimizer_instances_divide_both_data_parallel_sizes(c: Command) -> Problem | None:
    """Optimizer instances split the data-parallel ranks of dense weights and of experts evenly."""
    instances = c.num_distributed_optimizer_instances
    if not c.dp or not c.edp or not (c.dp * c.cp % instances or c.edp % instances):
        return None
    both = [n for n in range(1, c.edp + 1) if c.edp % n == 0 and c.dp * c.cp % n == 0]
    default = " (ETP is not given and defaults to TP)" if _defaulted_etp(c) else ""
    return Problem(
        f"{instances} optimizer instances must divide both the data parallelism of dense weights, "
        f"DP x CP = {c.dp * c.cp}, and that of experts, {c.edp} = {c.gpus} GPUs / (EP {c.ep} x ETP "
        f"{c.etp} x PP {c.pp}){default}",
        f"--num-distributed-optimizer-instances {', '.join(map(str, both))}",
    )


def _defaulted_etp(c: Command) -> bool:
    return c.expert_tensor_parallel_size is None and c.tp > 1


@rule(
    "world.weight-shards-and-instances",
    "core/parallel_state.py:808",
    since="0.19.2",
    fix="--num-distributed-optimizer-instances 1",
)
def weight_shards_need_one_optimizer_instance(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks exclude several optimizer instances \
    ({c.num_distributed_optimizer_instances})."""
    return (c.gtp > 1 or c.egtp > 1) and c.num_distributed_optimizer_instances > 1


@rule(
    "world.weight-shards",
    "core/model_parallel_config.py:32",
    "core/model_parallel_config.py:37",
    since="0.19.2",
    first=True,
)
def weight_shards_are_a_multiple_of_the_tensor_size(c: Command) -> Problem | None:
    """Weight shards are a multiple of TP, and of ETP for experts."""
    for flag, shards, size in (
        ("--tensor-parallel-num-weight-shards", c.tensor_parallel_num_weight_shards, c.tp),
        (
            "--expert-tensor-parallel-num-weight-shards",
            c.expert_tensor_parallel_num_weight_shards,
            c.etp,
        ),
    ):
        if shards is not None and size > 0 and (shards < size or shards % size):
            return Problem(
                f"{flag} {shards} must be a multiple of the tensor parallel size {size}",
                f"{flag} {max(next_multiple(shards, size), size)}",
            )
    return None


@rule(
    "sharp.group", "core/parallel_state.py:789", fix="add --use-sharp or drop --sharp-enabled-group"
)
def sharp_group_needs_sharp(c: Command) -> bool:
    """--sharp-enabled-group only means something with --use-sharp."""
    return not c.use_sharp and c.sharp_enabled_group is not None


@rule(
    "sharp.replica",
    "core/parallel_state.py:785",
    fix="--num-distributed-optimizer-instances 2, or --sharp-enabled-group dp",
)
def sharp_between_replicas_needs_instances(c: Command) -> bool:
    """--sharp-enabled-group dp_replica needs more than one optimizer instance."""
    return (
        c.use_sharp
        and c.sharp_enabled_group == "dp_replica"
        and c.num_distributed_optimizer_instances <= 1
    )


@rule(
    "sharp.broken",
    "core/parallel_state.py:1806",
    since="0.19.2",
    fix="drop --use-sharp, or --sharp-enabled-group dp_replica with several optimizer instances",
)
def sharp_of_the_data_parallel_group_is_broken(c: Command) -> bool:
    """--use-sharp stops Megatron-Core 0.19.2: it asks for the data-parallel group before that is \
    built."""
    return c.use_sharp and c.sharp_enabled_group in (None, "dp")


@rule(
    "connections.ucc",
    "training/arguments.py:1437",
    "core/parallel_state.py:1205",
    fix="drop --pipeline-model-parallel-comm-backend ucc",
)
def ucc_and_tensor_parallelism_want_opposite_settings(c: Command) -> bool:
    """Before Blackwell, TP {c.tp} and CP {c.cp} need CUDA_DEVICE_MAX_CONNECTIONS=1 and \
    --pipeline-model-parallel-comm-backend ucc needs another value."""
    return c.pipeline_model_parallel_comm_backend == "ucc" and c.one_connection_is_asserted


@rule("context.hierarchy", "training/arguments.py:564", "core/parallel_state.py:1128")
def context_levels_multiply_to_the_context_size(c: Command) -> Problem | None:
    """The levels of hierarchical context parallelism multiply to CP."""
    levels = c.hierarchical_context_parallel_sizes
    if not levels or prod(levels) == c.cp:
        return None
    return Problem(
        f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels))} multiply to "
        f"{prod(levels)}, not to CP {c.cp}",
        f"--context-parallel-size {prod(levels)}, or levels whose product is {c.cp}",
    )


@rule(
    "context.a2a-p2p",
    "training/arguments.py:566",
    fix="add --hierarchical-context-parallel-sizes with a product of {c.cp}",
)
def a2a_p2p_needs_levels(c: Command) -> bool:
    """--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes."""
    return "a2a+p2p" in c.cp_comm_type and c.hierarchical_context_parallel_sizes is None


@rule("context.comm-types", "core/transformer/transformer_config.py:2780")
def one_context_comm_type_or_one_a_layer(c: Command) -> Problem | None:
    """Communication of context parallelism is one type, or one for every layer."""
    if c.cp > 1 and len(c.cp_comm_type) not in (1, c.layers):
        return Problem(
            f"--cp-comm-type has {len(c.cp_comm_type)} types for {c.layers} layers",
            "give one type, or one for every layer",
        )
    return None


@rule(
    "context.hybrid",
    "training/arguments.py:1405",
    "training/arguments.py:1406",
    "training/arguments.py:1407",
    "training/arguments.py:1408",
    "training/arguments.py:1409",
)
def hybrid_context_parallelism_excludes(c: Command) -> Problem | None:
    """Hybrid context parallelism has narrow conditions."""
    if not c.hybrid_context_parallel:
        return None
    obstacles = {
        f"pipeline parallelism (PP {c.pp})": c.pp > 1,
        "--enable-cuda-graph": c.enable_cuda_graph,
        "--use-megatron-fsdp": c.use_megatron_fsdp,
        f"--dataloader-type {c.dataloader_type}": c.dataloader_type not in (None, "single"),
        "a run without --calculate-per-token-loss": not c.calculate_per_token_loss,
    }
    found = [name for name, there in obstacles.items() if there]
    if not found:
        return None
    return Problem(
        f"--hybrid-context-parallel does not work with {' and '.join(found)}",
        "drop --hybrid-context-parallel, or change that",
    )


@rule(
    "context.hybrid-even",
    "core/parallel_state.py:1043",
    fix="use an even number of data-parallel ranks",
)
def hybrid_context_parallelism_needs_even_ranks(c: Command) -> bool:
    """--hybrid-context-parallel needs an even DP x CP; it is {c.dp} x {c.cp}."""
    return bool(c.hybrid_context_parallel and c.dp and c.dp * c.cp % 2)
