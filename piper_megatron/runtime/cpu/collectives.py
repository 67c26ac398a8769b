"""Process groups are gloo's, whatever backend the program names."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from piper_megatron.runtime.cpu.stand_in import torch_hook

SUMMARY = "process groups use gloo in place of NCCL"


def gloo_for(backend: str | None) -> str | None:
    """Gloo in place of a backend that contains NCCL; others (gloo, fake) as they are."""
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


def _default_group(init_process_group: Callable) -> Callable:
    @wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        if gloo_for(backend) != backend:
            kwargs.pop("pg_options", None)
        init_process_group(gloo_for(backend) or "gloo", *args, **kwargs)

    return init


def _group(make: Callable) -> Callable:
    """For `new_group` and its like; NCCL's options mean nothing to gloo."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs and gloo_for(kwargs["backend"]) != kwargs["backend"]:
            kwargs["backend"] = gloo_for(kwargs["backend"])
            kwargs.pop("pg_options", None)
        return make(*args, **kwargs)

    return made


HOOKS = (
    torch_hook("torch.distributed:init_process_group", _default_group),
    *(
        torch_hook(f"torch.distributed:{name}", _group)
        for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration")
    ),
)
