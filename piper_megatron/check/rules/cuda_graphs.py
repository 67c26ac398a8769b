"""CUDA graphs."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
GRAPHS = "core/transformer/cuda_graph_config.py"
SCOPES = {
    "none": {"none"},
    "local": {"layer", "block"},
    "transformer_engine": {"none"},
    "full_iteration": {"none"},
}
EXPERT_OFFLOADS = {"expert_fc1", "moe_act", "fused_group_mlp"}


@rule(
    "graphs.old-flags", f"{ARGUMENTS}:594", f"{ARGUMENTS}:597", f"{CONFIG}:2366", f"{CONFIG}:2369"
)
def one_flag_turns_graphs_on(c: Command) -> Problem | None:
    """CUDA graphs are turned on once."""
    old = [
        flag
        for flag, given in (
            ("--enable-cuda-graph", c.enable_cuda_graph),
            ("--external-cuda-graph", c.external_cuda_graph),
        )
        if given
    ]
    if not old or (len(old) == 1 and c.cuda_graph_impl == "none"):
        return None
    return Problem(
        f"{' and '.join(old)} cannot be combined with each other or with --cuda-graph-impl",
        f"--cuda-graph-impl alone, without {' and '.join(old)}",
    )


@rule("graphs.old-scope", f"{ARGUMENTS}:616", fix="drop --cuda-graph-scope", since="0.18.2")
def one_flag_names_modules(c: Command) -> bool:
    """--cuda-graph-scope and --cuda-graph-modules are the same and cannot be combined."""
    return c.cuda_graph_scope_deprecated is not None and bool(c.values.cuda_graph_modules)


@rule(
    "graphs.deprecated-modules",
    f"{GRAPHS}:40",
    f"{GRAPHS}:98",
    f"{GRAPHS}:108",
    f"{GRAPHS}:112",
    f"{GRAPHS}:118",
    f"{GRAPHS}:122",
    since="0.18.2",
)
def deprecated_modules_stand_alone(c: Command) -> Problem | None:
    """Deprecated module names that stand for another flag do not contradict it."""
    names = c.graph_modules_typed
    if "full" in names and names != ["full"]:
        return Problem(
            "'full' in --cuda-graph-modules excludes other modules", "drop --cuda-graph-modules"
        )
    impl = _impl_of_flags(c)
    scope = c.inference_cuda_graph_scope
    whole, inference = "full_iteration" in names, "full_iteration_inference" in names
    clash = (
        (whole and inference)
        or (whole and (impl == "transformer_engine" or scope not in (None, "none")))
        or (inference and (impl not in ("none", "local") or scope not in (None, "block")))
    )
    if not clash:
        return None
    name = "full_iteration" if whole else "full_iteration_inference"
    return Problem(
        f"'{name}' in --cuda-graph-modules contradicts --cuda-graph-impl {impl} or "
        "--inference-cuda-graph-scope",
        "use --cuda-graph-impl and --inference-cuda-graph-scope instead",
    )


def _impl_of_flags(c: Command) -> str:
    if c.enable_cuda_graph:
        return "local"
    return "transformer_engine" if c.external_cuda_graph else c.cuda_graph_impl


@rule("graphs.inference-scope", f"{ARGUMENTS}:629", f"{CONFIG}:2456", since="0.18.2")
def inference_scope_fits_the_implementation(c: Command) -> Problem | None:
    """Only the local implementation captures graphs for inference."""
    legal = SCOPES[c.graph_impl]
    if c.graph_scope in legal:
        return None
    return Problem(
        f"--inference-cuda-graph-scope {c.graph_scope} does not work with --cuda-graph-impl "
        f"{c.graph_impl}",
        f"--inference-cuda-graph-scope {' or '.join(sorted(legal))}",
    )


@rule(
    "graphs.whole-iteration",
    f"{ARGUMENTS}:1888",
    f"{CONFIG}:2461",
    fix="drop --cuda-graph-modules",
    since="0.18.2",
)
def whole_iteration_has_no_modules(c: Command) -> bool:
    """A CUDA graph of the whole iteration has no --cuda-graph-modules."""
    return c.graph_impl == "full_iteration" and bool(c.graph_modules)


@rule(
    "graphs.nan-check",
    f"{ARGUMENTS}:1196",
    fix="add --no-check-for-nan-in-loss-and-grad",
)
def whole_iteration_has_no_nan_check(c: Command) -> bool:
    """A CUDA graph of the whole iteration needs --no-check-for-nan-in-loss-and-grad."""
    checks = c.check_for_nan_in_loss_and_grad and not (c.fp16 and not c.loss_scale)
    return c.graph_impl == "full_iteration" and checks


@rule("graphs.block-fp8", f"{ARGUMENTS}:1201", f"{ARGUMENTS}:1204")
def fp8_in_inference_blocks_has_conditions(c: Command) -> Problem | None:
    """8-bit inference in one graph needs the inference layers and mxfp8."""
    if c.graph_scope != "block" or c.fp8 is None:
        return None
    if c.transformer_impl == "inference_optimized" and c.fp8_recipe == "mxfp8":
        return None
    return Problem(
        "--inference-cuda-graph-scope block with --fp8-format needs --transformer-impl "
        "inference_optimized and --fp8-recipe mxfp8",
        "--inference-cuda-graph-scope layer",
    )


@rule("graphs.count", f"{ARGUMENTS}:1208", fix="--inference-dynamic-batching-num-cuda-graphs 16")
def number_of_inference_graphs_is_positive(c: Command) -> bool:
    """--inference-dynamic-batching-num-cuda-graphs {c.inference_dynamic_batching_num_cuda_graphs} \
    must be positive, or -1 for automatic."""
    count = c.inference_dynamic_batching_num_cuda_graphs
    return c.graph_impl == "local" and not (count > 0 or count == -1)


@rule("graphs.offloading", f"{CONFIG}:2468", fix="drop one of the two")
def graphs_exclude_layer_offloading(c: Command) -> bool:
    """CUDA graphs exclude --cpu-offloading-num-layers."""
    return c.graph_impl not in ("none", "full_iteration") and c.cpu_offloading_num_layers > 0


def _captured(c: Command) -> set[str]:
    """Modules of a per-layer graph; the local one takes router and preprocessing together."""
    modules = set(c.graph_modules)
    if c.graph_impl == "local" and modules & {"moe_router", "moe_preprocess"}:
        modules |= {"moe_router", "moe_preprocess"}
    return modules


@rule(
    "graphs.modules",
    f"{CONFIG}:2484",
    f"{CONFIG}:2489",
    f"{CONFIG}:2493",
    f"{CONFIG}:2501",
    f"{CONFIG}:2509",
    f"{CONFIG}:2516",
)
def captured_modules_fit_the_model(c: Command) -> Problem | None:
    """What a per-layer graph captures exists and has static shapes."""
    if c.graph_impl not in ("local", "transformer_engine"):
        return None
    modules = _captured(c)
    fix = "drop it from --cuda-graph-modules"
    if {"moe", "moe_router"} <= modules:
        return Problem("--cuda-graph-modules has both moe and moe_router", "keep one of the two")
    if "moe_preprocess" in modules and "moe_router" not in modules:
        return Problem("moe_preprocess in --cuda-graph-modules needs moe_router", "add moe_router")
    if c.experts is None or c.experts <= 1:
        if modules & {"moe", "moe_router"}:
            return Problem("--cuda-graph-modules names experts in a dense model", fix)
        return None
    frequency = c.values.moe_layer_freq
    if "mlp" in modules and (
        frequency == 1 or (isinstance(frequency, list) and 0 not in frequency)
    ):
        return Problem("mlp in --cuda-graph-modules: the model has no dense layer", fix)
    if c.capacity is not None and c.moe_pad_expert_input_to_capacity:
        return None
    if "moe" in modules:
        return Problem(
            "moe in --cuda-graph-modules needs static shapes: --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity",
            "use moe_router and moe_preprocess instead",
        )
    counted = c.capacity is not None or c.moe_router_padding_for_fp8
    if c.moe_token_dispatcher_type == "alltoall" and counted and "moe_preprocess" in modules:
        return Problem(
            "moe_preprocess in --cuda-graph-modules does not work with a capacity factor or "
            "--moe-router-padding-for-fp8: preprocessing waits for the device",
            fix,
        )
    return None


@rule(
    "graphs.recomputation",
    f"{CONFIG}:2523",
    f"{CONFIG}:2533",
    f"{CONFIG}:2546",
    f"{CONFIG}:2554",
    f"{CONFIG}:2568",
    f"{CONFIG}:2587",
)
def recomputation_fits_into_graphs(c: Command) -> Problem | None:
    """What is recomputed inside a graph is not random and not larger than the graph."""
    granularity = "selective" if c.moe_layer_recompute else c.recompute_granularity
    if c.graph_impl == "none" or granularity is None:
        return None
    if granularity == "full":
        if c.graph_impl == "full_iteration":
            return None
        return Problem(
            f"full recomputation does not work with --cuda-graph-impl {c.graph_impl}",
            "--recompute-granularity selective, or --cuda-graph-impl full_iteration",
        )
    recomputed = {*c.recompute_modules, *(["moe"] if c.moe_layer_recompute else [])}
    captured = _captured(c)
    whole = c.graph_impl == "full_iteration" or not captured
    if c.graph_impl == "transformer_engine" and "moe" in recomputed and "moe_router" in captured:
        return Problem(
            "'moe' cannot be recomputed around a CUDA graph of moe_router",
            "drop 'moe' from --recompute-modules",
        )
    random = (
        ("core_attn", "attn", c.attention_dropout != 0.0, "--attention-dropout"),
        ("mlp", "mlp", c.hidden_dropout != 0.0, "--hidden-dropout"),
        ("moe", "moe", c.hidden_dropout != 0.0, "--hidden-dropout"),
        ("moe", "moe", c.moe_input_jitter_eps is not None, "--moe-input-jitter-eps"),
    )
    for module, graph, is_random, flag in random:
        if is_random and module in recomputed and (whole or graph in captured):
            return Problem(
                f"'{module}' cannot be recomputed inside a CUDA graph with {flag}",
                f"drop '{module}' from --recompute-modules, or set {flag} 0",
            )
    shared = c.moe_shared_expert_intermediate_size is not None and not c.moe_shared_expert_overlap
    if (
        c.gtp > 1
        and c.graph_impl == "local"
        and (c.fp8 is not None or c.fp4 is not None)
        and shared
        and (whole or captured & {"moe", "moe_router"})
        and "shared_experts" in recomputed
    ):
        return Problem(
            "'shared_experts' cannot be recomputed inside a local CUDA graph with weight shards in "
            "8 or 4 bits",
            "drop 'shared_experts' from --recompute-modules",
        )
    return None


@rule(
    "graphs.fine-offloading",
    f"{CONFIG}:2601",
    f"{CONFIG}:2607",
    f"{CONFIG}:2617",
    f"{CONFIG}:2627",
    f"{CONFIG}:2630",
    f"{CONFIG}:2635",
    since="0.18.2",
)
def fine_grained_offloading_fits_graphs(c: Command) -> Problem | None:
    """Offloading of modules works with few kinds of graphs."""
    if c.graph_impl == "none" or not c.fine_grained_activation_offloading:
        return None
    captured, modules = _captured(c), set(c.offload_modules)
    limit = c.fine_grained_offloading_max_inflight_offloads
    local = c.graph_impl == "local"
    needs = {
        "--offload-modules expert_fc1, moe_act or fused_group_mlp only": (
            not local or (modules <= EXPERT_OFFLOADS and bool(modules))
        ),
        "--cuda-graph-modules": not local or bool(captured),
        "no 'moe' in --cuda-graph-modules": "moe" not in captured,
        "--cuda-graph-warmup-steps 1 or more": c.cuda_graph_warmup_steps > 0,
        "--fine-grained-offloading-max-inflight-offloads 0 or more": (
            c.graph_impl != "full_iteration" or (limit is not None and limit >= 0)
        ),
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(
        f"--fine-grained-activation-offloading with --cuda-graph-impl {c.graph_impl} needs "
        f"{'; '.join(missing)}",
        "change that, or drop one of the two",
    )
