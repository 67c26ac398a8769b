"""Packages whose kernels need a GPU are as good as not installed.

A cluster's environment has them; Megatron would take their kernels for CPU tensors.
"""

from typing import Any

from piper_megatron.runtime.cpu.stand_in import torch_hook

SUMMARY = "kernels for GPUs count as not installed; torch.compile leaves functions as they are"

_GPU_PACKAGES = (
    *("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn"),
    *("flash_attn_3", "flash_attn_interface", "flashinfer", "grouped_gemm", "deep_ep"),
    *("mamba_ssm", "causal_conv1d", "fla", "fused_weight_gradient_mlp_cuda", "nvidia_kitchen"),
)


def _no_module(_original: Any) -> None:
    """`import` treats None in `sys.modules` as a module that does not exist."""


def _leave_uncompiled(_original: Any) -> Any:
    """For `torch.compile`, called with a function or, as a decorator, with options only."""

    def compile(model: Any = None, **_options: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile


HOOKS = (
    *(torch_hook(f"sys:modules.{name}", _no_module, create=True) for name in _GPU_PACKAGES),
    torch_hook("torch:compile", _leave_uncompiled),
)
