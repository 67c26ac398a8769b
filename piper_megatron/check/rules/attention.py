"""Attention: heads, rotary and other positions, latent and linear attention."""

from piper_megatron.check.command import Command
from piper_megatron.check.near import divisors, nearest
from piper_megatron.check.rule import Problem, rule

ARGUMENTS = "training/arguments.py"
CONFIG = "core/transformer/transformer_config.py"


@rule("attention.heads", f"{CONFIG}:1324")
def heads_divide_over_tensor_ranks(c: Command) -> Problem | None:
    """Every tensor-parallel rank gets the same number of heads."""
    heads = c.num_attention_heads
    if heads % c.tp == 0:
        return None
    return Problem(
        f"{heads} attention heads are not divisible by TP {c.tp}",
        f"--tensor-model-parallel-size {nearest(c.tp, divisors(heads))}",
    )


@rule("attention.groups", f"{CONFIG}:1342")
def key_value_heads_fit_tensor_ranks(c: Command) -> Problem | None:
    """Key-value heads and tensor-parallel ranks divide one another."""
    groups = c.query_groups
    if groups % c.tp == 0 or c.tp % groups == 0:
        return None
    legal = [tp for tp in divisors(c.num_attention_heads) if groups % tp == 0 or tp % groups == 0]
    return Problem(
        f"{groups} query groups are neither a multiple nor a divisor of TP {c.tp}",
        f"--tensor-model-parallel-size {nearest(c.tp, legal)}",
    )


@rule("attention.head-size", f"{ARGUMENTS}:1292")
def hidden_size_divides_over_heads(c: Command) -> Problem | None:
    """Without --kv-channels, the hidden size is a multiple of the heads, with MLA too."""
    if c.kv_channels is not None or c.hidden_size % c.num_attention_heads == 0:
        return None
    return Problem(
        f"--hidden-size {c.hidden_size} is not divisible by {c.num_attention_heads} heads and "
        f"--kv-channels is not given",
        "add --kv-channels with the size of a head (with MLA any value will do)"
        if c.mla
        else "add --kv-channels with the size of a head",
    )


@rule(
    "attention.groups-or-latent",
    f"{ARGUMENTS}:1893",
    fix="drop --group-query-attention",
)
def latent_attention_excludes_query_groups(c: Command) -> bool:
    """Multi-latent attention and --group-query-attention exclude each other."""
    return c.mla and c.group_query_attention


@rule("attention.down-projection", f"{ARGUMENTS}:1896", fix="drop --mla-down-proj-fusion")
def down_projection_fusion_needs_latent_attention(c: Command) -> bool:
    """--mla-down-proj-fusion needs --multi-latent-attention."""
    return c.mla_down_proj_fusion and not c.mla


@rule("attention.local-backend", f"{ARGUMENTS}:435", fix="--attention-backend auto")
def local_attention_needs_a_local_spec(c: Command) -> bool:
    """--attention-backend local needs --spec local."""
    return c.attention_backend == "local" and (not c.spec or c.spec[0] != "local")


@rule("rope.type", "training/argument_utils.py:339", fix="--rope-type rope")
def plain_attention_has_plain_rope(c: Command) -> bool:
    """--rope-type {c.rope_type} needs --multi-latent-attention."""
    return c.rope_type not in (None, "rope") and not c.mla


@rule(
    "rope.latent-fusion",
    f"{CONFIG}:2967",
    fix="add --no-rope-fusion, or --rope-type yarn",
)
def fused_rope_of_latent_attention_is_yarn(c: Command) -> bool:
    """With --multi-latent-attention the fused rotary kernel only knows --rope-type yarn."""
    return c.mla and c.rope_fusion and c.rope_type == "rope"


@rule("rope.latent-interleaved", f"{CONFIG}:2194", fix="drop --rotary-interleaved")
def latent_attention_has_no_interleaved_rope(c: Command) -> bool:
    """--rotary-interleaved does not work with --multi-latent-attention."""
    return c.mla and c.rotary_interleaved


@rule("rope.gate", f"{CONFIG}:2970", fix="drop --attention-output-gate")
def latent_attention_has_no_output_gate(c: Command) -> bool:
    """--attention-output-gate does not work with --multi-latent-attention."""
    return c.mla and c.attention_output_gate


@rule("rope.latent-cache", f"{CONFIG}:2973", fix="add --no-rope-fusion")
def cached_latents_exclude_fused_rope(c: Command) -> bool:
    """--cache-mla-latents needs --no-rope-fusion."""
    return c.mla and c.cache_mla_latents and c.rope_fusion


@rule("positions.none", f"{ARGUMENTS}:1579", fix="--position-embedding-type rope")
def no_position_embedding_is_a_type(c: Command) -> bool:
    """--no-position-embedding is deprecated and refused unless positions are rotary."""
    return not c.add_position_embedding and c.position != "rope"


@rule(
    "positions.relative",
    f"{ARGUMENTS}:1583",
    fix="--transformer-impl transformer_engine",
)
def relative_positions_need_transformer_engine(c: Command) -> bool:
    """--position-embedding-type relative needs --transformer-impl transformer_engine."""
    return c.position == "relative" and c.transformer_impl != "transformer_engine"


@rule("positions.mrope", f"{ARGUMENTS}:1589", fix="add --mrope-section")
def mrope_needs_its_section(c: Command) -> bool:
    """--position-embedding-type mrope needs --mrope-section."""
    return c.position == "mrope" and c.mrope_section is None


@rule(
    "positions.mtp",
    f"{ARGUMENTS}:857",
    f"{ARGUMENTS}:1864",
    fix="--position-embedding-type rope",
)
def prediction_layers_need_rope(c: Command) -> bool:
    """Multi-token prediction needs rotary or no positions, not {c.position_embedding_type}."""
    # validation looks before --use-rotary-position-embeddings changes the type
    return bool(c.mtp) and c.position_embedding_type not in ("rope", "none")


@rule("positions.no-rope", f"{CONFIG}:2816", f"{CONFIG}:2825")
def layers_without_rope_are_a_pattern_of_all(c: Command) -> Problem | None:
    """The layers without rotary positions are given for all layers."""
    pattern = c.no_rope_freq
    if not pattern:
        return None
    if isinstance(pattern, int):
        if c.layers % pattern == 0:
            return None
        return Problem(
            f"--no-rope-freq {pattern} does not divide {c.layers} layers",
            f"--no-rope-freq {nearest(abs(pattern), divisors(c.layers))}",
        )
    if len(pattern) == c.layers:
        return None
    return Problem(
        f"--no-rope-freq lists {len(pattern)} layers of {c.layers}",
        f"list {c.layers} layers",
    )


@rule("positions.no-rope-decode", f"{CONFIG}:2814", fix="drop --flash-decode")
def flash_decode_needs_rope_everywhere(c: Command) -> bool:
    """--flash-decode does not work with --no-rope-freq."""
    return bool(c.no_rope_freq) and c.flash_decode


@rule("attention.qk-clip-alpha", f"{ARGUMENTS}:1560", fix="--qk-clip-alpha 0.5")
def qk_clip_alpha_is_a_share(c: Command) -> bool:
    """--qk-clip-alpha {c.qk_clip_alpha} must lie between 0 and 1."""
    return c.qk_clip and not 0.0 < c.qk_clip_alpha < 1.0


@rule(
    "attention.qk-clip-threshold",
    f"{ARGUMENTS}:1562",
    fix="--qk-clip-threshold 100",
)
def qk_clip_threshold_is_positive(c: Command) -> bool:
    """--qk-clip-threshold {c.qk_clip_threshold} must be above 0."""
    return c.qk_clip and c.qk_clip_threshold <= 0


@rule(
    "attention.linear",
    f"{CONFIG}:1348",
    f"{CONFIG}:1368",
    f"{CONFIG}:1375",
    f"{CONFIG}:1379",
)
def linear_attention_has_its_heads(c: Command) -> Problem | None:
    """Gated delta nets need a layer frequency and heads that divide over TP x CP."""
    if c.experimental_attention_variant != "gated_delta_net":
        return None
    keys, values, ranks = c.linear_num_key_heads, c.linear_num_value_heads, c.tp * c.cp
    if c.linear_attention_freq is None:
        return Problem(
            "--experimental-attention-variant gated_delta_net needs --linear-attention-freq",
            "add --linear-attention-freq, for instance 4",
        )
    if keys <= 0 or values % keys:
        return Problem(
            f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}",
            f"--linear-num-key-heads {nearest(max(keys, 1), divisors(values))}",
        )
    if keys % ranks or values % ranks:
        return Problem(
            f"{keys} key heads and {values} value heads of linear attention are not divisible "
            f"by TP {c.tp} x CP {c.cp} = {ranks}",
            f"make TP x CP one of {nearest(ranks, divisors(keys))}",
        )
    return None


@rule(
    "attention.sparse",
    f"{CONFIG}:1386",
    f"{CONFIG}:1391",
    f"{CONFIG}:1395",
    f"{CONFIG}:2838",
    f"{CONFIG}:2845",
)
def sparse_attention_has_its_settings(c: Command) -> Problem | None:
    """DeepSeek sparse attention has narrow conditions."""
    if not _sparse(c):
        return None
    if c.add_bias_linear:
        return Problem("sparse attention (dsa) has no linear bias", "add --disable-bias-linear")
    if c.dsa_indexer_topk_freq < 1:
        return Problem("--dsa-indexer-topk-freq must be at least 1", "--dsa-indexer-topk-freq 1")
    if c.dsa_indexer_skip_topk_offset < 0:
        return Problem(
            "--dsa-indexer-skip-topk-offset must not be negative",
            "--dsa-indexer-skip-topk-offset 0",
        )
    if c.rope_fusion:
        return Problem("sparse attention (dsa) has no fused rotary kernel", "add --no-rope-fusion")
    if c.cp > 1 and any(kind.replace("_", "").lower() != "allgather" for kind in c.cp_comm_type):
        return Problem(
            "sparse attention (dsa) with context parallelism needs --cp-comm-type allgather",
            "--cp-comm-type allgather",
        )
    return None


def _sparse(c: Command) -> bool:
    return c.experimental_attention_variant == "dsa" or "D" in (c.hybrid_pattern or "")


@rule(
    "attention.batch-invariant",
    f"{CONFIG}:2876",
    f"{CONFIG}:2883",
    f"{CONFIG}:2890",
    f"{CONFIG}:2893",
)
def batch_invariance_has_its_conditions(c: Command) -> Problem | None:
    """Batch-invariant kernels need FlashAttention 3 or 4 without CP and dropout."""
    if not c.batch_invariant_mode:
        return None
    needs = {
        "--attention-backend flash": c.attention_backend == "flash",
        "--flash-attention-version 3 or 4": c.flash_attention_version in (3, 4),
        "CP 1": c.cp == 1,
        "--attention-dropout 0": c.attention_dropout == 0.0,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return Problem(f"--batch-invariant-mode needs {', '.join(missing)}", " ".join(missing))
