"""Megatron's own core attention, taught that values may have another width than keys (MLA)."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from piper_megatron.runtime.hooks import Hook

SUMMARY = "core attention is Megatron's unfused one, with a width of its own for values"


def _accept_widths(init: Callable) -> Callable:
    @wraps(init)
    def __init__(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        init(self, *args, **kwargs)
        if v_channels is not None:
            # the width of the output; scores take the keys' width from the tensors themselves
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return __init__


MEGATRON_HOOKS = (
    Hook(
        "attention.widths",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        _accept_widths,
    ),
)
