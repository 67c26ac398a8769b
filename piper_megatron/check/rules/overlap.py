"""Communication that runs beside compute."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
PARALLEL = "core/model_parallel_config.py"


@rule("overlap.tensor", f"{ARGUMENTS}:1402")
def tensor_overlap_needs_sequence_parallelism(c: Command) -> Problem | None:
    """Overlapping tensor-parallel communication needs sequence parallelism."""
    if not c.tp_comm_overlap or c.sequence_parallel:
        return None
    if c.tp == 1:
        return Problem(
            "--tp-comm-overlap with TP 1 has nothing to overlap", "drop --tp-comm-overlap"
        )
    return Problem("--tp-comm-overlap needs --sequence-parallel", "add --sequence-parallel")


@rule(
    "overlap.experts",
    f"{CONFIG}:2675",
    f"{CONFIG}:2680",
    f"{CONFIG}:2683",
    f"{CONFIG}:2688",
    f"{CONFIG}:2691",
    f"{CONFIG}:2694",
    f"{CONFIG}:2697",
    f"{CONFIG}:2702",
    f"{CONFIG}:2706",
    f"{CONFIG}:2709",
    f"{CONFIG}:2729",
    f"{CONFIG}:2740",
)
def expert_overlap_has_conditions(c: Command) -> Problem | None:
    """Overlapping the all-to-all of experts has a dozen conditions."""
    if not c.overlap_moe_expert_parallel_comm:
        return None
    # the deprecated flag makes recomputation selective before this is asked
    granularity = "selective" if c.moe_layer_recompute else c.recompute_granularity
    modules = [*c.recompute_modules, *(["moe"] if c.moe_layer_recompute else [])]
    ncclep = c.flex_backend == "ncclep"
    offloads_fc1 = c.fine_grained_activation_offloading and "expert_fc1" in c.offload_modules
    graphs = c.graph_impl == "transformer_engine" and {"moe", "mlp"} & c.graph_modules
    needs = {
        f"expert parallelism (EP is {c.ep})": c.ep > 1,
        "--moe-token-dispatcher-type alltoall or flex": (
            c.moe_token_dispatcher_type in ("alltoall", "flex")
        ),
        f"virtual pipeline stages, because PP is {c.pp}": c.pp == 1 or c.vpp is not None,
        "no full recomputation (--recompute-granularity full)": granularity != "full",
        "no --recompute-method": c.recompute_method is None,
        "no --recompute-num-layers": c.recompute_num_layers is None,
        "no 'moe' in --recompute-modules": "moe" not in modules,
        "--bf16 or --fp16": c.bf16 or c.fp16,
        "no --moe-shared-expert-overlap": not c.moe_shared_expert_overlap,
        f"at most one multi-token-prediction layer, not {c.mtp}": c.mtp in (None, 0, 1),
        "no 'expert_fc1' in --offload-modules with ncclep": not (ncclep and offloads_fc1),
        "no CUDA graph of moe or mlp": not graphs,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--overlap-moe-expert-parallel-comm needs {'; '.join(missing)}",
        "drop --overlap-moe-expert-parallel-comm, or change that",
    )


@rule(
    "overlap.delayed-wgrad",
    f"{CONFIG}:2750",
    fix="add --overlap-moe-expert-parallel-comm, or drop --delay-wgrad-compute",
)
def delayed_wgrad_needs_expert_overlap(c: Command) -> bool:
    """--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm."""
    return c.delay_wgrad_compute and not c.overlap_moe_expert_parallel_comm


@rule(
    "overlap.delayed-wgrad-impl", f"{ARGUMENTS}:1823", fix="--transformer-impl transformer_engine"
)
def delayed_wgrad_needs_transformer_engine(c: Command) -> bool:
    """--delay-wgrad-compute needs --transformer-impl transformer_engine."""
    return c.delay_wgrad_compute and c.transformer_impl != "transformer_engine"


@rule("overlap.delayed-wgrad-graph", f"{ARGUMENTS}:1838", f"{ARGUMENTS}:1844")
def delayed_wgrad_in_graphs_has_conditions(c: Command) -> Problem | None:
    """Delayed weight gradients inside CUDA graphs need fused accumulation and no biases."""
    if not (c.delay_wgrad_compute and c.overlap_grad_reduce):
        return None
    router = (
        "moe_router" in c.graph_modules
        and c.moe_shared_expert_intermediate_size is not None
        and not c.moe_shared_expert_overlap
    )
    attention = "attn" in c.graph_modules
    if not (attention or router):
        return None
    if not c.gradient_accumulation_fusion:
        return Problem(
            "--delay-wgrad-compute in CUDA graphs needs fused gradient accumulation",
            "drop --no-gradient-accumulation-fusion",
        )
    if attention and (c.add_bias_linear or c.add_qkv_bias):
        return Problem(
            "--delay-wgrad-compute with a CUDA graph of attention excludes attention biases",
            "add --disable-bias-linear and drop --add-qkv-bias",
        )
    return None


@rule(
    "overlap.dispatch-wgrad",
    f"{CONFIG}:2760",
    f"{CONFIG}:2767",
    since="0.18.2",
    fix="keep one of the overlaps",
)
def dispatch_backward_overlap_excludes_others(c: Command) -> bool:
    """--overlap-dispatch-backward-with-experts-wgrad excludes --overlap-moe-expert-parallel-comm \
    and --delay-wgrad-compute."""
    return c.overlap_dispatch_backward_with_experts_wgrad and (
        c.overlap_moe_expert_parallel_comm or c.delay_wgrad_compute
    )


@rule(
    "overlap.early-release",
    f"{CONFIG}:2773",
    fix="add --overlap-moe-expert-parallel-comm, or drop it",
)
def early_release_needs_expert_overlap(c: Command) -> bool:
    """--ep-overlap-early-attn-memory-release needs --overlap-moe-expert-parallel-comm."""
    return c.ep_overlap_early_attn_memory_release and not c.overlap_moe_expert_parallel_comm


@rule("overlap.embedding-wgrad", f"{PARALLEL}:546", f"{PARALLEL}:551", f"{PARALLEL}:556")
def deferred_embedding_wgrad_has_conditions(c: Command) -> Problem | None:
    """Deferring the embedding's weight gradient needs a pipeline and fused accumulation."""
    if not c.defer_embedding_wgrad_compute:
        return None
    if c.pp == 1:
        return Problem(
            "--defer-embedding-wgrad-compute needs pipeline parallelism",
            "drop --defer-embedding-wgrad-compute",
        )
    if not c.gradient_accumulation_fusion:
        return Problem(
            "--defer-embedding-wgrad-compute excludes --no-gradient-accumulation-fusion",
            "drop --no-gradient-accumulation-fusion",
        )
    if c.wgrad_deferral_limit < 0:
        return Problem(
            f"--wgrad-deferral-limit {c.wgrad_deferral_limit} must not be negative",
            "--wgrad-deferral-limit 0",
        )
    return None


@rule(
    "overlap.warmup-flush",
    f"{PARALLEL}:572",
    fix="drop --overlap-p2p-communication-warmup-flush, or add virtual pipeline stages",
)
def warmup_overlap_needs_the_interleaved_schedule(c: Command) -> bool:
    """--overlap-p2p-communication-warmup-flush needs overlapped point-to-point communication, \
    which only the interleaved schedule has."""
    return c.overlap_p2p_comm_warmup_flush and not c.overlap_p2p_comm
