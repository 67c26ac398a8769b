"""Token counts on the host.

Megatron brings the split sizes of its all-to-all from the GPU to the host, as numpy arrays; tensors
that are on the host already it leaves as tensors, which torch.distributed does not take.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper_megatron.runtime.hooks import Hook

SUMMARY = "the dispatcher's split sizes become numpy arrays without a copy from a device"


def _convert(maybe_move_tensor_to_cpu: Callable) -> Callable:
    @wraps(maybe_move_tensor_to_cpu)
    def moved(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        tensor = maybe_move_tensor_to_cpu(tensor, as_numpy=as_numpy, **kwargs)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return moved


MEGATRON_HOOKS = (
    Hook(
        "dispatcher.splits",
        "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        _convert,
    ),
)
