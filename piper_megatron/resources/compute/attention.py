"""Self-attention: projections and core (attention.py, multi_latent_attention.py of Megatron)."""

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.compute.setting import Operation, Setting
from piper_megatron.resources.kernels import Work, fused_attention, product_s
from piper_megatron.workload.spec import LatentAttention

_CORE = frozenset({"core_attn"})
_RING_LAUNCHES = 6  # of a turn of context-parallel attention: sends, kernel, merge


def attention_operations(setting: Setting, *, windowed: bool) -> list[Operation]:
    """Everything between the norm and the residual stream.

    Args:
        setting: of the layer.
        windowed: queries see a window.
    """
    latent = setting.model.attention.latent
    projections = _latent(setting, latent) if latent else _grouped(setting)
    return [*projections, Operation("attention", _core(setting, windowed), _CORE)]


def _grouped(setting: Setting) -> list[Operation]:
    """QKV and output projection, rotary embedding, norms of queries and keys, the gate."""
    attention, tp = setting.model.attention, setting.sizes.tp
    queries = attention.heads * attention.head_dim / tp
    # ranks beyond the number of key-value heads repeat them
    keys = np.maximum(attention.groups / tp, 1) * attention.head_dim
    gate = queries if attention.output_gate else 0
    rows, hidden = setting.rows, setting.model.hidden
    products = setting.linear(hidden, queries + 2 * keys + gate) + setting.linear(queries, hidden)
    # queries are copied out of the common projection, and all gradients back into one
    between = setting.pointwise(2 * rows * queries, 2 * rows * (queries + 2 * keys))
    turned = rows * (queries + keys)
    if setting.model.position in ("rope", "yarn", "mrope"):
        fused = setting.training.apply_rope_fusion
        between += setting.pointwise(2 * turned, 2 * turned, fused=fused, kernels=2)
    if attention.qk_norm:
        between += setting.pointwise(2 * turned, 4 * turned, kernels=2)
    if attention.output_gate:
        between += setting.pointwise(3 * rows * queries, 5 * rows * queries, kernels=2)
    return [Operation("projections", products + between)]


def _latent(setting: Setting, latent: LatentAttention) -> list[Operation]:
    """Down and up projections, and the assembly of queries and keys from their two parts."""
    attention, hidden, rows = setting.model.attention, setting.model.hidden, setting.rows
    heads = attention.heads / setting.sizes.tp
    query = heads * (latent.qk_head_dim + latent.rope_head_dim)
    key_value = heads * (latent.qk_head_dim + latent.v_head_dim)
    # down projections are not split: every tensor-parallel rank takes its own tokens
    local = setting.local_rows
    down = setting.linear(hidden, latent.kv_rank + latent.rope_head_dim, rows=local)
    up = setting.linear(latent.kv_rank, key_value)
    normed = latent.kv_rank
    if latent.q_rank is None:
        down += setting.linear(hidden, query)
    else:
        down += setting.linear(hidden, latent.q_rank, rows=local)
        up += setting.linear(latent.q_rank, query)
        normed += latent.q_rank
    assembled = 2 * rows * (query + key_value)
    fused = setting.training.apply_rope_fusion
    up += setting.pointwise(assembled, assembled, fused=fused, kernels=4)
    if attention.qk_norm:
        up += setting.pointwise(2 * rows * normed, 4 * rows * normed, kernels=2)
    output = setting.linear(heads * latent.v_head_dim, hidden)
    return [
        Operation("projections", down + output),
        Operation("projections", up, frozenset({"mla_up_proj"})),
    ]


def _core(setting: Setting, windowed: bool) -> Work:
    attention, sizes = setting.model.attention, setting.sizes
    heads = attention.heads / sizes.tp
    query_dim = value_dim = attention.head_dim
    if attention.latent:
        query_dim = attention.latent.qk_head_dim + attention.latent.rope_head_dim
        value_dim = attention.latent.v_head_dim
    if setting.training.transformer_impl == "local" or setting.training.attention_backend in (
        "unfused",
        "local",
    ):
        return _with_scores(setting, heads, query_dim + value_dim)
    seen = sizes.seq / 2
    if windowed and attention.window is not None and attention.window < sizes.seq:
        seen = attention.window * (1 - attention.window / (2 * sizes.seq))
    work = fused_attention(
        setting.accelerator, setting.rows, seen, heads, max(query_dim, value_dim)
    )
    return work + _ring(setting, heads * value_dim)


def _ring(setting: Setting, width: Number) -> Work:
    """What context parallelism adds: a call for each turn, and merging the partial results."""
    turns = setting.sizes.cp - 1
    merged = turns * setting.rows * width
    kernels = setting.pointwise(3 * merged, 3 * merged, kernels=0)
    fixed_s = turns * setting.accelerator.attention.kernel_s
    launches = _RING_LAUNCHES * turns
    return kernels + Work(
        forward_s=fixed_s,
        backward_s=fixed_s,
        forward_launches=launches,
        backward_launches=launches,
    )


def _with_scores(setting: Setting, heads: Number, dims: int) -> Work:
    """Scores, softmax and weighted values as batched products (dot_product_attention.py)."""
    training = setting.training
    scores = setting.rows * setting.sizes.seq * heads
    moved = 2 * training.element_bytes * scores
    product = product_s(setting.accelerator, training.precision, 2 * scores * dims, moved)
    in_fp32 = training.attention_softmax_in_fp32 or not training.masked_softmax_fusion
    softmax = 2 * scores * (2.5 if in_fp32 else 1)
    dropout = 2.5 * scores if training.attention_dropout > 0 else 0
    products = Work(
        forward_s=product, backward_s=2 * product, forward_launches=3, backward_launches=6
    )
    return products + setting.pointwise(softmax + dropout, 1.5 * softmax + dropout, kernels=3)
