"""What a command needs of the machine: variables, Transformer Engine, packages.

A check does not see the job's environment. What it cannot know is information; what the command or
the platform says wrongly is an error, as it is for Megatron.
"""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@rule("connections.one", f"{ARGUMENTS}:1437", severity="info", fix=f"export {CONNECTIONS}=1")
def one_connection_has_to_be_set(c: Command) -> bool:
    """Before Blackwell, TP {c.tp} and CP {c.cp} need CUDA_DEVICE_MAX_CONNECTIONS=1; without it \
    Megatron stops."""
    return c.one_connection_is_asserted and CONNECTIONS not in c.environment


@rule("connections.not-one", f"{ARGUMENTS}:1437", fix=f"export {CONNECTIONS}=1")
def one_connection_is_set(c: Command) -> Problem | None:
    """Where one connection is asserted, the command does not set another number."""
    value = c.environment.get(CONNECTIONS, "1")
    if not c.one_connection_is_asserted or value == "1":
        return None
    return Problem(
        f"{CONNECTIONS} is {value}; before Blackwell TP {c.tp} and CP {c.cp} need 1",
        f"export {CONNECTIONS}=1",
    )


@rule("connections.overlap", source="NVIDIA/Megatron-LM#1862, #6311", severity="warning")
def expert_overlap_and_tensor_parallelism_want_opposite_settings(c: Command) -> Problem | None:
    """Before Blackwell the all-to-all overlap wants many connections and TP or CP only one."""
    if not c.overlap_moe_expert_parallel_comm or not c.one_connection_is_wanted:
        return None
    sizes = f"TP {c.tp}" if c.tp > 1 else f"CP {c.cp}"
    return Problem(
        f"--overlap-moe-expert-parallel-comm wants a larger {CONNECTIONS} and {sizes} wants 1 on "
        "GPUs before Blackwell; Megatron only warns. With 1 nothing overlaps, and with more "
        "communication of tensor parallelism can start late",
        f"decide: {CONNECTIONS}=32 for the overlap, or 1 without it (a public run was 4% faster "
        "with 32); or give up TP and CP",
    )


@rule("connections.fsdp", f"{ARGUMENTS}:1014", f"{ARGUMENTS}:1143")
def fsdp_wants_several_connections(c: Command) -> Problem | None:
    """FSDP refuses one connection."""
    if not (c.use_torch_fsdp2 or c.use_megatron_fsdp) or c.environment.get(CONNECTIONS) != "1":
        return None
    return Problem(
        f"{CONNECTIONS} is 1, and FSDP needs more", f"unset {CONNECTIONS}, or set it to 32"
    )


@rule("connections.fsdp-tensor", f"{ARGUMENTS}:1014", severity="warning")
def fsdp_and_tensor_parallelism_want_opposite_settings(c: Command) -> Problem | None:
    """Before Blackwell FSDP wants many connections and TP or CP only one."""
    if not (c.use_torch_fsdp2 or c.use_megatron_fsdp) or not c.one_connection_is_wanted:
        return None
    return Problem(
        f"FSDP needs a {CONNECTIONS} other than 1, and before Blackwell TP {c.tp} and CP {c.cp} "
        "want 1; Megatron only warns",
        "use FSDP with TP 1 and CP 1",
    )


@rule(
    "environment.offload",
    f"{ARGUMENTS}:1858",
    severity="info",
    fix="export NVTE_CPU_OFFLOAD_V1=1",
)
def offloading_needs_its_variable(c: Command) -> bool:
    """--fine-grained-activation-offloading with Transformer Engine 2.10 or newer needs \
    NVTE_CPU_OFFLOAD_V1=1."""
    return c.fine_grained_activation_offloading and not c.environment_is("NVTE_CPU_OFFLOAD_V1", "1")


@rule(
    "environment.priority",
    f"{ARGUMENTS}:1501",
    severity="info",
    since="0.19.2",
    fix="export CUDA_GRAPHS_USE_NODE_PRIORITY=1",
)
def weight_shards_in_graphs_need_their_variable(c: Command) -> bool:
    """More weight shards than tensor-parallel ranks in CUDA graphs need \
    CUDA_GRAPHS_USE_NODE_PRIORITY=1 from Blackwell on."""
    sharded = c.gtp > 1 or c.egtp > 1
    return sharded and c.graph_impl != "none" and c.architecture > 9


@rule(
    "environment.registration",
    f"{ARGUMENTS}:1881",
    fix="export NCCL_GRAPH_REGISTER=0",
)
def expandable_segments_in_graphs_need_their_variable(c: Command) -> bool:
    """PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, and with --cuda-graph-impl \
    transformer_engine that needs NCCL_GRAPH_REGISTER=0."""
    expandable = "expandable_segments:True" in c.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    registered = c.environment.get("NCCL_GRAPH_REGISTER") != "0"
    return c.graph_impl == "transformer_engine" and expandable and registered


@rule(
    "environment.transformer-engine",
    f"{ARGUMENTS}:1074",
    f"{ARGUMENTS}:1558",
    f"{ARGUMENTS}:1567",
    f"{ARGUMENTS}:1826",
    f"{ARGUMENTS}:1835",
    f"{ARGUMENTS}:1849",
    f"{CONFIG}:1563",
    f"{CONFIG}:1829",
    f"{CONFIG}:2174",
    f"{CONFIG}:2185",
    f"{CONFIG}:2297",
    f"{CONFIG}:2303",
    f"{CONFIG}:2667",
    f"{CONFIG}:2754",
    f"{CONFIG}:2764",
    f"{CONFIG}:2809",
    severity="info",
)
def transformer_engine_is_recent_enough(c: Command) -> Problem | None:
    """Features need a release of Transformer Engine."""
    delayed = c.delay_wgrad_compute
    graphs = bool({"attn", "moe_router"} & c.graph_modules)
    recomputed = {"moe_act", "layernorm"} & set(c.recompute_modules)
    needs = {
        "--tensor-parallel-num-weight-shards": ((2, 19), c.gtp > 1 or c.egtp > 1),
        "--moe-single-grouped-weight": (
            (2, 14),
            c.moe_single_grouped_weight or c.moe_single_grouped_bias,
        ),
        "--delay-wgrad-compute in CUDA graphs": ((2, 12), delayed and graphs),
        "--qk-clip": ((2, 9), c.qk_clip),
        "--log-max-attention-logit": ((2, 9), c.log_max_attention_logit),
        "--delay-wgrad-compute": ((2, 8), delayed and c.overlap_grad_reduce),
        "--fp4-format": ((2, 7), c.fp4),
        "--delay-wgrad-compute without fused accumulation": (
            (2, 7),
            delayed and not c.gradient_accumulation_fusion,
        ),
        "recomputing in 8 bits": (
            (2, 6),
            c.fp8 and recomputed and c.recompute_granularity == "selective",
        ),
        "--overlap-dispatch-backward-with-experts-wgrad": (
            (2, 3),
            c.overlap_dispatch_backward_with_experts_wgrad,
        ),
        "--symmetric-ar-type": ((2, 3), c.symmetric_ar_type is not None),
        "--rotary-interleaved": ((2, 3), c.rotary_interleaved and c.rope_fusion and not c.mla),
        "--moe-permute-fusion": ((2, 1), c.moe_permute_fusion),
        "experts in 8 bits": ((1, 11), c.fp8 and c.experts and c.moe_grouped_gemm),
    }
    used = {flag: release for flag, (release, there) in needs.items() if there}
    if not used:
        return None
    major, minor = max(used.values())
    return Problem(
        f"{', '.join(used)}: needs Transformer Engine {major}.{minor} or newer",
        "check the version in your container",
    )


@rule(
    "environment.packages",
    "core/parallel_state.py:401",
    f"{ARGUMENTS}:404",
    f"{ARGUMENTS}:492",
    f"{ARGUMENTS}:520",
    "core/optimizer/__init__.py:757",
    severity="info",
)
def optional_packages_are_installed(c: Command) -> Problem | None:
    """Some features need packages that Megatron does not install."""
    rl = c.perform_rl_step
    saver = rl and (
        (c.rl_persist_cuda_graphs and c.rl_kv_cache_management_mode != "persist")
        or (
            c.rl_offload_inference_model_weights_when_idle
            and c.rl_inference_model_unified_memory_level != 1
        )
    )
    needs = {
        "einops (several optimizer instances, or levels of context parallelism)": (
            c.num_distributed_optimizer_instances > 1 or c.hierarchical_context_parallel_sizes
        ),
        "nvidia-resiliency-ext (local checkpoints)": c.non_persistent_ckpt_type == "local",
        "torch_memory_saver (reinforcement learning)": saver,
        f"emerging-optimizers (--optimizer {c.optimizer})": c.emerging_optimizer,
    }
    used = [package for package, there in needs.items() if there]
    if not used:
        return None
    return Problem(f"needs the Python package {', '.join(used)}", "install it in your container")
