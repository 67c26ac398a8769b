"""Tensors that are asked onto a CUDA device stay on the CPU.

`device` may be "cuda", "cuda:1", a torch.device, or a number; it is an argument of the functions
that make tensors, of `Tensor.to`, and of loading. Megatron also looks at `Tensor.type()`, which
names the device, and pins memory for faster copies to it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper_megatron.runtime.cpu.stand_in import always, torch_hook

SUMMARY = "device='cuda' means the CPU: tensors are made, moved and loaded there; none is pinned"

_MAKERS = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "empty", "zeros", "ones", "full"),
    *("rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "empty_strided", "tril_indices", "triu_indices"),
)
_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def host(device: Any) -> Any:
    """The CPU in place of a CUDA device; any other value as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return torch.device("cpu")
    return device


def _at_home(make: Callable) -> Callable:
    """For functions that take `device` and `pin_memory` as keywords."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _move(to: Callable) -> Callable:
    """For `Tensor.to`, whose first argument may be a device, a dtype or a tensor."""
    to_home = _at_home(to)

    @wraps(to)
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to_home(self, *map(host, args[:1]), *args[1:], **kwargs)

    return moved


def _stay(_original: Any) -> Callable:
    """For methods that move a tensor and return it: `cuda`, `pin_memory`."""

    def stay(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    return stay


def _cuda_type(type_: Callable) -> Callable:
    """`Tensor.type()` says `torch.cuda.FloatTensor`; `Tensor.type(dtype)` converts as ever."""

    @wraps(type_)
    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_(self).replace("torch.", "torch.cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_(self, dtype, *args, **kwargs)

    return cuda_type


def _load_at_home(load: Callable) -> Callable:
    @wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, "cpu" if map_location is None else host(map_location), *args, **kwargs)

    return loaded


def _autocast_at_home(init: Callable) -> Callable:
    @wraps(init)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__


class _TensorType(type):
    """A class like `torch.cuda.FloatTensor` whose instances are CPU tensors."""

    cpu_type: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.cpu_type)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cls.cpu_type(*args, **kwargs)


def _cpu_type(name: str) -> Callable[[Any], type]:
    return lambda _original: _TensorType(name, (), {"cpu_type": getattr(torch, name)})


HOOKS = (
    *(torch_hook(f"torch:{name}", _at_home) for name in _MAKERS),
    *(torch_hook(f"torch:Tensor.{name}", _at_home) for name in _METHODS),
    torch_hook("torch:Tensor.to", _move),
    torch_hook("torch:Tensor.cuda", _stay),
    torch_hook("torch:Tensor.pin_memory", _stay),
    torch_hook("torch:Tensor.is_pinned", always(False)),
    torch_hook("torch:Tensor.type", _cuda_type),
    torch_hook("torch:load", _load_at_home),
    torch_hook("torch.amp.autocast_mode:autocast.__init__", _autocast_at_home),
    *(
        torch_hook(f"torch.cuda:{kind}Tensor", _cpu_type(f"{kind}Tensor"), create=True)
        for kind in _TYPES
    ),
)
