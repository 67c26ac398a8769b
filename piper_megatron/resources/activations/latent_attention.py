"""Multi-latent attention around its core.

Transformer Engine's down-projections give every tensor-parallel rank the whole low-rank vectors of
its tokens; Megatron's own layers gather them for all tokens and keep a slice, which keeps all of
it. Rotary embeddings are fused with splitting and joining, or copy.

Sources, megatron/core of 0.19.2: transformer/multi_latent_attention.py (`MLASelfAttention`),
transformer/mla_qk_norm_config.py, fusions/fused_mla_yarn_rope_apply.py.
"""

from piper_megatron.resources.activations.attention import input_norm, output_projection
from piper_megatron.resources.activations.core_attention import Heads, core_attention, rotate
from piper_megatron.resources.activations.setup import Setup, linear, norm, norm_linear
from piper_megatron.resources.activations.tape import Tape, Tensor
from piper_megatron.workload.spec import LatentAttention


def latent_attention(tape: Tape, setup: Setup, hidden: Tensor) -> Tensor:
    """From the residual stream to what is added to it.

    Args:
        tape: to write on.
        setup: of the layer.
        hidden: the layer's input.
    """
    latent = _latent(setup)
    attention = setup.model.attention
    heads = Heads(
        queries=attention.heads / setup.sizes.tp,
        groups=attention.heads / setup.sizes.tp,
        key_width=latent.qk_head_dim + latent.rope_head_dim,
        value_width=latent.v_head_dim,
    )
    normed, norm_region = input_norm(tape, setup, hidden)
    with tape.offloaded(setup.offloads("qkv_linear")):
        low_query = _down(tape, setup, normed, latent.q_rank, "query") if latent.q_rank else normed
        low_pair, rotary = _pair_down(tape, setup, normed)
        if attention.qk_norm and not setup.te:
            low_pair = _normed(tape, setup, low_pair, latent.kv_rank)
            if latent.q_rank:
                low_query = _normed(tape, setup, low_query, latent.q_rank)
        with tape.recomputed(
            setup.recomputes("mla_up_proj"), "mla_up_proj", discards=True
        ) as up_region:
            query, key, value = _up(tape, setup, heads, low_query, low_pair, rotary)
    context = core_attention(tape, setup, heads, query, key, value)
    up_region.until = context
    out = output_projection(tape, setup, context, attention.heads * latent.v_head_dim)
    norm_region.until = out
    return out


def _normed(tape: Tape, setup: Setup, low: Tensor, width: int) -> Tensor:
    return norm(tape, setup, "qk_norm", low, rows=setup.shard, width=width)


def _latent(setup: Setup) -> LatentAttention:
    assert setup.model.attention.latent is not None
    return setup.model.attention.latent


def _down(tape: Tape, setup: Setup, normed: Tensor, width: int, name: str) -> Tensor:
    """A down-projection; with Megatron's own layers, its output is gathered and sliced."""
    hidden = setup.model.hidden
    te = setup.te
    split = 1 if te else setup.sizes.tp
    tokens = setup.shard if te else setup.tokens
    gathers = 0 if te else setup.if_split(setup.tokens * hidden * setup.element)
    out = tape.tensor(f"low-rank {name}", tokens * width * setup.element)
    linear(
        tape,
        setup,
        "mla_down_proj",
        normed,
        out,
        inputs=setup.shard * hidden,
        weight=hidden * width / split,
        gathers=gathers,
        keeps_original=setup.recomputes("layernorm") and setup.keeps_original_input,
    )
    if te or not setup.training.sequence_parallel:
        return out
    sliced = out.view(setup.shard * width * setup.element)
    tape.add("mla_down_proj", [out], [sliced])
    return sliced


def _pair_down(tape: Tape, setup: Setup, normed: Tensor) -> tuple[Tensor, Tensor]:
    """The common low-rank vector of keys and values, and the rotary part of the keys."""
    latent = _latent(setup)
    width = latent.kv_rank + latent.rope_head_dim
    out = _down(tape, setup, normed, width, "keys and values")
    pair = out.view(setup.shard * latent.kv_rank * setup.element)
    rotary = out.view(setup.tokens * latent.rope_head_dim * setup.element)
    if setup.te:
        gathered = tape.tensor("rotary keys", setup.if_split(rotary.gradient))
        tape.add("mla_down_proj", [out], [pair, gathered])
        return pair, gathered
    tape.add("mla_down_proj", [out], [pair, rotary])
    if setup.training.sequence_parallel:
        # scattering a slice of a strided tensor copies it
        scattered = tape.tensor("low-rank pair", pair.gradient)
        tape.add("mla_down_proj", [pair], [scattered])
        pair = scattered
    return pair, rotary


def _up(
    tape: Tape, setup: Setup, heads: Heads, low_query: Tensor, low_pair: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    latent = _latent(setup)
    per_head = setup.tokens * heads.queries * setup.element
    query = tape.tensor("query", per_head * heads.key_width)
    pair = tape.tensor("key and value", per_head * (latent.qk_head_dim + latent.v_head_dim))
    fused_norm = setup.te and setup.model.attention.qk_norm
    for x, out, width, normalizes in (
        (low_query, query, latent.q_rank or setup.model.hidden, fused_norm and latent.q_rank),
        (low_pair, pair, latent.kv_rank, fused_norm),
    ):
        gathers = setup.if_split(setup.tokens * width * setup.element)
        weight = width * out.bytes / (setup.tokens * setup.element)
        if normalizes:
            norm_linear(
                tape,
                setup,
                "mla_up_proj",
                x,
                out,
                rows=setup.shard,
                width=width,
                weight=weight,
                gathers=gathers,
            )
        else:
            linear(
                tape,
                setup,
                "mla_up_proj",
                x,
                out,
                inputs=setup.shard * width,
                weight=weight,
                gathers=gathers,
            )
    key = tape.tensor("key", per_head * heads.key_width)
    value = tape.tensor("value", per_head * heads.value_width)
    if setup.te and setup.training.apply_rope_fusion:
        tape.add("rope", [pair, rotary], [key, value])
        return query, key, value
    return _rotated(tape, setup, heads, query, pair, rotary, key, value)


def _rotated(
    tape: Tape,
    setup: Setup,
    heads: Heads,
    query: Tensor,
    pair: Tensor,
    rotary: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings out of single operations; queries, keys and values become new tensors."""
    latent = _latent(setup)
    per_head = setup.tokens * heads.queries * setup.element
    joined = tape.tensor("query", query.bytes)
    plain, turned = (
        query.view(per_head * width) for width in (latent.qk_head_dim, latent.rope_head_dim)
    )
    tape.add("rope", [query], [plain, turned])
    turned_out = tape.tensor("rotated", turned.gradient)
    rotary_out = tape.tensor("rotated", setup.tokens * latent.rope_head_dim * setup.element)
    rotate(
        tape,
        setup,
        [(turned, turned_out), (rotary, rotary_out)],
        width=latent.rope_head_dim,
    )
    tape.add("rope", [plain, turned_out], [joined])
    plain_key, plain_value = (
        pair.view(per_head * width) for width in (latent.qk_head_dim, latent.v_head_dim)
    )
    tape.add("rope", [pair], [plain_key, plain_value])
    tape.add("rope", [plain_key, rotary_out], [key])
    tape.add("rope", [plain_value], [value])
    return joined, key, value
