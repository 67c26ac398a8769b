"""torch's norms under sequence parallelism.

Each tensor-parallel rank normalizes its part of the sequence, so the weight's gradient has to be
summed over the group; Megatron does so for parameters that carry the mark `sequence_parallel`.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from piper_megatron.runtime.hooks import Hook

SUMMARY = "norms are torch's, marked for sequence parallelism"


def _mark(new: Callable) -> Callable:
    @wraps(new)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        own_config = copy.copy(config)
        own_config.sequence_parallel = False
        norm = new(cls, own_config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return __new__


MEGATRON_HOOKS = (
    Hook("norm.sequence", "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _mark),
)
