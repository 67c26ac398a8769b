"""Traffic: how many bytes a rank sends per training step inside each kind of group.

First-order volumes, good enough to tell placements apart: balanced routing, the same layers on
every stage, no recomputation. The mean over ranks is given; patterns say who the bytes go to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from piper_megatron.errors import LayoutError
from piper_megatron.layout.grid import ParallelLayout


class Pattern(Enum):
    """Who talks to whom inside a group.

    ALL_TO_ALL: every member sends equally to every other one.
    CHAIN: members exchange with their neighbours in group order.
    RING: as CHAIN, and the last member with the first.
    COLLECTIVE: a ring in which members on one node stand side by side, as NCCL and RCCL build it.
    """

    ALL_TO_ALL = "all-to-all"
    CHAIN = "chain"
    RING = "ring"
    COLLECTIVE = "collective ring"


@dataclass(frozen=True)
class Flow:
    """Bytes that a rank sends per step in one kind of group (mean over ranks), and to whom."""

    bytes_per_rank: float
    pattern: Pattern


@dataclass(frozen=True)
class Traffic:
    """Flows of a training step: kind of group -> flow; and whose sizes they come from."""

    flows: dict[str, Flow]
    model: str


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model and its batch.

    Attributes:
        name: what reports call it.
        layers: transformer layers, of which `moe_layers` have experts.
        hidden, ffn, moe_ffn, shared_ffn: widths of the model, a dense MLP, one routed expert, and
            all shared experts of a layer (0 for none).
        heads, kv_heads, head_dim: of the attention; latent attention counts as `kv_heads = heads`.
        experts, topk: routed experts of a layer, and how many a token visits.
        vocab: rows of the embedding.
        mlp_matrices: weight matrices of an MLP; 3 when gated, 2 otherwise.
        seq, micro_batch: tokens of a sequence, sequences of a micro-batch.
        micro_batches: per step and data-parallel replica.
        virtual_stages: model chunks of a pipeline stage (VPP).
        bytes_per_element: of activations.
        gradient_bytes: of a reduced gradient.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    micro_batch: int
    micro_batches: int
    moe_layers: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    experts: int = 0
    topk: int = 0
    mlp_matrices: int = 3
    virtual_stages: int = 1
    bytes_per_element: int = 2
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        if self.moe_layers > self.layers:
            raise LayoutError(f"{self.name}: {self.moe_layers} MoE layers of {self.layers} layers")


# config.json of Qwen/Qwen3-235B-A22B on Hugging Face: every layer has experts, plain GQA
DEFAULT_MODEL = ModelSizes(
    name="Qwen3-235B-A22B, 16 micro-batches of one 4096-token sequence",
    layers=94,
    hidden=4096,
    ffn=12288,
    heads=64,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    seq=4096,
    micro_batch=1,
    micro_batches=16,
    moe_layers=94,
    moe_ffn=1536,
    experts=128,
    topk=8,
)


def traffic_of(layout: ParallelLayout, model: ModelSizes = DEFAULT_MODEL) -> Traffic:
    """Flows of one training step for every kind of group that has more than one member."""
    pipeline = Pattern.RING if model.virtual_stages > 1 else Pattern.CHAIN
    sources: dict[str, tuple[Callable[[ParallelLayout, ModelSizes], float], Pattern]] = {
        "tp": (_tensor, Pattern.COLLECTIVE),
        "cp": (_context, Pattern.RING),
        "ep": (_expert, Pattern.ALL_TO_ALL),
        "etp": (_expert_tensor, Pattern.COLLECTIVE),
        "pp": (_pipeline, pipeline),
        "dp": (_dense_gradients, Pattern.COLLECTIVE),
        "edp": (_expert_gradients, Pattern.COLLECTIVE),
    }
    flows = {
        kind: Flow(volume(layout, model), pattern)
        for kind, (volume, pattern) in sources.items()
        if layout.group_size(kind) > 1
    }
    return Traffic({kind: f for kind, f in flows.items() if f.bytes_per_rank > 0}, model.name)


def _layer_passes(layout: ParallelLayout, model: ModelSizes, layers: int) -> float:
    """Layers that a rank runs through per step, each forward and backward once."""
    return layers / layout.pp * model.micro_batches


def _activation_bytes(layout: ParallelLayout, model: ModelSizes) -> float:
    """One [tokens, hidden] tensor of a micro-batch, as a tensor-parallel group holds it."""
    tokens = model.seq * model.micro_batch / layout.cp
    return tokens * model.hidden * model.bytes_per_element


def _tensor(layout: ParallelLayout, model: ModelSizes) -> float:
    """Two all-reduces around attention and two around an MLP, forward and backward together.

    arXiv:2104.04473, section 3.2: 8 b s h (t - 1) / t elements per dense layer. Sequence
    parallelism splits each into a reduce-scatter and an all-gather of the same total
    (arXiv:2205.05198, section 4.2.2). Routed experts take part in their own groups instead.
    """
    mlps = model.layers - model.moe_layers + (model.moe_layers if model.shared_ffn else 0)
    all_reduces = 2 * _layer_passes(layout, model, model.layers + mlps)
    ring = 2 * (layout.tp - 1) / layout.tp
    return all_reduces * ring * _activation_bytes(layout, model)


def _context(layout: ParallelLayout, model: ModelSizes) -> float:
    """Ring attention: keys and values go round once forward; they and their gradients backward.

    Transformer Engine's `cp_comm_type` p2p, Megatron's default (arXiv:2310.01889, section 3).
    """
    heads = max(model.kv_heads / layout.tp, 1)
    tokens = model.seq * model.micro_batch / layout.cp
    keys_values = 2 * tokens * heads * model.head_dim * model.bytes_per_element
    return _layer_passes(layout, model, model.layers) * 3 * (layout.cp - 1) * keys_values


def _routed_bytes(layout: ParallelLayout, model: ModelSizes) -> float:
    """Copies of a rank's own tokens for their experts; tensor-parallel ranks own 1 / TP each."""
    return _activation_bytes(layout, model) / layout.tp * model.topk


def _expert(layout: ParallelLayout, model: ModelSizes) -> float:
    """Four all-to-alls per MoE layer: dispatch and combine, forward and backward.

    megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher; the share
    1 / EP stays on the rank.
    """
    away = (layout.ep - 1) / layout.ep
    passes = _layer_passes(layout, model, model.moe_layers)
    return 4 * passes * away * _routed_bytes(layout, model)


def _expert_tensor(layout: ParallelLayout, model: ModelSizes) -> float:
    """All-gather after dispatch and reduce-scatter before combine, and the same backward.

    Same file as `_expert`, `dispatch_postprocess` and `combine_preprocess`. Under balanced routing
    a rank receives as many copies as it sends out, and passes ETP - 1 such shares on.
    """
    passes = _layer_passes(layout, model, model.moe_layers)
    return 4 * passes * (layout.etp - 1) * _routed_bytes(layout, model)


def _pipeline(layout: ParallelLayout, model: ModelSizes) -> float:
    """Activations forward and their gradients backward over every boundary between chunks.

    megatron/core/pipeline_parallel/p2p_communication.py; tensor-parallel ranks send 1 / TP each
    (sequence parallelism, or scatter-gather as in arXiv:2104.04473, section 4.1).
    """
    boundaries = layout.pp * model.virtual_stages - 1
    per_boundary = 2 * _activation_bytes(layout, model) / layout.tp
    return model.micro_batches * boundaries / layout.pp * per_boundary


def _dense_gradients(layout: ParallelLayout, model: ModelSizes) -> float:
    """Ring all-reduce of all gradients but the routed experts', once per step.

    megatron/core/distributed/param_and_grad_buffer.py; the distributed optimizer's reduce-scatter
    of gradients and all-gather of parameters move no more. Embedding and output layer are averaged
    over the stages.
    """
    h = model.hidden
    attention = 2 * h * model.head_dim * (model.heads + model.kv_heads)
    mlp = model.mlp_matrices * h * model.ffn
    moe = h * model.experts + model.mlp_matrices * h * model.shared_ffn
    dense_layers = model.layers - model.moe_layers
    parameters = (
        model.layers * attention + dense_layers * mlp + model.moe_layers * moe + 2 * model.vocab * h
    )
    return _all_reduce(
        parameters / (layout.pp * layout.tp) * model.gradient_bytes, layout.group_size("dp")
    )


def _expert_gradients(layout: ParallelLayout, model: ModelSizes) -> float:
    """Ring all-reduce of the gradients of a rank's own experts, once per step."""
    expert = model.mlp_matrices * model.hidden * model.moe_ffn
    parameters = model.moe_layers * model.experts * expert / (layout.pp * layout.ep * layout.etp)
    return _all_reduce(parameters * model.gradient_bytes, layout.edp)


def _all_reduce(tensor_bytes: float, members: int) -> float:
    """Bytes that each member of a ring sends: 2 (n - 1) / n of the tensor.

    doi:10.1016/j.jpdc.2008.09.002
    """
    return 2 * (members - 1) / members * tensor_bytes
