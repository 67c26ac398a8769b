"""The pipeline layout: what every virtual stage of every pipeline rank holds."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from piper_megatron.errors import LayoutError
from piper_megatron.workload.layout_text import LAYOUT_FLAG as _LAYOUT
from piper_megatron.workload.layout_text import stages_of_text

_PIPELINE = "--pipeline-model-parallel-size"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One virtual stage (model chunk) of a pipeline rank.

    Attributes:
        layers: decoder layers, numbered from 0 over the whole model.
        embedding: holds the input embedding.
        mtp_layers: multi-token-prediction layers that it holds.
        loss: holds the output layer and the loss.
    """

    layers: tuple[int, ...]
    embedding: bool = False
    mtp_layers: int = 0
    loss: bool = False

    @property
    def empty(self) -> bool:
        """Whether it holds nothing at all."""
        return not (self.layers or self.embedding or self.mtp_layers or self.loss)


@dataclass(frozen=True)
class PipelineLayout:
    """Chunks of every pipeline rank.

    Attributes:
        stages: [PP][VPP] chunks; chunk v of rank p is the (v * PP + p)-th of the model.
    """

    stages: tuple[tuple[Chunk, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """Chunks of a pipeline rank."""
        return len(self.stages[0])


def pipeline_layout(
    layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    mtp_layers: int = 0,
    text: str | None = None,
) -> PipelineLayout:
    """What Megatron builds on every virtual stage.

    Rules of Megatron-Core 0.19.2: `transformer_config.py` (1925-2106) and `transformer_block.py:
    get_num_layers_to_build` for the split, `transformer_layer.py:get_transformer_layer_offset` for
    the numbers of the layers, `pipeline_parallel_layer_layout.py` for the text.

    Args:
        layers: decoder layers of the model.
        pp: pipeline ranks.
        vpp: chunks of each; where it is 1, a text decides.
        first: decoder layers on the first rank.
        last: decoder layers on the last rank.
        account_for_embedding: the embedding counts as a layer when layers are shared out.
        account_for_loss: so does the loss.
        mtp_layers: multi-token-prediction layers; without a text all are on the last stage.
        text: value of `--pipeline-model-parallel-layout`.

    Raises:
        LayoutError: what Megatron refuses, or cannot build although it accepts it. What it builds
            although that cannot train is for `pipeline_faults`.
    """
    for flag, size in (("--num-layers", layers), (_PIPELINE, pp), (_VIRTUAL, vpp)):
        if size < 1:
            raise LayoutError(f"{flag} must be at least 1, got {size}")
    uneven = first is not None or last is not None
    accounting = account_for_embedding or account_for_loss
    if uneven and accounting:
        raise LayoutError(
            f"{_FIRST} and {_LAST} exclude --account-for-embedding-in-pipeline-split and "
            f"--account-for-loss-in-pipeline-split; keep one of the two"
        )
    if text is not None:
        if uneven or accounting:
            raise LayoutError(
                f"{_LAYOUT} excludes {_FIRST}, {_LAST}, --account-for-embedding-in-pipeline-split "
                f"and --account-for-loss-in-pipeline-split; keep the layout alone"
            )
        return _layout_of_text(text, layers, pp, vpp, mtp_layers)
    if pp == 1 and vpp > 1:
        raise LayoutError(f"virtual pipeline stages need {_PIPELINE} above 1, got VPP {vpp}")
    if uneven:
        starts, counts = _uneven_split(layers, pp, vpp, first, last)
    else:
        starts, counts = _even_split(layers, pp, vpp, account_for_embedding, account_for_loss)
    return PipelineLayout(
        tuple(
            tuple(
                Chunk(
                    layers=tuple(range(starts[v][p], starts[v][p] + counts[v][p])),
                    embedding=(v, p) == (0, 0),
                    mtp_layers=mtp_layers if (v, p) == (vpp - 1, pp - 1) else 0,
                    loss=(v, p) == (vpp - 1, pp - 1),
                )
                for v in range(vpp)
            )
            for p in range(pp)
        )
    )


# first layers and numbers of layers, [VPP][PP]
_Split = tuple[list[list[int]], list[list[int]]]


def _even_split(layers: int, pp: int, vpp: int, embedding: bool, loss: bool) -> _Split:
    slots = layers + embedding + loss
    counted = f"{layers} layers" + "".join(
        f" + 1 for the {name}"
        for name, counts in (("embedding", embedding), ("loss", loss))
        if counts
    )
    if slots % pp:
        raise LayoutError(
            f"{counted} cannot be shared out evenly over PP {pp}; legal PP: "
            f"{_divisors_near(slots, pp)}; {_balanced_advice(layers, pp, vpp)}"
        )
    if slots // pp % vpp:
        raise LayoutError(
            f"{counted} over PP {pp} are {slots // pp} on a rank, which VPP {vpp} does not divide; "
            f"legal VPP: {_divisors_near(slots // pp, vpp)}; {_balanced_advice(layers, pp, vpp)}"
        )
    counts = [[slots // (pp * vpp)] * pp for _ in range(vpp)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return _running_starts(counts), counts


def _running_starts(counts: list[list[int]]) -> list[list[int]]:
    ends = list(itertools.accumulate(itertools.chain.from_iterable(counts), initial=0))
    pp = len(counts[0])
    return [ends[row * pp : (row + 1) * pp] for row in range(len(counts))]


def _uneven_split(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> _Split:
    """The arithmetic of Megatron, which lets through counts that lose or repeat layers."""
    middle_layers, middle_ranks = layers, pp
    for flag, ends in ((_FIRST, first), (_LAST, last)):
        if ends is None:
            continue
        if ends < 1:
            raise LayoutError(f"{flag} must be at least 1, got {ends}")
        if ends % vpp:
            raise LayoutError(
                f"{flag} {ends} is not a multiple of VPP {vpp}; nearest are "
                f"{_multiples_near(ends, vpp)}"
            )
        middle_layers -= ends
        middle_ranks -= 1
    left = f"{_ends(first, last)} leave {middle_layers} of {layers} layers"
    if bool(middle_layers) != bool(middle_ranks):
        raise LayoutError(
            f"{left} for {middle_ranks} middle ranks of PP {pp}; "
            f"{_balanced_advice(layers, pp, vpp)}"
        )
    if middle_ranks and middle_layers % middle_ranks:
        raise LayoutError(
            f"{left}, which {middle_ranks} middle ranks of PP {pp} cannot share out evenly; leave "
            f"{_multiples_near(middle_layers, middle_ranks * vpp)}, or "
            f"{_balanced_advice(layers, pp, vpp)}"
        )
    each = middle_layers // middle_ranks if middle_ranks else 0
    if each % vpp:
        raise LayoutError(
            f"{left}, {each} on each middle rank, which VPP {vpp} does not divide; leave "
            f"{_multiples_near(middle_layers, middle_ranks * vpp)}, or "
            f"{_balanced_advice(layers, pp, vpp)}"
        )
    if vpp > 1 and not middle_ranks:
        # megatron/core/transformer/transformer_layer.py:157 (0.19.2) divides by the middle ranks
        raise LayoutError(
            f"{_FIRST} with {_LAST} on PP {pp} and VPP {vpp} stops Megatron with a division by "
            f"zero when it builds the model; {_balanced_advice(layers, pp, vpp)}"
        )
    per_rank = [each] * pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    counts = [[count // vpp for count in per_rank] for _ in range(vpp)]
    before = [0] + [
        (first or 0) // vpp + (rank - (first is not None)) * (each // vpp) for rank in range(1, pp)
    ]
    chunk_row = ((first or 0) + (last or 0) + middle_layers) // vpp
    return [[row * chunk_row + start for start in before] for row in range(vpp)], counts


def _ends(first: int | None, last: int | None) -> str:
    return " and ".join(
        f"{flag} {count}" for flag, count in ((_FIRST, first), (_LAST, last)) if count is not None
    )


def _layout_of_text(text: str, layers: int, pp: int, vpp: int, mtp_layers: int) -> PipelineLayout:
    stages = stages_of_text(text)
    advice = _balanced_advice(layers, pp, vpp, mtp_layers)
    if len(stages) % pp:
        raise LayoutError(
            f"{_LAYOUT} '{text}' has {len(stages)} stages, not a multiple of PP {pp}; {advice}"
        )
    rows = len(stages) // pp
    if vpp not in (1, rows):
        raise LayoutError(
            f"{_LAYOUT} '{text}' has {len(stages)} stages, so VPP {rows} on PP {pp}, but VPP {vpp} "
            f"is asked for; leave {_VIRTUAL} out"
        )
    if rows > 1 and pp == 1:
        raise LayoutError(f"{_LAYOUT} '{text}' has {rows} stages, but PP is 1; remove every '|'")
    problem = _text_problem(stages, layers, pp, mtp_layers)
    if problem:
        raise LayoutError(f"{_LAYOUT} '{text}' {problem}; {advice}")
    starts = list(itertools.accumulate((stage.count("t") for stage in stages), initial=0))
    chunks = [
        Chunk(
            layers=tuple(range(start, start + stage.count("t"))),
            embedding="E" in stage,
            mtp_layers=stage.count("m"),
            loss="L" in stage,
        )
        for start, stage in zip(starts, stages, strict=False)
    ]
    return PipelineLayout(tuple(tuple(chunks[rank::pp]) for rank in range(pp)))


def _text_problem(stages: list[str], layers: int, pp: int, mtp_layers: int) -> str | None:
    """What `validate_layer_layout` refuses."""
    flat = "".join(stages)
    if not flat.startswith("E") or flat.count("E") != 1:
        return "must begin with its only E"
    if not flat.endswith("L") or flat.count("L") != 1:
        return "must end with its only L"
    if flat.count("t") != layers:
        return f"has {flat.count('t')} decoder layers, the model has {layers}"
    if flat.count("m") != mtp_layers:
        return f"has {flat.count('m')} MTP layers, the model has {mtp_layers}"
    if mtp_layers and "t" in flat[flat.index("m") :]:
        return "has a decoder layer behind an MTP layer"
    with_mtp = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(with_mtp) > 1:
        return "spreads the MTP layers over several stages"
    if with_mtp and with_mtp[0] < len(stages) - pp:
        return "has MTP layers on a rank's chunk that is not its last"
    return None


def pipeline_faults(pipeline: PipelineLayout, layers: int) -> list[str]:
    """What Megatron-Core 0.19.2 accepts although training with it fails or trains another model.

    Args:
        pipeline: as `pipeline_layout` returns it.
        layers: decoder layers that the model should have.
    """
    chunks = [chunk for stage in pipeline.stages for chunk in stage]
    faults = []
    built = sum(len(chunk.layers) for chunk in chunks)
    if {n for chunk in chunks for n in chunk.layers} != set(range(layers)) or built != layers:
        faults.append(f"the stages hold {built} decoder layers, the model has {layers}")
    empty = [
        f"chunk {v} of rank {p}"
        for p, stage in enumerate(pipeline.stages)
        for v, chunk in enumerate(stage)
        if chunk.empty
    ]
    if empty:
        faults.append(f"a stage without layers deadlocks: {', '.join(empty)}")
    if pipeline.pp > 1 and pipeline.stages[0][-1].mtp_layers:
        faults.append("MTP layers are on the first pipeline rank, which Megatron does not support")
    return faults


@functools.cache
def balanced_layout_string(layers: int, pp: int, vpp: int = 1, mtp_layers: int = 0) -> str:
    """A text for `--pipeline-model-parallel-layout` whose stages differ by one layer at most.

    The loss and each MTP layer count as a decoder layer. Where layers are left over, the stages
    with the embedding and the loss get the fewer.

    Raises:
        LayoutError: there are more stages than layers to fill them.
    """
    stages = pp * vpp
    if layers < stages - 2:
        raise LayoutError(
            f"{layers} layers cannot fill {stages} stages; at most {layers + 2} can hold a layer, "
            "the embedding or the loss"
        )
    counts = [int(0 < chunk < stages - 1) for chunk in range(stages)]
    loads = list(counts)
    loads[-1] = 1 + mtp_layers
    for _ in range(layers - sum(counts)):
        chunk = min(
            range(stages),
            key=lambda c: (loads[c], sum(loads[c % pp :: pp]), c == 0, c == stages - 1, -c),
        )
        loads[chunk] += 1
        counts[chunk] += 1
    return layout_string(counts, mtp_layers)


def layout_string(counts: Sequence[int], mtp_layers: int = 0) -> str:
    """A text for `--pipeline-model-parallel-layout` with so many decoder layers in each chunk."""
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp_layers + "L"
    return layout_text(stages)


def layout_text(stages: Sequence[str]) -> str:
    """Stages, each its pieces as letters, as a text for `--pipeline-model-parallel-layout`.

    More than two layers are written as `t*n`, runs of equal stages as `(...|)*n`.
    """
    texts = [re.sub("t{3,}", lambda run: f"t*{len(run[0])}", stage) for stage in stages]
    *fronts, end = texts
    runs = ((text, len(list(run))) for text, run in itertools.groupby(fronts))
    return "".join(f"({text}|)*{n}" if n > 1 else f"{text}|" for text, n in runs) + end


def _balanced_advice(layers: int, pp: int, vpp: int, mtp_layers: int = 0) -> str:
    """The end of an error message: a layout that is legal, or the sizes that make one possible."""
    if pp == 1 and vpp == 1:
        return f"PP 1 needs no {_LAYOUT}"
    try:
        return f"try {_LAYOUT} '{balanced_layout_string(layers, pp, vpp, mtp_layers)}'"
    except LayoutError:
        return f"{layers} layers fill at most {layers + 2} stages (PP x VPP)"


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    nearest = sorted(divisors, key=lambda d: abs(d - wanted))[:4]
    return ", ".join(map(str, sorted(nearest)))


def _multiples_near(number: int, factor: int) -> str:
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)
