"""Process groups are gloo's, whatever backend the program names.

NCCL's groups gather and scatter parts of different sizes, which an expert-tensor-parallel group
has; gloo's do so one part after the other.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from piper_megatron.runtime.cpu.stand_in import torch_hook

SUMMARY = "process groups use gloo in place of NCCL; it gathers uneven parts one by one"


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


def _gather_uneven(all_gather: Callable) -> Callable:
    @wraps(all_gather)
    def gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _even(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in _not_empty(tensor_list):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return gather


def _scatter_uneven(reduce_scatter: Callable) -> Callable:
    @wraps(reduce_scatter)
    def scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _even(input_list):
            return reduce_scatter(output, input_list, op, group, async_op)
        for rank, part in _not_empty(input_list):
            reduced = part.clone()  # gloo leaves partial sums on the other ranks
            dist.reduce(reduced, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(reduced)
        return None

    return scatter


def _hold(send: Callable) -> Callable:
    """Keeps what is being sent alive.

    A pipeline stage empties its output (`output.data = ...`) once the send has begun. NCCL's memory
    is not reused before the send ends; gloo would send whatever comes to lie there.
    """

    @wraps(send)
    def held_send(self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return send(self, [tensor.detach() for tensor in tensors], *args, **kwargs)

    return held_send


def _even(parts: list[torch.Tensor]) -> bool:
    return len({part.shape for part in parts}) == 1


def _not_empty(parts: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(rank, part) for rank, part in enumerate(parts) if part.numel()]


HOOKS = (
    torch_hook("torch.distributed:ProcessGroup.send", _hold),
    torch_hook("torch.distributed:all_gather", _gather_uneven),
    torch_hook("torch.distributed:reduce_scatter", _scatter_uneven),
    torch_hook("torch.distributed:init_process_group", _default_group),
    *(
        torch_hook(f"torch.distributed:{name}", _group)
        for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration")
    ),
)
