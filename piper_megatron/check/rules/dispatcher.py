"""The token dispatcher and its backends."""

from collections import Counter

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule
from piper_megatron.workload.dispatcher_flags import TWO_HOPS, dispatcher_conflict, dispatcher_flags

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"


@rule(
    "dispatcher.deepep-flag",
    f"{CONFIG}:1591",
    fix="--moe-token-dispatcher-type flex, or drop --moe-enable-deepep",
)
def deepep_needs_the_flex_dispatcher(c: Command) -> bool:
    """--moe-enable-deepep needs --moe-token-dispatcher-type flex, not \
    {c.moe_token_dispatcher_type}."""
    return c.moe_enable_deepep and c.moe_token_dispatcher_type != "flex"


@rule("dispatcher.one-backend", f"{CONFIG}:1593", fix="drop --moe-enable-deepep")
def one_flex_backend(c: Command) -> bool:
    """--moe-enable-deepep contradicts --moe-flex-dispatcher-backend hybridep."""
    return c.moe_enable_deepep and c.moe_flex_dispatcher_backend == "hybridep"


@rule(
    "dispatcher.ncclep",
    f"{CONFIG}:1611",
    since="0.19.2",
    fix="--moe-token-dispatcher-type flex",
)
def ncclep_needs_the_flex_dispatcher(c: Command) -> bool:
    """--moe-flex-dispatcher-backend ncclep needs --moe-token-dispatcher-type flex."""
    # the deprecated flag replaces the backend first
    backend = "deepep" if c.moe_enable_deepep else c.moe_flex_dispatcher_backend
    return backend == "ncclep" and c.moe_token_dispatcher_type != "flex"


@rule(
    "dispatcher.deepep-padding",
    f"{CONFIG}:1604",
    fix="--moe-flex-dispatcher-backend hybridep, or drop --moe-pad-expert-input-to-capacity",
)
def deepep_cannot_pad(c: Command) -> bool:
    """The flex dispatcher with DeepEP cannot pad experts to their capacity."""
    return c.moe_pad_expert_input_to_capacity and c.flex_backend == "deepep"


@rule("dispatcher.sms", f"{CONFIG}:1631", since="0.19.2", fix="--moe-flex-dispatcher-num-sms")
def one_number_of_sms(c: Command) -> bool:
    """--moe-deepep-num-sms {c.moe_deepep_num_sms} and --moe-hybridep-num-sms \
    {c.moe_hybridep_num_sms} are one setting today."""
    given = {c.moe_deepep_num_sms, c.moe_hybridep_num_sms} - {None}
    return c.moe_flex_dispatcher_num_sms is None and len(given) > 1


@rule(
    "dispatcher.shared-overlap",
    f"{CONFIG}:1648",
    fix="--moe-token-dispatcher-type alltoall, or drop --moe-shared-expert-overlap",
)
def shared_expert_overlap_needs_alltoall(c: Command) -> bool:
    """--moe-shared-expert-overlap works with the alltoall and flex dispatchers, not \
    {c.moe_token_dispatcher_type}."""
    return (
        c.moe_shared_expert_intermediate_size is not None
        and c.moe_shared_expert_overlap
        and c.moe_token_dispatcher_type not in ("alltoall", "flex")
    )


@rule("dispatcher.rank-capacity", f"{CONFIG}:1694", f"{CONFIG}:1702", since="0.18.2")
def rank_capacity_needs_its_backend(c: Command) -> Problem | None:
    """A capacity of a whole rank needs hybridep with the op fuser, or ncclep."""
    if c.moe_expert_rank_capacity_factor is None:
        return None
    backend = "deepep" if c.moe_enable_deepep else c.moe_flex_dispatcher_backend
    if backend == "deepep":
        return Problem(
            "--moe-expert-rank-capacity-factor needs --moe-flex-dispatcher-backend hybridep or "
            f"ncclep, not {backend}",
            "--moe-flex-dispatcher-backend hybridep",
        )
    if backend == "hybridep" and not c.use_transformer_engine_op_fuser:
        return Problem(
            "--moe-expert-rank-capacity-factor with hybridep needs "
            "--use-transformer-engine-op-fuser",
            "add --use-transformer-engine-op-fuser",
        )
    return None


@rule("dispatcher.stash", f"{CONFIG}:1906", f"{CONFIG}:1908", f"{CONFIG}:1916", since="0.18.2")
def paged_stash_has_conditions(c: Command) -> Problem | None:
    """The paged stash needs a rank capacity and no other offloading of experts."""
    if not c.moe_paged_stash:
        return None
    if c.cpu_offloading_num_layers > 0:
        return Problem(
            "--moe-paged-stash excludes --cpu-offloading-num-layers", "drop one of the two"
        )
    if c.moe_expert_rank_capacity_factor is None:
        return Problem(
            "--moe-paged-stash needs --moe-expert-rank-capacity-factor",
            "add --moe-expert-rank-capacity-factor, for instance 1.5",
        )
    twice = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(c.offload_modules)
    if twice:
        names = ", ".join(sorted(twice))
        return Problem(
            f"--moe-paged-stash covers {names} of --offload-modules already",
            f"drop {names} from --offload-modules",
        )
    return None


@rule(
    "dispatcher.fake-group",
    f"{ARGUMENTS}:1702",
    fix="--moe-token-dispatcher-type alltoall, or drop --fake-process-group",
)
def fake_groups_exclude_flex(c: Command) -> bool:
    """--fake-process-group does not work with the flex dispatcher, whose kernels need real \
    peers."""
    return c.fake_process_group and c.moe_token_dispatcher_type == "flex"


@rule("dispatcher.quantized-padding", f"{CONFIG}:2318", f"{CONFIG}:2323")
def padding_for_quantization_has_conditions(c: Command) -> Problem | None:
    """Padding the routing map needs 8- or 4-bit experts and the alltoall or flex dispatcher."""
    if not (c.moe_router_padding_for_quantization or c.moe_router_padding_for_fp8):
        return None
    if c.fp8 is None and c.fp4 is None:
        return Problem(
            "--moe-router-padding-for-quantization needs --fp8-format or --fp4-format",
            "drop --moe-router-padding-for-quantization, or add --fp8-format hybrid",
        )
    if c.moe_token_dispatcher_type == "allgather":
        return Problem(
            "--moe-router-padding-for-quantization does not work with the allgather dispatcher",
            "--moe-token-dispatcher-type alltoall",
        )
    return None


@rule("dispatcher.piper", source="piper_megatron: refused when the job starts")
def piper_dispatcher_fits_the_command(c: Command) -> Problem | None:
    """--piper-dispatcher and --piper-node-size do not contradict Megatron's flags."""
    conflict = dispatcher_conflict(c.values)
    return Problem(conflict.message, conflict.fix) if conflict else None


@rule("dispatcher.piper-nodes", source="piper_megatron: refused when the job starts")
def pretended_nodes_lie_in_true_ones(c: Command) -> Problem | None:
    """So many members of an expert group as --piper-node-size says are on one node."""
    size = dispatcher_flags(c.values).node_size
    node = c.platform.ranks_per_node if c.platform else c.gpus
    if size is None or c.gpus <= node or node % (size * c.etp) == 0:
        return None
    fits = [smaller for smaller in range(1, size) if node % (smaller * c.etp) == 0]
    return Problem(
        f"--piper-node-size {size}: so many members of an expert group span nodes of {node} ranks",
        f"--piper-node-size {max(fits)}" if fits else "drop --piper-node-size",
    )


@rule("dispatcher.piper-shares", source="piper_megatron: refused when the job starts")
def two_hops_need_equal_shares(c: Command) -> Problem | None:
    """All nodes hold equally many members of an expert group, or one hop is all there is."""
    flags = dispatcher_flags(c.values)
    if flags.algorithm not in TWO_HOPS or flags.node_size is not None or c.platform is None:
        return None
    node, group = c.platform.ranks_per_node, c.ep * c.etp
    for first in range(0, c.gpus - group + 1, group):
        shares = Counter(rank // node for rank in range(first, first + group, c.etp))
        if len(set(shares.values())) > 1:
            return Problem(
                f"--piper-dispatcher {flags.algorithm} needs nodes that hold equally many ranks of "
                f"an expert group, and one of EP {c.ep} x ETP {c.etp} has "
                f"{' and '.join(map(str, shares.values()))} on nodes of {node}",
                "--piper-dispatcher auto or flat, or an EP x ETP that divides a node or fills "
                "whole ones",
            )
    return None
