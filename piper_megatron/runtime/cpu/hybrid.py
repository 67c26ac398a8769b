"""Layers of HybridModel, which Megatron builds of Transformer Engine's whatever the flags say.

Each hybrid layer is one half of a GPT layer: an attention or an MLP with the norm before it. The
halves are taken from Megatron's own local GPT layers.
"""

from dataclasses import fields, replace
from typing import Any

from piper_megatron.runtime.hooks import Hook

SUMMARY = "layers of HybridModel are Megatron's own in place of Transformer Engine's"

_VERSIONS = ">=0.18,<0.20"
_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda", "sharded_state_dict_keys_map")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda", "sharded_state_dict_keys_map")


def _local_layers(layers: Any) -> Any:
    """`HybridStackSubmodules` like the given ones, but with local layers."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )

    dense = get_gpt_layer_local_spec()
    latent = get_gpt_layer_local_spec(multi_latent_attention=True)
    # how many experts there are, the model's configuration says; here, that there are some
    experts = get_gpt_layer_local_spec(num_experts=1)
    mtp_layer = get_mtp_layer_spec_for_backend(None, LocalSpecProvider())
    local = {
        "attention_layer": _half(layers.attention_layer, dense, _ATTENTION),
        "mlp_layer": _half(layers.mlp_layer, dense, _MLP),
        "moe_layer": _half(layers.moe_layer, experts, _MLP),
        "mtp_block_spec": replace(
            layers.mtp_block_spec,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[mtp_layer]),
        ),
    }
    if "mla_layer" in {field.name for field in fields(layers)}:  # since 0.19
        local["mla_layer"] = _half(layers.mla_layer, latent, _ATTENTION)
    return replace(layers, **local)


def _half(layer: Any, gpt_layer: Any, names: tuple[str, ...]) -> Any:
    """The spec of a hybrid layer with some of a GPT layer's submodules, and none of the others."""
    gpt = gpt_layer.submodules
    return replace(layer, submodules=type(gpt)(**{name: getattr(gpt, name) for name in names}))


def _torch_norm(_te_norm: Any) -> type:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class TENorm(WrappedTorchNorm):
        """A class of its own, which undoing the hook tells from other uses of torch's norm."""

    return TENorm


MEGATRON_HOOKS = (
    Hook("hybrid.norm", "megatron.core.extensions.transformer_engine:TENorm", _torch_norm),
    Hook(
        "hybrid.layers",
        "megatron.core.models.hybrid.hybrid_layer_specs:hybrid_stack_spec.submodules",
        _local_layers,
        versions=_VERSIONS,
    ),
)
