"""Core attention: from queries, keys and values to the context, and rotary embeddings before it.

Sources. Megatron-Core 0.19.2: transformer/dot_product_attention.py, fusions/fused_softmax.py,
models/common/embeddings/rope_utils.py. Transformer Engine 2.20,
pytorch/attention/dot_product_attention: backends.py (`FusedAttnFunc`, `FlashAttention`,
`UnfusedDotProductAttention`), softmax.py (`FusedScaleMaskSoftmax`), context_parallel.py
(`AttnFuncWithCPAndKVP2P` and siblings).
"""

from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.setup import FP32, Setup
from piper_megatron.resources.activations.tape import Tape, Tensor

PART = "core_attention"
_FUSED_SOFTMAX_SEQUENCES = (17, 16383)  # is_kernel_available in softmax.py


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of one rank.

    Attributes:
        queries, groups: query and key-value heads.
        key_width, value_width: channels of a head.
    """

    queries: Number
    groups: Number
    key_width: int
    value_width: int


def keeps_scores(setup: Setup) -> bool:
    """Whether attention probabilities stay in memory."""
    return not setup.te or setup.training.attention_backend in ("unfused", "local")


def rotate(tape: Tape, setup: Setup, parts: list[tuple[Tensor, Tensor]], *, width: int) -> None:
    """Rotary embeddings, each from one tensor to another.

    The fused kernel keeps only its angles, which all layers share; single operations keep cosine
    and sine of each, in the training precision.
    """
    for source, target in parts:
        if setup.te and setup.training.apply_rope_fusion:
            tape.add("rope", [source], [target])
            continue
        angles = setup.sizes.seq / setup.sizes.cp * width * setup.element
        tables = [tape.tensor("rope table", angles, differentiable=False) for _ in range(2)]
        products = 2 * target.bytes
        tape.add(
            "rope",
            [source],
            [target, *tables],
            tables,
            forward_extra=products,
            backward_extra=products,
        )


def core_attention(
    tape: Tape, setup: Setup, heads: Heads, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention itself.

    Args:
        tape: to write on.
        setup: of the layer.
        heads: of this rank.
        query: may be a view of one tensor with the others.
        key: as the query.
        value: as the query.

    Returns:
        The context, what the output projection reads.
    """
    context_bytes = setup.tokens * heads.queries * heads.value_width * setup.element
    context = tape.tensor("context", context_bytes)
    with (
        tape.recomputed(setup.recomputes("core_attn"), PART),
        tape.offloaded(setup.offloads("core_attn")),
    ):
        if keeps_scores(setup):
            _with_scores(tape, setup, heads, query, key, value, context)
        else:
            _flash(tape, setup, heads, query, key, value, context)
    return context


def _flash(
    tape: Tape,
    setup: Setup,
    heads: Heads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
) -> None:
    """Flash or cuDNN attention: keeps inputs, output and the logarithm of the denominators.

    Keys and values that are views of other layout are copied first
    (attention/dot_product_attention/utils.py: get_qkv_layout).
    """
    rows = setup.tokens * heads.queries
    denominators = tape.tensor("denominators", rows * FP32, differentiable=False)
    one_chunk = query.storage == key.storage == value.storage
    inputs = [query, key, value]
    if not one_chunk:
        for place, tensor in enumerate(inputs):
            if tensor.is_view:
                copy = tape.tensor("contiguous copy", tensor.gradient)
                tape.add(PART, [tensor], [copy])
                inputs[place] = copy
    forward_extra, backward_extra = _context_parallel_extras(setup, heads)
    query_gradient_in_fp32 = rows * heads.key_width * FP32
    result = context
    if setup.training.cp_comm_type in ("a2a", "a2a+p2p"):
        # kept by heads; the exchange back to tokens makes another tensor
        split = np.asarray(setup.sizes.cp) > 1
        result = tape.tensor("context by head", np.where(split, context.bytes, 0))
    tape.add(
        PART,
        inputs,
        [result, denominators],
        [*inputs, result, denominators],
        forward_extra=forward_extra,
        backward_extra=backward_extra + query_gradient_in_fp32,
    )
    if result is not context:
        tape.add(PART, [result], [context], [context])


def _context_parallel_extras(setup: Setup, heads: Heads) -> tuple[Number, Number]:
    """Bytes that exchanging keys and values takes: forward, backward.

    context_parallel.py, p2p: forward holds every rank's keys and values and one output a step until
    all are merged; backward holds two pairs of them and of their gradients, and a step's results.
    All-gather holds all keys and values; all-to-all needs one more copy of everything.
    """
    queries = setup.tokens * heads.queries * heads.key_width * setup.element
    outputs = setup.tokens * heads.queries * heads.value_width * setup.element
    per_group = heads.key_width + heads.value_width
    pairs = setup.tokens * heads.groups * per_group * setup.element
    cp = setup.sizes.cp
    comm = setup.training.cp_comm_type
    if comm == "p2p":
        forward, backward = cp * (pairs + outputs), 4 * pairs + queries
    elif comm == "all_gather":
        forward, backward = cp * pairs, 2 * cp * pairs
    else:
        forward = backward = queries + pairs + outputs
    split = np.asarray(cp) > 1
    return np.where(split, forward, 0), np.where(split, backward, 0)


def _with_scores(
    tape: Tape,
    setup: Setup,
    heads: Heads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
) -> None:
    """Attention out of single operations: keeps the probabilities of all pairs of tokens."""
    pairs = setup.tokens * setup.sizes.seq * heads.queries
    key, value = _repeated(tape, setup, heads, key, value)
    scores = tape.tensor("scores", pairs * setup.element)
    tape.add(PART, [query, key], [scores], [query, key])
    probabilities = _softmax(tape, setup, heads, scores, pairs)
    if setup.training.attention_dropout:
        probabilities = dropout(tape, setup, PART, probabilities, pairs)
    merged = tape.tensor("context by head", context.bytes)
    tape.add(PART, [probabilities, value], [merged], [probabilities, value])
    tape.add(PART, [merged], [context])


def _repeated(
    tape: Tape, setup: Setup, heads: Heads, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values once a query head."""
    attention = setup.model.attention
    if attention.latent or attention.heads == attention.groups:
        return key, value
    repeated = []
    for tensor, width in ((key, heads.key_width), (value, heads.value_width)):
        bytes = setup.tokens * heads.queries * width * setup.element
        copy = tape.tensor("repeated heads", bytes)
        tape.add(PART, [tensor], [copy])
        repeated.append(copy)
    return repeated[0], repeated[1]


def _softmax(tape: Tape, setup: Setup, heads: Heads, scores: Tensor, pairs: Number) -> Tensor:
    """Probabilities in the training precision; an fp32 softmax keeps its own result beside."""
    sequence = setup.sizes.seq
    sink = setup.model.attention.sink
    columns = pairs / sequence * (sequence + 1) if sink else pairs
    mask = tape.tensor("attention mask", _mask_bytes(setup), differentiable=False)
    wide = _softmax_in_fp32(setup, heads)
    # rounding copies the columns of tokens alone
    probabilities = tape.tensor("probabilities", np.where(wide, pairs, columns) * setup.element)
    in_fp32 = tape.tensor("probabilities in fp32", np.where(wide, columns * FP32, 0))
    padded = tape.tensor("scores with sink", columns * setup.element if sink else 0)
    if sink:
        tape.add(PART, [scores], [padded])
        scores = padded
    widened = np.where(wide, pairs * (FP32 - setup.element), 0)  # the scores' gradient in fp32
    tape.add(
        PART,
        [scores],
        [in_fp32, mask],
        [in_fp32, mask],
        forward_extra=in_fp32.bytes,  # the scores in fp32
        backward_extra=widened,
    )
    direct = np.where(wide, 0, scores.bytes)  # read, and its gradient written, in the same kernel
    tape.add(
        PART,
        [in_fp32],
        [probabilities],
        [] if _always(wide) else [probabilities],
        forward_extra=direct,
        backward_extra=direct,
    )
    return probabilities


def _always(condition: Number) -> bool:
    return bool(np.all(condition))


def _softmax_in_fp32(setup: Setup, heads: Heads) -> Number:
    """Whether softmax runs on an fp32 copy, out of single operations."""
    if setup.element == FP32:
        return False
    if not setup.te:
        fused = setup.training.masked_softmax_fusion and not setup.cpu and setup.sizes.seq <= 4096
        return setup.training.attention_softmax_in_fp32 and not fused
    least, most = _FUSED_SOFTMAX_SEQUENCES
    fused = (
        least <= setup.sizes.seq <= most
        and setup.sizes.seq % 8 == 0
        and not setup.model.attention.sink
    )
    return (not fused) | ((heads.queries * setup.sizes.micro_batch) % 4 != 0)


def _mask_bytes(setup: Setup) -> Number:
    """Megatron's own softmax keeps a causal mask of its own in every layer."""
    return 0 if setup.te else setup.sizes.seq * setup.sizes.seq / setup.sizes.cp


def dropout(tape: Tape, setup: Setup, part: str, x: Tensor, elements: Number) -> Tensor:
    """Dropout: keeps its mask, a byte an element on a GPU, an element on the CPU."""
    mask_bytes = elements * (setup.element if setup.cpu else 1)
    mask = tape.tensor("dropout mask", mask_bytes, differentiable=False)
    out = tape.tensor("dropout output", x.bytes)
    tape.add(part, [x], [out, mask], [mask])
    return out
