"""The collectives that Megatron's own models make, in bytes.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

from typing import Any, NamedTuple

from real_activations import MICRO_BATCH, SEQUENCE
from real_activations import _build as build_model
from real_activations import _groups as process_groups
from real_models import Case


class Recorded(NamedTuple):
    """One collective of a rank.

    Attributes:
        operation: as `layout.collectives.Operation` spells it.
        tensor_bytes: that the members have together; of an all-to-all, what this rank holds.
        width: elements of a row.
        phase: `forward` or `backward`.
    """

    operation: str
    tensor_bytes: int
    width: int
    phase: str


def collectives_of_all(cases: list[tuple[Case, dict[str, Any]]]) -> list[list[Recorded]]:
    """Of one micro-batch of several cases, each as rank 0 over torch's fake backend."""
    return [collectives_of(case, settings, rank=0) for case, settings in cases]


def collectives_of(case: Case, settings: dict[str, Any], rank: int | None) -> list[Recorded]:
    """Of one micro-batch.

    Args:
        case: the model; all of it is on one pipeline stage.
        settings: of Megatron's configuration.
        rank: of the layout in torch's fake process group; None when the processes of a job over
            gloo call this.
    """
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with process_groups(case.layout, rank):
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        gpt = build_model(case, settings)
        tokens = torch.randint(0, case.model.vocab, (MICRO_BATCH, SEQUENCE))
        positions = torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1)
        with _recorder() as recorder:
            loss = gpt(tokens, positions, None, labels=tokens.roll(-1, 1)).mean()
            recorder.phase = "backward"
            loss.backward()
        return recorder.seen


def _recorder() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    # torch's name -> ours, and the argument that holds the whole tensor
    names = {
        "allreduce_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "alltoall_base_": ("all_to_all", 1),
    }

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.phase = "forward"
            self.seen: list[Recorded] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                name, position = names[func._schema.name.split("::")[1]]
                tensor = args[position]
                tensor = tensor[0] if isinstance(tensor, list | tuple) else tensor
                size = tensor.numel() * tensor.element_size()
                width = tensor.shape[-1] if tensor.dim() > 1 else 1
                self.seen.append(Recorded(name, size, width, self.phase))
            return func(*args, **(kwargs or {}))

    assert torch.distributed.is_initialized()
    return Recorder()
