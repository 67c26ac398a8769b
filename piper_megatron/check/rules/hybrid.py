"""Hybrid (Mamba) models: their layer pattern."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
PATTERN = "core/models/hybrid/hybrid_layer_allocation.py"
LAYERS = set("MG*D+-E")


@rule("hybrid.one-pattern", f"{ARGUMENTS}:722", first=True)
def pattern_is_given_once(c: Command) -> Problem | None:
    """The layer pattern of a hybrid model is given once."""
    if c.hybrid_override_pattern is None or c.hybrid_layer_pattern is None:
        return None
    return Problem(
        "--hybrid-override-pattern and --hybrid-layer-pattern exclude each other",
        "keep --hybrid-layer-pattern",
    )


@rule("hybrid.pattern", f"{PATTERN}:262", f"{PATTERN}:291", f"{PATTERN}:298", first=True)
def pattern_can_be_read(c: Command) -> Problem | None:
    """A pattern has known layers, one kind of attention and equal prediction parts."""
    if c.hybrid_pattern is None:
        return None
    main, *predictions = c.hybrid_pattern.split("/")
    fault = None
    if not set(main) <= LAYERS | {"|"} or not set("".join(predictions)) <= LAYERS:
        fault = f"has layers other than {' '.join(sorted(LAYERS))}"
    elif any("*" in part and set("D+") & set(part) for part in (main, *predictions)):
        fault = "mixes plain attention with latent or sparse attention"
    elif any(predictions) and len(set(predictions)) > 1:
        fault = "has prediction parts that differ"
    if fault is None:
        return None
    return Problem(f"--hybrid-layer-pattern '{c.hybrid_pattern}' {fault}", "correct the pattern")


@rule("hybrid.layers", "core/utils.py:835", first=True, fix="name at least one layer")
def pattern_has_layers(c: Command) -> bool:
    """--hybrid-layer-pattern names no layer."""
    return c.hybrid_pattern is not None and c.layers == 0


@rule(
    "hybrid.splits",
    f"{ARGUMENTS}:778",
    f"{ARGUMENTS}:783",
    f"{ARGUMENTS}:788",
    f"{ARGUMENTS}:794",
    f"{ARGUMENTS}:799",
    f"{ARGUMENTS}:803",
    f"{ARGUMENTS}:808",
)
def pattern_says_how_layers_are_split(c: Command) -> Problem | None:
    """The pattern of a hybrid model also says where its stages end."""
    if c.hybrid_pattern is None:
        return None
    piped = "|" in c.hybrid_pattern.partition("/")[0]
    values = c.values
    others = {
        "--decoder-first-pipeline-num-layers": (
            piped and values.decoder_first_pipeline_num_layers is not None
        ),
        "--decoder-last-pipeline-num-layers": (
            piped and values.decoder_last_pipeline_num_layers is not None
        ),
        "--num-layers-per-virtual-pipeline-stage": (
            values.num_layers_per_virtual_pipeline_stage is not None
        ),
        "--num-virtual-stages-per-pipeline-rank": (
            values.num_virtual_stages_per_pipeline_rank is not None
        ),
        "--pipeline-model-parallel-layout": values.pipeline_model_parallel_layout is not None,
        "--account-for-embedding-in-pipeline-split": (
            values.account_for_embedding_in_pipeline_split
        ),
        "--account-for-loss-in-pipeline-split": values.account_for_loss_in_pipeline_split,
    }
    found = [flag for flag, given in others.items() if given]
    if not found:
        return None
    return Problem(
        f"--hybrid-layer-pattern excludes {', '.join(found)}",
        "mark the ends of stages with | in the pattern",
    )


@rule("hybrid.segments", f"{ARGUMENTS}:823")
def segments_divide_over_pipeline_ranks(c: Command) -> Problem | None:
    """The segments of a pattern are a multiple of the pipeline ranks."""
    if c.hybrid_pattern is None:
        return None
    segments = c.hybrid_pattern.partition("/")[0].count("|") + 1
    if segments % c.pp == 0 or (segments == 1 and c.pp > 1):
        return None
    return Problem(
        f"--hybrid-layer-pattern has {segments} segments, not divisible by PP {c.pp}",
        f"separate it into a multiple of {c.pp} segments with |",
    )
