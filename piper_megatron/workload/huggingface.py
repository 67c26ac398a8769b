"""Hugging Face model configurations as Megatron arguments.

Optional keys default as in the family's class in `transformers`. Precision, parallel sizes, batch
and dispatcher are no part of a model and stay with Megatron's defaults.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import nearest
from piper_megatron.workload.hf_config import HuggingFaceConfig, load_config

# name of an argument without its dashes -> value; True for a switch, False and None leave it out
Arguments = dict[str, Any]
Family = Callable[[HuggingFaceConfig], Arguments]


def megatron_arguments(source: str | Path | Mapping[str, Any]) -> list[str]:
    """Megatron's arguments for a Hugging Face model.

    Args:
        source: a `config.json`, the folder that holds it, or its content.

    Returns:
        Tokens of a command line.

    Raises:
        WorkloadError: one line: the family is unknown, a key is missing or makes no sense, or keys
            were not understood (all of them are listed).
    """
    config = load_config(source)
    family = config.get("model_type")
    if family == "llama4":
        config, family = _text_of_llama4(config), "llama4_text"
    if family is None:
        raise config.error("'model_type' is missing")
    if family not in FAMILIES:
        raise _unknown_family(config, str(family))
    arguments = _trunk(config) | FAMILIES[family](config)
    config.refuse_unread()
    return [token for name, value in arguments.items() for token in _tokens(name, value)]


def _unknown_family(config: HuggingFaceConfig, family: str) -> WorkloadError:
    """Names the family and the keys that none of the known families has."""
    unread = set.intersection(*(_unread_by(known, config) for known in FAMILIES.values()))
    keys = f"; keys not understood: {', '.join(sorted(unread))}" if unread else ""
    return config.error(f"unknown model_type '{family}'; {nearest(family, FAMILIES)}{keys}")


def _unread_by(family: Family, config: HuggingFaceConfig) -> set[str]:
    config = config.again()
    with suppress(WorkloadError):
        _trunk(config)
        family(config)
    return config.unread()


def _tokens(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _text_of_llama4(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """The language model; images and their encoder are no part of a GPT model."""
    text = config.part("text_config")
    config.skip("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    config.skip("tie_word_embeddings")
    config.refuse_unread()
    return text


def _trunk(config: HuggingFaceConfig) -> Arguments:
    """What all families share."""
    config.choice("hidden_act", "silu", default="silu")
    config.choice("pretraining_tp", 1, default=1)
    return {
        "num-layers": config.count("num_hidden_layers"),
        "hidden-size": config.count("hidden_size"),
        "ffn-hidden-size": config.count("intermediate_size"),
        "num-attention-heads": config.count("num_attention_heads"),
        "vocab-size": config.count("vocab_size"),
        "max-position-embeddings": config.count("max_position_embeddings"),
        "normalization": "RMSNorm",
        "norm-epsilon": config.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": not config.switch("tie_word_embeddings", False),
        "attention-dropout": float(config.number("attention_dropout", 0.0)),
        "hidden-dropout": 0.0,
    }


def _grouped_attention(config: HuggingFaceConfig) -> Arguments:
    heads = config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    head_dim = config.get("head_dim")
    return {
        "group-query-attention": groups != heads,
        "num-query-groups": groups if groups != heads else None,
        "kv-channels": None if head_dim is None else config.count("head_dim"),
        **_rotary(config),
    }


def _rotary(config: HuggingFaceConfig) -> Arguments:
    scaling = _rope_scaling(config)
    kind = _rope_kind(scaling)
    base = config.number("rope_theta", scaling.number("rope_theta", 10_000))
    share = config.number("partial_rotary_factor", scaling.number("partial_rotary_factor", 1.0))
    arguments: Arguments = {
        "position-embedding-type": "rope",
        "rotary-base": int(base),
        "rotary-percent": share if share != 1 else None,
    }
    if kind == "llama3":
        factor = float(scaling.number("factor"))
        arguments |= {"use-rope-scaling": True, "rope-scaling-factor": factor}
    elif kind == "linear":
        arguments["rotary-seq-len-interpolation-factor"] = int(scaling.number("factor"))
    elif kind == "yarn":
        arguments["position-embedding-type"] = "yarn"
    return arguments


def _rope_scaling(config: HuggingFaceConfig) -> HuggingFaceConfig:
    # transformers 5 writes `rope_parameters`, which holds `rope_theta` too
    return config.part("rope_scaling", "rope_parameters")


def _rope_kind(scaling: HuggingFaceConfig) -> str:
    key = "type" if scaling.get("rope_type") is None else "rope_type"
    return scaling.choice(key, "default", "llama3", "linear", "yarn", default="default")


def _sliding_window(config: HuggingFaceConfig, windowed: Sequence[bool]) -> Arguments:
    """Windows of `sliding_window` tokens, the query itself included, on some layers."""
    if not any(windowed):
        config.skip("sliding_window")
        return {}
    window = config.count("sliding_window")
    return {
        "window-size": f"{window - 1},0",
        "window-attn-skip-freq": None if all(windowed) else _pattern(windowed),
    }


def _qwen_window(config: HuggingFaceConfig) -> Arguments:
    layers = config.count("num_hidden_layers")
    used = config.switch("use_sliding_window", False)
    first = config.number("max_window_layers", 28)
    kinds = config.per_layer("layer_types", layers) or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    return _sliding_window(config, [used and kind == "sliding_attention" for kind in kinds])


def _pattern(flags: Sequence[bool]) -> str:
    """Layers as Megatron's list expressions: repeats of the shortest unit, runs inside of it."""
    length = next(
        n
        for n in range(1, len(flags) + 1)
        if len(flags) % n == 0 and list(flags) == list(flags[:n]) * (len(flags) // n)
    )
    runs = [f"[{int(flag)}]*{len(list(run))}" for flag, run in itertools.groupby(flags[:length])]
    repeats = len(flags) // length
    return f"({'+'.join(runs)})" + (f"*{repeats}" if repeats > 1 else "")


def _expert_count(config: HuggingFaceConfig) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    given = [name for name in names if config.get(name) is not None]
    if not given:
        raise config.error(f"the number of experts is missing ({', '.join(names)})")
    return config.count(given[0])


def _moe_layers(moe: Sequence[bool]) -> Arguments:
    return {} if all(moe) else {"moe-layer-freq": _pattern(moe)}


def _aux_loss(config: HuggingFaceConfig) -> Arguments:
    coefficient = config.number("router_aux_loss_coef", 0.001)
    return {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": coefficient}


def _llama(config: HuggingFaceConfig) -> Arguments:
    config.choice("attention_bias", False, default=False)
    config.choice("mlp_bias", False, default=False)
    return _grouped_attention(config)


def _mistral(config: HuggingFaceConfig) -> Arguments:
    windowed = config.get("sliding_window") is not None
    return _grouped_attention(config) | _sliding_window(config, [windowed])


def _qwen2(config: HuggingFaceConfig) -> Arguments:
    return _grouped_attention(config) | {"add-qkv-bias": True} | _qwen_window(config)


def _qwen3(config: HuggingFaceConfig) -> Arguments:
    config.choice("attention_bias", False, default=False)
    return _grouped_attention(config) | {"qk-layernorm": True} | _qwen_window(config)


def _mixtral(config: HuggingFaceConfig) -> Arguments:
    return {
        **_mistral(config),
        "num-experts": _expert_count(config),
        "moe-ffn-hidden-size": config.count("intermediate_size"),
        "moe-router-topk": config.count("num_experts_per_tok"),
        **_aux_loss(config),
    }


def _qwen_experts(config: HuggingFaceConfig) -> Arguments:
    layers = config.count("num_hidden_layers")
    step = config.count("decoder_sparse_step", 1)
    dense = config.indices("mlp_only_layers")
    return {
        "num-experts": _expert_count(config),
        "moe-ffn-hidden-size": config.count("moe_intermediate_size"),
        "moe-router-topk": config.count("num_experts_per_tok"),
        "moe-router-pre-softmax": not config.switch("norm_topk_prob", False),
        **_moe_layers([n not in dense and (n + 1) % step == 0 for n in range(layers)]),
        **_aux_loss(config),
    }


def _qwen2_moe(config: HuggingFaceConfig) -> Arguments:
    config.choice("qkv_bias", True, default=True)
    return {
        **_qwen2(config),
        **_qwen_experts(config),
        "moe-shared-expert-intermediate-size": config.count("shared_expert_intermediate_size"),
        "moe-shared-expert-gate": True,
    }


def _qwen3_moe(config: HuggingFaceConfig) -> Arguments:
    return _qwen3(config) | _qwen_experts(config)


def _latent_attention(config: HuggingFaceConfig) -> Arguments:
    config.choice("attention_bias", False, default=False)
    # with latent attention they follow from the other sizes
    config.skip("num_key_value_heads", "head_dim", "qk_head_dim")
    has_q_rank = config.get("q_lora_rank") is not None
    return {
        "multi-latent-attention": True,
        "q-lora-rank": config.count("q_lora_rank") if has_q_rank else None,
        "kv-lora-rank": config.count("kv_lora_rank"),
        "qk-head-dim": config.count("qk_nope_head_dim"),
        "qk-pos-emb-head-dim": config.count("qk_rope_head_dim"),
        "v-head-dim": config.count("v_head_dim"),
        "qk-layernorm": True,
        **_latent_rotary(config),
    }


def _latent_rotary(config: HuggingFaceConfig) -> Arguments:
    """Rotary arguments of latent attention, yarn in Megatron; with factor 1 it is plain."""
    arguments = _rotary(config) | {"position-embedding-type": "rope"}
    scaling = _rope_scaling(config)
    if _rope_kind(scaling) != "yarn":
        return arguments
    return arguments | {
        "rotary-scaling-factor": float(scaling.number("factor")),
        "mscale": float(scaling.number("mscale", 1.0)),
        "mscale-all-dim": float(scaling.number("mscale_all_dim", 0.0)),
    }


@dataclass(frozen=True)
class _DeepSeekDefaults:
    """What a family of DeepSeek's layers does unless its configuration says otherwise."""

    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    first_k_dense_replace: int
    n_group: int
    topk_group: int


def _deepseek(config: HuggingFaceConfig, defaults: _DeepSeekDefaults) -> Arguments:
    layers = config.count("num_hidden_layers")
    width = config.count("moe_intermediate_size")
    dense = config.number("first_k_dense_replace", defaults.first_k_dense_replace)
    every = config.count("moe_layer_freq", 1)
    shared = int(config.number("n_shared_experts", 0))
    mtp = config.number("num_nextn_predict_layers", config.number("num_mtp_layers", 0))
    config.skip("mlp_bias")
    return {
        **_latent_attention(config),
        "num-experts": _expert_count(config),
        "moe-ffn-hidden-size": width,
        "moe-router-topk": config.count("num_experts_per_tok"),
        **_moe_layers([layer >= dense and layer % every == 0 for layer in range(layers)]),
        "moe-shared-expert-intermediate-size": shared * width or None,
        **_deepseek_router(config, defaults),
        "mtp-num-layers": int(mtp) or None,
    }


def _deepseek_router(config: HuggingFaceConfig, defaults: _DeepSeekDefaults) -> Arguments:
    score = config.choice("scoring_func", "softmax", "sigmoid", default=defaults.scoring_func)
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    method = config.choice("topk_method", *methods, default=defaults.topk_method)
    normalised = config.switch("norm_topk_prob", defaults.norm_topk_prob)
    if score == "sigmoid":
        # Megatron always normalises the sigmoid scores of the chosen experts
        config.choice("norm_topk_prob", True, default=defaults.norm_topk_prob)
    groups = config.count("n_group", defaults.n_group)
    chosen = config.count("topk_group", defaults.topk_group)
    limited = groups > 1 and method != "greedy"
    scale = config.number("routed_scaling_factor", 1.0)
    by_sequence = config.switch("seq_aux", True)
    return {
        "moe-router-score-function": score,
        "moe-router-pre-softmax": score == "softmax" and not normalised,
        "moe-router-enable-expert-bias": method == "noaux_tc",
        "moe-router-num-groups": groups if limited else None,
        "moe-router-group-topk": chosen if limited else None,
        "moe-router-topk-scaling-factor": float(scale) if scale != 1 else None,
        "moe-router-load-balancing-type": "seq_aux_loss" if by_sequence else "aux_loss",
        "moe-aux-loss-coeff": config.number("aux_loss_alpha", 0.001),
    }


def _deepseek_v2(config: HuggingFaceConfig) -> Arguments:
    return _deepseek(config, _DeepSeekDefaults("softmax", "greedy", False, 0, 1, 1))


def _deepseek_v3(config: HuggingFaceConfig) -> Arguments:
    return _deepseek(config, _DeepSeekDefaults("sigmoid", "noaux_tc", True, 3, 8, 4))


def _kimi_k2(config: HuggingFaceConfig) -> Arguments:
    return _deepseek(config, _DeepSeekDefaults("sigmoid", "noaux_tc", True, 1, 1, 1))


def _gpt_oss(config: HuggingFaceConfig) -> Arguments:
    config.choice("attention_bias", True, default=True)
    config.skip(
        "experts_per_token", "initial_context_length", "router_aux_loss_coef", "swiglu_alpha"
    )
    layers = config.count("num_hidden_layers")
    kinds = config.per_layer("layer_types", layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
    ]
    return {
        **_grouped_attention(config),
        "swiglu": False,
        "quick-geglu": True,
        "glu-linear-offset": 1.0,
        "activation-func-clamp-value": float(config.number("swiglu_limit", 7.0)),
        # unlike the other families, all linear layers have a bias
        "disable-bias-linear": False,
        "add-qkv-bias": True,
        "softmax-type": "learnable",
        **_sliding_window(config, [kind == "sliding_attention" for kind in kinds]),
        "num-experts": _expert_count(config),
        "moe-ffn-hidden-size": config.count("intermediate_size"),
        "moe-router-topk": config.count("num_experts_per_tok"),
        "moe-router-load-balancing-type": "none",
    }


def _llama4_text(config: HuggingFaceConfig) -> Arguments:
    """Llama 4's language model.

    Its `attention_chunk_size` has no counterpart in Megatron, whose layers see the whole sequence.
    """
    config.choice("attention_bias", False, default=False)
    config.skip("attention_chunk_size", "layer_types")
    layers = config.count("num_hidden_layers")
    step = config.count("interleave_moe_layer_step", 1)
    listed = config.indices("moe_layers") or frozenset(range(step - 1, layers, step))
    interval = config.count("no_rope_layer_interval", 4)
    rotates = config.per_layer("no_rope_layers", layers) or [
        (layer + 1) % interval != 0 for layer in range(layers)
    ]
    width = config.count("intermediate_size")
    return {
        **_grouped_attention(config),
        "ffn-hidden-size": config.count("intermediate_size_mlp"),
        "qk-l2-norm": config.switch("use_qk_norm", True),
        "no-rope-freq": None if all(rotates) else _pattern([not each for each in rotates]),
        "num-experts": _expert_count(config),
        "moe-ffn-hidden-size": width,
        "moe-shared-expert-intermediate-size": width,
        "moe-router-topk": config.count("num_experts_per_tok"),
        "moe-router-score-function": "sigmoid",
        "moe-apply-probs-on-input": True,
        **_moe_layers([layer in listed for layer in range(layers)]),
        **_aux_loss(config),
    }


FAMILIES: dict[str, Family] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _kimi_k2,
    "llama": _llama,
    "llama4_text": _llama4_text,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
