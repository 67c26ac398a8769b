"""Recomputation of outputs that were discarded in the forward pass.

Megatron prepares for FP8 whether or not it is on, with functions of Transformer Engine, and gives
the recomputed memory to the old tensors with an extension that it compiles when it first needs it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper_megatron.runtime.cpu.stand_in import always
from piper_megatron.runtime.hooks import Hook

SUMMARY = "recomputed outputs are copied into the discarded ones; nothing is compiled for it"

_MODULE = "megatron.core.tensor_parallel.random"


def _without_fp8(init: Callable) -> Callable:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.fp8 = False

    return __init__


def _refill(discarded: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fills the storage, which all views of the discarded tensor share."""
    source = recomputed.untyped_storage()
    discarded.untyped_storage().resize_(source.nbytes())
    discarded.untyped_storage().copy_(source)


MEGATRON_HOOKS = (
    Hook("recompute.fp8", f"{_MODULE}:CheckpointWithoutOutput.__init__", _without_fp8),
    Hook("recompute.storage", f"{_MODULE}:_get_share_storage", always(_refill)),
)
