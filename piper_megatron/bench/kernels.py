"""Calls on one device: products, attention, memory-bound kernels, launches, copies, host's Adam."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from piper_megatron.bench.clock import Call
from piper_megatron.bench.points import Point

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(point: Point, device: torch.device) -> Call:
    """The call of a point; its operands are made here.

    Raises:
        RuntimeError: torch has no such kernel on this device.
    """
    dtype = DTYPES[point.dtype or "fp32"]
    return _MAKERS[point.kind](point.what, point.size, dtype, device)


def _product(what: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> Call:
    rows, inputs, outputs, groups = (size[n] for n in ("rows", "inputs", "outputs", "groups"))
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    if what in ("single", "loop"):
        # experts one after the other, as Megatron's SequentialMLP
        weights = torch.randn(groups, inputs, outputs, dtype=dtype, device=device).unbind()
        parts = x.chunk(groups)
        return lambda: [torch.mm(part, w) for part, w in zip(parts, weights, strict=True)]
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * (rows // groups)
    if what == "grouped":
        stacked = torch.randn(groups, inputs, outputs, dtype=dtype, device=device)
        return lambda: functional.grouped_mm(x, stacked, offs=ends)
    gradient = torch.randn(rows, outputs, dtype=dtype, device=device)
    return lambda: functional.grouped_mm(x.t(), gradient, offs=ends)


def _attention(what: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> Call:
    shape = (size["batch"], size["heads"], size["seq"], size["channels"])
    query, key, value = (
        torch.randn(shape, dtype=dtype, device=device, requires_grad=what == "backward")
        for _ in range(3)
    )
    if what == "forward":
        return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)


def _memory(what: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> Call:
    rows, width = size["rows"], size["width"]
    x = torch.randn(rows, width, dtype=dtype, device=device)
    # results are allocated anew, as in a training
    if what == "copy":
        return x.clone
    if what == "add":
        other = torch.randn_like(x)
        return lambda: x + other
    if what == "norm":
        weight = torch.ones(width, dtype=dtype, device=device)
        return lambda: functional.rms_norm(x, (width,), weight)
    if what == "permute":
        order = torch.randperm(rows, device=device)
        return lambda: torch.index_select(x, 0, order)
    if what == "cast":
        return lambda: x.to(torch.bfloat16)
    target = torch.randint(0, width, (rows, 1), device=device)
    return lambda: _cross_entropy(x, target)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The unfused one of Megatron, forward, step by step (tensor_parallel/cross_entropy.py)."""
    scores = logits.float()
    scores = scores - scores.max(dim=-1, keepdim=True).values
    chosen = scores.gather(1, target)
    exponentials = torch.exp(scores)
    total = exponentials.sum(dim=-1, keepdim=True)
    exponentials.div_(total)
    return torch.log(total) - chosen


class _Linear(torch.autograd.Function):
    """A product with gradients written in Python, as Megatron's tensor-parallel ones are."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        x, weight = context.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


def _host(what: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> Call:
    if what == "adam":
        parameter = torch.nn.Parameter(torch.randn(size["elements"], dtype=dtype))
        parameter.grad = torch.randn_like(parameter)
        return torch.optim.Adam([parameter]).step
    width, layers = size["width"], size["layers"]
    weights = torch.randn(layers, width, width, device=device, requires_grad=True).unbind()
    x = torch.randn(width, width, device=device, requires_grad=True)

    def passes() -> None:
        y = x
        for weight in weights:
            normed = functional.rms_norm(y, (width,))
            y = y + functional.gelu(_Linear.apply(normed, weight))
        y.backward(torch.ones_like(y))

    return passes


def _copy(what: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> Call:
    on_host = torch.zeros(size["bytes"], dtype=torch.uint8).pin_memory()
    on_device = torch.zeros(size["bytes"], dtype=torch.uint8, device=device)
    if what == "to_device":
        return lambda: on_device.copy_(on_host, non_blocking=True)
    return lambda: on_host.copy_(on_device, non_blocking=True)


_MAKERS: dict[str, Callable[[str, dict[str, int], torch.dtype, torch.device], Call]] = {
    "product": _product,
    "attention": _attention,
    "memory": _memory,
    "host": _host,
    "copy": _copy,
}
