"""How decoder layers are shared out over pipeline ranks and virtual stages."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest
from piper_megatron.check.rule import Problem, rule
from piper_megatron.errors import LayoutError
from piper_megatron.layout.pipeline import (
    PipelineLayout,
    balanced_layout_string,
    pipeline_faults,
    pipeline_layout,
)
from piper_megatron.workload.layout_text import stages_of_text

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"
NO_MODEL_IS_DEEPER = 10_000
LAYOUT = "core/transformer/pipeline_parallel_layer_layout.py"


@rule("pipeline.even", f"{ARGUMENTS}:934", f"{ARGUMENTS}:963", f"{CONFIG}:2077", f"{CONFIG}:2090")
def layers_divide_over_pipeline_ranks(c: Command) -> Problem | None:
    """Without another split, every pipeline rank gets the same number of layers."""
    if not _even_split_is_checked(c) or c.split_layers % c.pp == 0:
        return None
    return Problem(
        f"{_counted_layers(c)} are not divisible by PP {c.pp}",
        f"{_uneven_advice(c)}; or --pipeline-model-parallel-size "
        f"{nearest(c.pp, divisors(c.split_layers))}",
    )


def _even_split_is_checked(c: Command) -> bool:
    """At start-up, unless virtual stages are counted per rank or layers are placed."""
    if c.hybrid_pattern is not None or c.uneven or c.values.pipeline_model_parallel_layout:
        return False
    accounting = (
        c.values.account_for_embedding_in_pipeline_split
        or c.values.account_for_loss_in_pipeline_split
    )
    return c.num_virtual_stages_per_pipeline_rank is None or accounting


def _counted_layers(c: Command) -> str:
    extra = [
        name
        for name, counts in (
            ("embedding", c.values.account_for_embedding_in_pipeline_split),
            ("loss", c.values.account_for_loss_in_pipeline_split),
        )
        if counts
    ]
    if not extra:
        return f"{c.layers} layers"
    return f"{c.layers} layers and the {' and the '.join(extra)}, {c.split_layers} in all,"


def _uneven_advice(c: Command, vpp: int = 1) -> str:
    """Flags that share the layers out with the embedding and loss ranks the lighter ones."""
    texts = []
    ends = _ends(c.layers, c.pp, vpp)
    if ends:
        first, middle, last = ends
        flags = []
        if first != middle:
            flags.append(f"--decoder-first-pipeline-num-layers {first}")
        if last != middle:
            flags.append(f"--decoder-last-pipeline-num-layers {last}")
        split = "/".join(map(str, [first, *[middle] * min(c.pp - 2, 2), last]))
        texts.append(f"{' '.join(flags)} ({split if c.pp <= 4 else f'{first}/{middle}.../{last}'})")
    balanced = layout_advice(c, vpp)
    if balanced:
        texts.append(balanced)
    return " or ".join(texts) or f"{c.layers} layers cannot fill {c.pp * vpp} stages"


def _ends(layers: int, pp: int, vpp: int = 1) -> tuple[int, int, int] | None:
    """Layers of the first, each middle and the last rank, as even as Megatron's flags allow."""
    if pp < 3 and not (pp == 2 and vpp == 1):
        return None
    if pp == 2:
        return (layers // 2, 0, layers - layers // 2) if layers >= 2 else None
    mean = layers // (pp * vpp) * vpp
    splits = [
        (first, middle, last)
        for middle in (mean, mean + vpp)
        for first in range(vpp, layers - middle * (pp - 2), vpp)
        if middle and (last := layers - first - middle * (pp - 2)) >= vpp and last % vpp == 0
    ]
    return min(
        splits,
        key=lambda split: (
            max(split),
            max(split[0], split[2]) > split[1],
            abs(split[0] - split[2]),
            split[2] > split[0],
        ),
        default=None,
    )


def layout_advice(c: Command, vpp: int = 1) -> str:
    """A balanced layout as a flag; empty when the stages are more than the layers."""
    if c.layers > NO_MODEL_IS_DEEPER:
        return ""
    try:
        text = balanced_layout_string(c.layers, c.pp, vpp, c.mtp or 0)
    except LayoutError:
        return ""
    return f"--pipeline-model-parallel-layout '{text}'"


@rule(
    "pipeline.one-way",
    f"{ARGUMENTS}:894",
    fix="keep one of the three",
)
def virtual_stages_are_given_one_way(c: Command) -> bool:
    """Only one of --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank \
    and --pipeline-model-parallel-layout can be given."""
    ways = (
        c.num_layers_per_virtual_pipeline_stage,
        c.num_virtual_stages_per_pipeline_rank,
        c.values.pipeline_model_parallel_layout,
    )
    return sum(way is not None for way in ways) > 1


@rule("pipeline.uneven-virtual", f"{ARGUMENTS}:921")
def uneven_stages_count_virtual_ones_per_rank(c: Command) -> Problem | None:
    """An uneven split counts virtual stages per rank."""
    if not c.uneven or c.num_layers_per_virtual_pipeline_stage is None:
        return None
    if c.num_virtual_stages_per_pipeline_rank is not None:
        return None
    return Problem(
        "--num-layers-per-virtual-pipeline-stage does not work with "
        "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        "--num-virtual-stages-per-pipeline-rank instead",
    )


@rule("pipeline.virtual-layers", f"{ARGUMENTS}:938")
def virtual_stages_divide_a_ranks_layers(c: Command) -> Problem | None:
    """The layers of a virtual stage divide those of a pipeline rank."""
    each = c.num_layers_per_virtual_pipeline_stage
    if each is None or c.uneven or c.num_virtual_stages_per_pipeline_rank is not None:
        return None
    if c.values.pipeline_model_parallel_layout is not None or c.split_layers % c.pp:
        return None
    per_rank = c.split_layers // c.pp
    if per_rank % each == 0:
        return None
    return Problem(
        f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {per_rank} layers of "
        "a pipeline rank",
        f"--num-layers-per-virtual-pipeline-stage {nearest(each, divisors(per_rank))}",
    )


@rule(
    "pipeline.interleaved-ranks",
    f"{ARGUMENTS}:968",
    f"{ARGUMENTS}:972",
    "core/parallel_state.py:829",
)
def interleaving_needs_ranks(c: Command) -> Problem | None:
    """The interleaved schedule needs more than one pipeline rank; more than two without overlap."""
    if c.vpp is None:
        return None
    least = 2 if c.values.overlap_p2p_comm else 3
    if c.pp >= least:
        return None
    why = "" if c.values.overlap_p2p_comm else " with --no-overlap-p2p-communication"
    return Problem(
        f"{c.vpp} virtual stages (interleaved schedule){why} need PP {least} or more, and PP is "
        f"{c.pp}",
        f"--pipeline-model-parallel-size {least}, or drop the virtual stages",
    )


@rule("pipeline.uneven-or-accounting", f"{CONFIG}:1929")
def uneven_split_excludes_accounting(c: Command) -> Problem | None:
    """Layer counts of the ends exclude counting the embedding or the loss as a layer."""
    accounting = (
        c.values.account_for_embedding_in_pipeline_split
        or c.values.account_for_loss_in_pipeline_split
    )
    if not (c.uneven and accounting):
        return None
    return Problem(
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers exclude "
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split",
        "keep one of the two",
    )


@rule("layout.alone", f"{CONFIG}:1946")
def layout_excludes_other_splits(c: Command) -> Problem | None:
    """A layout is the only thing that says where layers go."""
    if c.values.pipeline_model_parallel_layout is None:
        return None
    others = [
        flag
        for flag, there in (
            ("--decoder-first-pipeline-num-layers", c.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", c.decoder_last_pipeline_num_layers),
            (
                "--account-for-embedding-in-pipeline-split",
                c.values.account_for_embedding_in_pipeline_split or None,
            ),
            (
                "--account-for-loss-in-pipeline-split",
                c.values.account_for_loss_in_pipeline_split or None,
            ),
        )
        if there is not None
    ]
    if not others:
        return None
    return Problem(
        f"--pipeline-model-parallel-layout cannot be combined with {', '.join(others)}",
        f"drop {', '.join(others)}",
    )


@rule("layout.symbols", f"{LAYOUT}:315")
def layout_can_be_read(c: Command) -> Problem | None:
    """A layout has stages of E, t, m and L."""
    text = c.values.pipeline_model_parallel_layout
    if text is None:
        return None
    try:
        stages_of_text(text)
    except LayoutError as error:
        return _problem(error, c)
    return None


@rule("layout.stages", f"{ARGUMENTS}:911", f"{LAYOUT}:40")
def layout_stages_divide_over_pipeline_ranks(c: Command) -> Problem | None:
    """The stages of a layout are a multiple of the pipeline ranks."""
    stages = c.layout_stages
    if stages is None or len(stages) % c.pp == 0:
        return None
    return Problem(
        f"--pipeline-model-parallel-layout '{c.values.pipeline_model_parallel_layout}' has "
        f"{len(stages)} stages, which are not divisible by PP {c.pp}",
        f"write it for PP {c.pp}: {layout_advice(c)}, or --pipeline-model-parallel-size "
        f"{nearest(c.pp, divisors(len(stages)))}",
    )


@rule(
    "layout.content",
    f"{LAYOUT}:94",
    f"{LAYOUT}:97",
    f"{LAYOUT}:102",
    f"{LAYOUT}:105",
    f"{LAYOUT}:106",
    f"{LAYOUT}:111",
    f"{LAYOUT}:116",
    f"{LAYOUT}:122",
    f"{LAYOUT}:128",
    f"{LAYOUT}:132",
)
def layout_has_the_models_layers(c: Command) -> Problem | None:
    """A layout has one E, one L and the model's decoder and MTP layers in order."""
    stages = c.layout_stages
    if stages is None or len(stages) % c.pp or (c.pp == 1 and len(stages) > 1):
        return None
    try:
        pipeline_layout(
            c.layers,
            c.pp,
            mtp_layers=c.mtp or 0,
            text=c.values.pipeline_model_parallel_layout,
        )
    except LayoutError as error:
        return _problem(error, c)
    return None


@rule(
    "pipeline.uneven",
    f"{CONFIG}:1998",
    f"{CONFIG}:2006",
    f"{CONFIG}:2017",
    f"{CONFIG}:2025",
    f"{CONFIG}:2036",
    f"{CONFIG}:2044",
    f"{CONFIG}:2058",
)
def uneven_split_comes_out(c: Command) -> Problem | None:
    """The first, middle and last pipeline ranks share all layers out."""
    if not c.uneven or c.values.pipeline_model_parallel_layout is not None:
        return None
    fault = _uneven_fault(c)
    if fault is None:
        return None
    if c.pp == 1:
        fix = "drop --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    else:
        fix = _uneven_advice(c, c.vpp or 1)
    return Problem(fault, fix)


def _uneven_fault(c: Command) -> str | None:
    layers, ranks, vpp = c.layers, c.pp, c.vpp
    for where in ("first", "last"):
        count = getattr(c, f"decoder_{where}_pipeline_num_layers")
        if count is None:
            continue
        flag = f"--decoder-{where}-pipeline-num-layers {count}"
        if count <= 0:
            return f"{flag}: a pipeline rank has at least 1 layer"
        if vpp and count % vpp:
            return f"{flag} is not divisible by the {vpp} virtual stages of a rank"
        layers -= count
        ranks -= 1
    given = " and ".join(
        f"--decoder-{where}-pipeline-num-layers {count}"
        for where in ("first", "last")
        if (count := getattr(c, f"decoder_{where}_pipeline_num_layers")) is not None
    )
    left = f"{given} leave {layers} of {c.layers} layers for {ranks} other pipeline ranks"
    if bool(layers) != bool(ranks):
        return left
    if ranks and layers % ranks:
        return f"{left}, which do not divide"
    if ranks and vpp and layers // ranks % vpp:
        return (
            f"{left}, {layers // ranks} each, not divisible by the {vpp} virtual stages of a rank"
        )
    return None


@rule("pipeline.accounting-virtual", f"{CONFIG}:2103")
def counted_layers_divide_over_virtual_stages(c: Command) -> Problem | None:
    """With the embedding or the loss counted, virtual stages divide a rank's share."""
    accounting = (
        c.values.account_for_embedding_in_pipeline_split
        or c.values.account_for_loss_in_pipeline_split
    )
    if not accounting or c.uneven or c.values.pipeline_model_parallel_layout is not None:
        return None
    if c.vpp is None or c.split_layers % c.pp or c.split_layers // c.pp % c.vpp == 0:
        return None
    share = c.split_layers // c.pp
    return Problem(
        f"{_counted_layers(c)} over PP {c.pp} are {share} a rank, not divisible by {c.vpp} virtual "
        "stages",
        f"--num-virtual-stages-per-pipeline-rank {nearest(c.vpp, divisors(share))}",
    )


@rule(
    "pipeline.build",
    "core/transformer/transformer_block.py:150",
    "core/transformer/transformer_block.py:169",
    late=True,
)
def every_stage_can_be_built(c: Command) -> Problem | None:
    """What start-up lets through and the building of the model does not."""
    if c.hybrid_pattern is not None or c.values.pipeline_model_parallel_layout is not None:
        return None
    if any(judge(c) for judge in _SPLIT_RULES):
        return None
    try:
        pipeline_layout(
            c.layers,
            c.pp,
            c.vpp or 1,
            first=c.decoder_first_pipeline_num_layers,
            last=c.decoder_last_pipeline_num_layers,
            account_for_embedding=c.values.account_for_embedding_in_pipeline_split,
            account_for_loss=c.values.account_for_loss_in_pipeline_split,
            mtp_layers=c.mtp or 0,
        )
    except LayoutError as error:
        return _problem(error, c)
    return None


@rule("pipeline.faults", source="NVIDIA/Megatron-LM#1304, #1852", late=True)
def every_layer_is_built_and_no_stage_is_empty(c: Command) -> Problem | None:
    """What Megatron builds although it cannot train, or trains another model."""
    if c.hybrid_pattern is not None or any(judge(c) for judge in _LAYOUT_RULES):
        return None
    if every_stage_can_be_built(c):
        return None
    layout = layout_of(c)
    faults = pipeline_faults(layout, c.layers) if layout else []
    if not faults:
        return None
    return Problem("; ".join(faults), layout_advice(c, c.vpp or 1) or "use fewer stages")


def layout_of(c: Command) -> PipelineLayout | None:
    """What every stage holds; None where the command does not say so legally."""
    try:
        return pipeline_layout(
            c.layers,
            c.pp,
            c.vpp or 1,
            first=c.decoder_first_pipeline_num_layers,
            last=c.decoder_last_pipeline_num_layers,
            account_for_embedding=c.values.account_for_embedding_in_pipeline_split,
            account_for_loss=c.values.account_for_loss_in_pipeline_split,
            mtp_layers=c.mtp or 0,
            text=c.values.pipeline_model_parallel_layout,
        )
    except LayoutError:
        return None


_SPLIT_RULES = (
    layers_divide_over_pipeline_ranks,
    virtual_stages_are_given_one_way,
    uneven_stages_count_virtual_ones_per_rank,
    virtual_stages_divide_a_ranks_layers,
    interleaving_needs_ranks,
    uneven_split_excludes_accounting,
    uneven_split_comes_out,
    counted_layers_divide_over_virtual_stages,
)


_LAYOUT_RULES = (
    *_SPLIT_RULES,
    layout_excludes_other_splits,
    layout_can_be_read,
    layout_stages_divide_over_pipeline_ranks,
    layout_has_the_models_layers,
)


def _problem(error: LayoutError, c: Command) -> Problem:
    """A layout error, whose last clause is the advice."""
    message, _, fix = str(error).rpartition("; ")
    return Problem(message or str(error), fix if message else layout_advice(c, c.vpp or 1))
