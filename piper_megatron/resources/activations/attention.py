"""Self-attention around its core: projections, norms of queries and keys, output gate.

Sources, megatron/core of 0.19.2: transformer/attention.py (`SelfAttention`),
models/gpt/gpt_layer_specs.py.
"""

import numpy as np

from piper_megatron.resources.activations.core_attention import Heads, core_attention, rotate
from piper_megatron.resources.activations.setup import Setup, linear, norm, norm_linear
from piper_megatron.resources.activations.tape import Region, Tape, Tensor


def self_attention(tape: Tape, setup: Setup, hidden: Tensor) -> Tensor:
    """From the residual stream to what is added to it.

    Args:
        tape: to write on.
        setup: of the layer.
        hidden: the layer's input.
    """
    model, attention = setup.model, setup.model.attention
    heads = Heads(
        queries=attention.heads / setup.sizes.tp,
        groups=np.maximum(attention.groups / setup.sizes.tp, 1),
        key_width=attention.head_dim,
        value_width=attention.head_dim,
    )
    mixed, region = _projected(tape, setup, hidden)
    query, key, value, gate = _parts(tape, setup, heads, mixed)
    if attention.qk_norm:
        rows = setup.tokens * heads.queries, setup.tokens * heads.groups
        query, key = (
            norm(tape, setup, "qk_norm", x, rows=n, width=attention.head_dim)
            for x, n in zip((query, key), rows, strict=True)
        )
    if model.position in ("rope", "yarn", "mrope"):
        turned = [(x, tape.tensor("rotated", x.gradient)) for x in (query, key)]
        rotate(tape, setup, turned, width=attention.head_dim)
        query, key = (target for _, target in turned)
    context = core_attention(tape, setup, heads, query, key, value)
    if gate is not None:
        context = _gated(tape, context, gate)
    out = output_projection(tape, setup, context, attention.heads * attention.head_dim)
    region.until = out
    return out


def output_projection(tape: Tape, setup: Setup, context: Tensor, width: int) -> Tensor:
    """From the context to hidden states; `width`: channels of all heads of all ranks."""
    out = tape.tensor("attention output", setup.hidden_shard)
    hidden = setup.model.hidden
    with tape.offloaded(setup.offloads("attn_proj")):
        linear(
            tape,
            setup,
            "output_projection",
            context,
            out,
            inputs=setup.tokens * width / setup.sizes.tp,
            weight=width * hidden / setup.sizes.tp,
            scatters=setup.if_split(setup.tokens * hidden * setup.element),
            keeps_original=setup.keeps_original_input,
        )
    return out


def input_norm(tape: Tape, setup: Setup, hidden: Tensor) -> tuple[Tensor, Region]:
    """The layer's first norm, where it is a module of its own, and the region to recompute it."""
    with (
        tape.offloaded(setup.offloads("attn_norm")),
        tape.recomputed(setup.recomputes("layernorm"), "norms", discards=True) as region,
    ):
        out = norm(tape, setup, "norms", hidden, rows=setup.shard, width=setup.model.hidden)
    return out, region


def _projected(tape: Tape, setup: Setup, hidden: Tensor) -> tuple[Tensor, Region]:
    """Queries, keys and values in one tensor."""
    model, attention, tp = setup.model, setup.model.attention, setup.sizes.tp
    width = attention.head_dim * (
        attention.heads * (2 if attention.output_gate else 1) + 2 * attention.groups
    )
    # fewer groups than ranks: every rank gathers all of it (attention.py: steps 1 and 2)
    held = np.where(np.asarray(tp) > attention.groups, width, width / tp)
    mixed = tape.tensor("queries, keys and values", setup.tokens * held * setup.element)
    gathers = setup.if_split(setup.tokens * model.hidden * setup.element)
    weight = model.hidden * width / tp
    with tape.offloaded(setup.offloads("qkv_linear")):
        if setup.te:
            norm_linear(
                tape,
                setup,
                "qkv",
                hidden,
                mixed,
                rows=setup.shard,
                width=model.hidden,
                weight=weight,
                gathers=gathers,
            )
            return mixed, Region("norms")
    normed, region = input_norm(tape, setup, hidden)
    with tape.offloaded(setup.offloads("qkv_linear")):
        linear(
            tape,
            setup,
            "qkv",
            normed,
            mixed,
            inputs=setup.shard * model.hidden,
            weight=weight,
            gathers=gathers,
        )
    return mixed, region


def _parts(
    tape: Tape, setup: Setup, heads: Heads, mixed: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views of the one tensor; queries that share a key are copied out of it."""
    attention = setup.model.attention
    query_bytes = setup.tokens * heads.queries * attention.head_dim * setup.element
    group_bytes = setup.tokens * heads.groups * attention.head_dim * setup.element
    sizes = [query_bytes, group_bytes, group_bytes]
    if attention.output_gate:
        sizes.append(query_bytes)
    query, key, value, *gate = (mixed.view(bytes) for bytes in sizes)
    tape.add("qkv", [mixed], [query, key, value, *gate])
    if attention.heads != attention.groups:
        copied = tape.tensor("queries", query_bytes)
        tape.add("qkv", [query], [copied])
        query = copied
    if attention.qk_norm and setup.te:
        copies = []
        for x in (query, key):
            if x.is_view:
                copied = tape.tensor("contiguous copy", x.gradient)
                tape.add("qk_norm", [x], [copied])
                x = copied
            copies.append(x)
        query, key = copies
    return query, key, value, gate[0] if gate else None


def _gated(tape: Tape, context: Tensor, gate: Tensor) -> Tensor:
    """Attention.apply_output_gate: the compiled function keeps what it reads."""
    copied = tape.tensor("gate", gate.gradient)
    tape.add("output_gate", [gate], [copied])
    out = tape.tensor("gated context", context.bytes)
    tape.add("output_gate", [context, copied], [out], [context, copied])
    return out
