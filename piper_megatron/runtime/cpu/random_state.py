"""One random generator serves as the host's and as the device's: torch's default generator.

Operations on CPU tensors draw from it, so it has to play the CUDA generator, which Megatron keeps
equal on the ranks of a tensor-parallel group. A data loader draws its seed from the host's
generator, and only on the ranks that read data; here it gets a generator of its own.
"""

import logging
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from piper_megatron.runtime.cpu.stand_in import torch_hook
from piper_megatron.runtime.hooks import Hook

SUMMARY = "one random generator serves as the host's and as the device's"

_MODULES = ("torch.cuda", "torch.cuda.random")


def _state(_original: Any) -> Callable:
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    return get_rng_state


def _set_state(_original: Any) -> Callable:
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(new_state)

    return set_rng_state


def _seed(_original: Any) -> Callable:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


def _own_generator(init: Callable) -> Callable:
    """For `DataLoader.__init__`, which also pins memory if asked."""

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        init(self, *args, **kwargs)

    return __init__


def _silent(_logging: Any) -> SimpleNamespace:
    """Megatron warns when work on the device draws from the host's generator, as it must here."""
    logger = logging.Logger("silent", level=logging.CRITICAL)
    return SimpleNamespace(getLogger=lambda _name: logger)


HOOKS = (
    *(torch_hook(f"{module}:get_rng_state", _state) for module in _MODULES),
    *(torch_hook(f"{module}:set_rng_state", _set_state) for module in _MODULES),
    *(torch_hook(f"{module}:manual_seed", _seed) for module in _MODULES),
    *(torch_hook(f"{module}:manual_seed_all", _seed) for module in _MODULES),
    torch_hook("torch.cuda:default_generators", lambda _original: (torch.default_generator,)),
    torch_hook("torch.utils.data:DataLoader.__init__", _own_generator),
)
MEGATRON_HOOKS = (Hook("random.warning", "megatron.core.tensor_parallel.random:logging", _silent),)
