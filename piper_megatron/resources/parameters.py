"""The parameters that Megatron builds, on every rank, in the order in which it registers them.

Local and Transformer Engine layers hold the same numbers, with one exception: under tensor
parallelism Transformer Engine repeats MLA's two down-projections on every rank, where Megatron's
own layers split them. They differ in order (norms are fused into the linear layer behind them),
which moves the padding of the distributed optimizer's buffers.

Sources, megatron/core of 0.19.2: models/gpt/{gpt_model,gpt_layer_specs}.py,
transformer/{attention,multi_latent_attention,mlp,multi_token_prediction}.py,
transformer/moe/{router,experts,shared_experts,moe_layer}.py.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import Chunk
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# `linear`: weight of a linear layer, which Transformer Engine can keep in 8 bits; `matrix`: any
# other with two dimensions; `embedding`: of words, and the output layer
Kind = Literal["linear", "matrix", "vector", "embedding"]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter, or several alike, on one rank.

    Attributes:
        name: as Megatron names it in its module.
        elements: of each copy.
        kind: what optimizers and 8-bit formats tell apart.
        expert: belongs to a routed expert, so is shared out by EP and ETP instead of TP.
        copies: one for each local expert, else 1.
        block: tensors with the same block are registered together, copy by copy.
        shared: a copy of the embedding that pipeline stages keep alike; has its own bucket.
        layer: the decoder layer it belongs to, numbered from 0 over the model; None elsewhere.
    """

    name: str
    elements: Number
    kind: Kind = "vector"
    expert: bool = False
    copies: Number = 1
    block: str = ""
    shared: bool = False
    layer: int | None = None


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank.

    Attributes:
        dense, expert: all others, and those of routed experts.
        tensors: in which they are.
    """

    dense: Number
    expert: Number
    tensors: Number = 0

    @property
    def total(self) -> Number:
        """Both together."""
        return self.dense + self.expert

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(
            self.dense + other.dense, self.expert + other.expert, self.tensors + other.tensors
        )


def layer_tensors(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, *, moe: bool
) -> list[Tensor]:
    """Parameters of one transformer layer."""
    te = training.transformer_impl != "local"
    if model.attention.latent:
        attention = _latent_attention(model, sizes, te)
    else:
        attention = _attention(model, sizes, te)
    if moe:
        mlp = _norm("pre_mlp_layernorm", model.hidden, model)
        mlp += _experts(model, sizes, grouped=te and training.moe_grouped_gemm)
    else:
        mlp = _mlp(model, sizes, te)
    return attention + mlp


def mtp_tensors(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, *, moe: bool
) -> list[Tensor]:
    """Parameters of one multi-token-prediction layer, without its copy of the embedding."""
    hidden = model.hidden
    return [
        *_norm("enorm", hidden, model),
        *_norm("hnorm", hidden, model),
        _weight("eh_proj", 2 * hidden * hidden // sizes.tp),
        *_prefixed("mtp_model_layer.", layer_tensors(model, training, sizes, moe=moe)),
        *_norm("final_layernorm", hidden, model),
    ]


def chunk_tensors(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, chunk: Chunk
) -> list[Tensor]:
    """Parameters of one virtual stage, each local expert apart, as Megatron registers them.

    Args:
        model: what is trained.
        training: decides which layers build it.
        sizes: of one layout.
        chunk: the virtual stage.
    """
    return _each_copy(_chunk_tensors(model, training, sizes, chunk))


def stage_tensors(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    *,
    dense_layers: Number,
    moe_layers: Number,
    embedding: Number,
    mtp: Number,
    loss: Number,
) -> list[Tensor]:
    """Parameters of a stage that is described by numbers, or of many stages at once.

    Args:
        model: what is trained.
        training: decides which layers build it.
        sizes: of one layout or of many.
        dense_layers: decoder layers without experts.
        moe_layers: decoder layers with experts.
        embedding: 1 where the stage holds the input embedding, else 0.
        mtp: 1 where it holds the multi-token-prediction layers, which need an embedding too.
        loss: 1 where it holds the final norm and the output layer.
    """
    own_head = loss * (1 - embedding) if model.tied_embeddings else loss
    depths = 1 if model.mtp_repeated else model.mtp_layers
    parts = [
        (_embedding(model, sizes, shared=False), np.maximum(embedding, mtp)),
        (_norm("decoder.final_layernorm", model.hidden, model), loss),
        ([_vocabulary("output_layer", model, sizes)], own_head),
    ]
    if not all(model.moe_layers):
        parts.append((layer_tensors(model, training, sizes, moe=False), dense_layers))
    if model.experts is not None:
        parts.append((layer_tensors(model, training, sizes, moe=True), moe_layers))
    if model.mtp_layers:
        parts.append((mtp_tensors(model, training, sizes, moe=model.mtp_moe), mtp * depths))
    return [
        replace(tensor, copies=tensor.copies * times)
        for tensors, times in parts
        for tensor in tensors
    ]


def parameter_counts(job: Job) -> list[list[ParameterCount]]:
    """Parameters on one rank of every stage, [PP][VPP]; all ranks of a stage hold as many."""
    known: dict[object, ParameterCount] = {}

    def counted(chunk: Chunk) -> ParameterCount:
        kinds = tuple(job.model.moe_layers[layer] for layer in chunk.layers)
        alike = replace(chunk, layers=()), kinds, job.model.layers - 1 in chunk.layers
        if alike not in known:
            tensors = _chunk_tensors(job.model, job.training, job.sizes, chunk)
            known[alike] = count(tensors, sizes=job.sizes)
        return known[alike]

    return [[counted(chunk) for chunk in stage] for stage in job.pipeline.stages]


def count(tensors: Iterable[Tensor], sizes: Sizes) -> ParameterCount:
    """Sums of elements and tensors; arrays where `sizes` has arrays."""
    dense = expert = many = 0 * sizes.tp
    for tensor in tensors:
        many = many + tensor.copies
        if tensor.expert:
            expert = expert + tensor.elements * tensor.copies
        else:
            dense = dense + tensor.elements * tensor.copies
    return ParameterCount(dense, expert, many)


def router_bytes(model: ModelSpec, training: TrainingSpec) -> int:
    """Bytes of a MoE layer's state that is no parameter: counters and the bias of its router.

    megatron/core/transformer/moe/router.py:TopKRouter (0.19.2). The bias stays fp32, counters take
    the training precision with all else.
    """
    assert model.experts is not None
    experts = model.experts.count
    counts_globally = any(
        kind == "global_aux_loss" and coefficient > 0
        for kind, coefficient in zip(
            training.moe_router_load_balancing_type, training.moe_aux_loss_coeff, strict=False
        )
    )
    bias = 4 * experts if model.experts.expert_bias else 0
    counters = experts * model.experts.expert_bias + (experts + 1) * counts_globally
    return bias + counters * training.element_bytes


def separate_experts(sizes: Sizes) -> Number:
    """Whether routed experts are reduced over their own data-parallel group (and so have buffers).

    megatron/core/tensor_parallel/layers.py:961 (0.19.2). Where not, EDP equals DP x CP.
    """
    return (sizes.ep > 1) | (sizes.etp != sizes.tp)


def total_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model as model cards count them.

    The vocabulary is not padded, a tied embedding counts once, and multi-token-prediction layers
    are left out.
    """
    return int(_whole_model(model).total)


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token uses: all but the routed experts that it does not visit.

    Counted like `total_parameters`; the embedding counts in full.
    """
    whole = _whole_model(model)
    if model.experts is None:
        return int(whole.dense)
    return int(whole.dense + whole.expert * model.experts.topk // model.experts.count)


_ALONE = Sizes(world=1, tp=1, cp=1, pp=1, ep=1, etp=1, vpp=1, micro_batch=1, global_batch=1, seq=1)


def _whole_model(model: ModelSpec) -> ParameterCount:
    card = model.model_copy(update={"vocab_divisor": 1, "mtp_layers": 0})
    chunk = Chunk(layers=tuple(range(model.layers)), embedding=True, loss=True)
    return count(_chunk_tensors(card, TrainingSpec(), _ALONE, chunk), _ALONE)


def _chunk_tensors(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, chunk: Chunk
) -> list[Tensor]:
    tensors = []
    copied = (model.tied_embeddings or model.mtp_layers > 0) and int(sizes.pp) > 1
    if chunk.embedding or chunk.mtp_layers:
        # megatron/core/models/common/language_module/language_module.py:
        # setup_embeddings_and_output_layer
        alone = chunk.embedding and chunk.loss
        tensors += _prefixed("embedding.", _embedding(model, sizes, shared=copied and not alone))
    layers = {
        moe: layer_tensors(model, training, sizes, moe=moe)
        for moe in {model.moe_layers[layer] for layer in chunk.layers}
    }
    for place, layer in enumerate(chunk.layers):
        prefix = f"decoder.layers.{place}."
        tensors += _prefixed(prefix, layers[model.moe_layers[layer]], layer=layer)
    if chunk.loss if not model.mtp_layers else model.layers - 1 in chunk.layers:
        tensors += _norm("decoder.final_layernorm", model.hidden, model)
    if chunk.mtp_layers:
        # a stage without decoder layers has none to copy (megatron/training/models/gpt.py:404)
        moe = model.mtp_moe if chunk.layers else model.experts is not None
        depth = mtp_tensors(model, training, sizes, moe=moe)
        for place in range(1 if model.mtp_repeated else chunk.mtp_layers):
            tensors += _prefixed(f"mtp.layers.{place}.", depth)
    if chunk.loss and not (model.tied_embeddings and chunk.embedding):
        head = _vocabulary("output_layer", model, sizes)
        shared = copied and model.tied_embeddings and not chunk.mtp_layers
        tensors.append(replace(head, shared=shared))
    return tensors


def _embedding(model: ModelSpec, sizes: Sizes, *, shared: bool) -> list[Tensor]:
    words = replace(_vocabulary("word_embeddings", model, sizes), shared=shared)
    if model.position != "learned":
        return [words]
    positions = Tensor(
        name="position_embeddings.weight",
        elements=model.max_positions * model.hidden,
        kind="matrix",
    )
    return [words, positions]


def _vocabulary(name: str, model: ModelSpec, sizes: Sizes) -> Tensor:
    multiple = model.vocab_divisor * sizes.tp
    padded = -(-model.vocab // multiple) * multiple
    return Tensor(
        name=f"{name}.weight", elements=padded // sizes.tp * model.hidden, kind="embedding"
    )


def _attention(model: ModelSpec, sizes: Sizes, te: bool) -> list[Tensor]:
    attention = model.attention
    query = attention.heads * attention.head_dim
    keys_and_values = 2 * attention.groups * attention.head_dim
    qkv = query * (2 if attention.output_gate else 1) + keys_and_values
    qk_norm = [
        tensor
        for name in ("self_attention.q_layernorm", "self_attention.k_layernorm")
        if attention.qk_norm
        for tensor in _norm(name, attention.head_dim, model)
    ]
    return [
        *([] if te else _norm("input_layernorm", model.hidden, model)),
        *_attention_output(model, sizes, query),
        *(_fused_norm("self_attention.linear_qkv", model.hidden, model) if te else []),
        *_linear(
            "self_attention.linear_qkv",
            model.hidden * qkv // sizes.tp,
            qkv // sizes.tp if model.linear_bias or attention.qkv_bias else 0,
        ),
        *qk_norm,
    ]


def _attention_output(model: ModelSpec, sizes: Sizes, width: int) -> list[Tensor]:
    sink = Tensor(
        name="self_attention.core_attention.softmax_offset",
        elements=model.attention.heads // sizes.tp,
    )
    return [
        *([sink] if model.attention.sink else []),
        *_linear(
            "self_attention.linear_proj",
            width * model.hidden // sizes.tp,
            model.hidden if model.linear_bias else 0,
        ),
    ]


def _latent_attention(model: ModelSpec, sizes: Sizes, te: bool) -> list[Tensor]:
    latent, heads, hidden = model.attention.latent, model.attention.heads, model.hidden
    assert latent is not None
    down_split = 1 if te else sizes.tp
    query = heads * (latent.qk_head_dim + latent.rope_head_dim)
    key_and_value = heads * (latent.qk_head_dim + latent.v_head_dim)
    ups, norms = [], []
    if latent.q_rank is None:
        ups.append(_weight("self_attention.linear_q_proj", hidden * query // sizes.tp))
    for name, rank, down, up in (
        ("q", latent.q_rank, latent.q_rank, query),
        ("kv", latent.kv_rank, latent.kv_rank + latent.rope_head_dim, key_and_value),
    ):
        if rank is None or down is None:
            continue
        ups.append(_weight(f"self_attention.linear_{name}_down_proj", hidden * down // down_split))
        if model.attention.qk_norm and te:
            ups += _fused_norm(f"self_attention.linear_{name}_up_proj", rank, model)
        elif model.attention.qk_norm:
            norms += _norm(f"self_attention.{name}_layernorm", rank, model)
        ups.append(_weight(f"self_attention.linear_{name}_up_proj", rank * up // sizes.tp))
    return [
        *_norm("input_layernorm", hidden, model),
        *_attention_output(model, sizes, heads * latent.v_head_dim),
        *ups,
        *norms,
    ]


def _mlp(model: ModelSpec, sizes: Sizes, te: bool) -> list[Tensor]:
    hidden, wide = model.hidden, model.ffn * (2 if model.gated else 1)
    norm = _fused_norm("mlp.linear_fc1", hidden, model) if te else []
    return [
        *([] if te else _norm("pre_mlp_layernorm", hidden, model)),
        *norm,
        *_linear(
            "mlp.linear_fc1",
            hidden * wide // sizes.tp,
            wide // sizes.tp if model.linear_bias else 0,
        ),
        *_linear(
            "mlp.linear_fc2",
            model.ffn * hidden // sizes.tp,
            hidden if model.linear_bias else 0,
        ),
    ]


def _experts(model: ModelSpec, sizes: Sizes, grouped: bool) -> list[Tensor]:
    experts, hidden = model.experts, model.hidden
    assert experts is not None
    router = Tensor(name="mlp.router.weight", elements=experts.count * hidden, kind="matrix")
    tensors = [router]
    if experts.router_bias:
        tensors.append(Tensor(name="mlp.router.bias", elements=experts.count))
    if experts.latent:
        for name, width in (("fc1", experts.latent), ("fc2", hidden)):
            tensors += _linear(
                f"mlp.{name}_latent_proj",
                hidden * experts.latent,
                width if model.linear_bias else 0,
            )
    width = experts.latent or hidden
    wide = experts.ffn * (2 if model.gated else 1)
    for name, elements, bias in (
        ("linear_fc1", width * wide // sizes.etp, wide // sizes.etp),
        ("linear_fc2", experts.ffn * width // sizes.etp, width),
    ):
        tensors += [
            replace(
                tensor,
                expert=True,
                copies=experts.count // sizes.ep,
                block=name if grouped else "experts",
            )
            for tensor in _linear(f"mlp.experts.{name}", elements, bias if model.linear_bias else 0)
        ]
    if experts.shared_ffn:
        tensors += _shared_experts(model, sizes)
    return tensors


def _shared_experts(model: ModelSpec, sizes: Sizes) -> list[Tensor]:
    experts, hidden = model.experts, model.hidden
    assert experts is not None
    wide = experts.shared_ffn * (2 if model.gated else 1)
    gate = Tensor(name="mlp.shared_experts.gate_weight", elements=hidden, kind="matrix")
    return [
        *([gate] if experts.shared_gate else []),
        _weight("mlp.shared_experts.linear_fc1", hidden * wide // sizes.tp),
        _weight("mlp.shared_experts.linear_fc2", experts.shared_ffn * hidden // sizes.tp),
    ]


def _norm(name: str, width: int, model: ModelSpec) -> list[Tensor]:
    tensors = [Tensor(name=f"{name}.weight", elements=width)]
    if model.norm == "LayerNorm":
        tensors.append(Tensor(name=f"{name}.bias", elements=width))
    return tensors


def _fused_norm(linear: str, width: int, model: ModelSpec) -> list[Tensor]:
    """The norm inside of the linear layer behind it (Transformer Engine's LayerNormLinear)."""
    return [
        replace(tensor, name=tensor.name.replace("norm.", "norm_"))
        for tensor in _norm(f"{linear}.layer_norm", width, model)
    ]


def _linear(name: str, elements: Number, bias: Number) -> list[Tensor]:
    """A linear layer's weight and, where `bias` is not 0, its bias of so many elements."""
    if isinstance(bias, int) and not bias:
        return [_weight(name, elements)]
    return [_weight(name, elements), Tensor(name=f"{name}.bias", elements=bias)]


def _weight(name: str, elements: Number) -> Tensor:
    return Tensor(name=f"{name}.weight", elements=elements, kind="linear")


def _prefixed(prefix: str, tensors: Iterable[Tensor], layer: int | None = None) -> list[Tensor]:
    return [
        replace(
            tensor,
            name=prefix + tensor.name,
            block=tensor.block and prefix + tensor.block,
            layer=layer,
        )
        for tensor in tensors
    ]


def _each_copy(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Local experts one by one: copy after copy of each block."""
    found: list[Tensor] = []
    for block, members in itertools.groupby(tensors, key=lambda tensor: tensor.block):
        alike = list(members)
        if not block:
            found += alike
            continue
        for place in range(int(alike[0].copies)):
            found += [replace(tensor, name=f"{tensor.name}.{place}", copies=1) for tensor in alike]
    return found
