"""What torch.cuda answers about devices and memory: one device, always there, no memory statistics.

The device claims the newest architecture, so that Megatron asks for none of the settings that
older GPUs need (CUDA_DEVICE_MAX_CONNECTIONS).
"""

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from piper_megatron.runtime.cpu.stand_in import always, torch_hook

SUMMARY = "torch.cuda queries answer for the CPU; memory statistics are zero"

_CAPABILITY = (10, 0)
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_current_stream_capturing": False,
    "init": None,
    "_lazy_init": None,
    "device_count": 1,
    "current_device": 0,
    "set_device": None,
    "get_device_capability": _CAPABILITY,
    "get_device_name": "CPU",
    "synchronize": None,
    "empty_cache": None,
    "ipc_collect": None,
    "utilization": 0,
    "device_memory_used": 0,
}
_MEMORY_ANSWERS: dict[str, Any] = {
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "reset_peak_memory_stats": None,
    "reset_accumulated_memory_stats": None,
    "memory_summary": "",
    "memory_snapshot": [],
}


def _call_now(_original: Any) -> Callable:
    """`_lazy_call` queues work until CUDA starts, which it never does here."""

    def _lazy_call(function: Callable, **_kwargs: Any) -> None:
        function()

    return _lazy_call


def _properties(_original: Any) -> Callable:
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="CPU",
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=_host_bytes("SC_PHYS_PAGES"),
            multi_processor_count=os.cpu_count(),
        )

    return get_device_properties


def _memory_info(_original: Any) -> Callable:
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return _host_bytes("SC_AVPHYS_PAGES"), _host_bytes("SC_PHYS_PAGES")

    return mem_get_info


def _memory_stats(_original: Any) -> Callable:
    def memory_stats(device: Any = None) -> dict[str, int]:
        return defaultdict(int)

    return memory_stats


def _no_context(_original: Any) -> Callable:
    """`torch.cuda.device(0)` is a context manager."""
    return lambda *_args, **_kwargs: nullcontext()


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


# a query that this torch does not have yet is harmless to add
HOOKS = (
    *(
        torch_hook(f"torch.cuda:{name}", always(value), create=True)
        for name, value in _ANSWERS.items()
    ),
    *(
        torch_hook(f"{module}:{name}", always(value), create=True)
        for name, value in _MEMORY_ANSWERS.items()
        for module in ("torch.cuda", "torch.cuda.memory")
    ),
    *(
        torch_hook(f"{module}:{name}", replace)
        for name, replace in (("mem_get_info", _memory_info), ("memory_stats", _memory_stats))
        for module in ("torch.cuda", "torch.cuda.memory")
    ),
    torch_hook("torch.cuda:_lazy_call", _call_now),
    torch_hook("torch.cuda:get_device_properties", _properties),
    torch_hook("torch.cuda:device", _no_context),
    torch_hook("torch.accelerator:current_accelerator", always(None)),
    torch_hook("torch.accelerator:is_available", always(False)),
)
