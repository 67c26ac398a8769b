"""What autograd keeps between forward and backward of Megatron's own models, in bytes.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

import dataclasses
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from real_models import Case, megatron_config

from piper_megatron.layout.grid import ParallelLayout

SEQUENCE = 64
MICRO_BATCH = 2


@dataclasses.dataclass(frozen=True)
class Kept:
    """Of one micro-batch on one rank.

    Attributes:
        bytes: of all storages that autograd keeps, each counted once, without parameters and
            without what stays from one micro-batch to the next.
        rows: that this rank's experts received, in all layers.
    """

    bytes: int
    rows: int


def kept_by_autograd(case: Case, settings: dict[str, Any], rank: int | None = None) -> Kept:
    """Runs a micro-batch forward.

    Args:
        case: the model; all of it is on one pipeline stage.
        settings: of Megatron's configuration.
        rank: of the layout in torch's fake process group; None when the processes of a job over
            gloo call this.
    """
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    with _groups(case.layout, rank):
        model_parallel_cuda_manual_seed(1)
        gpt = _build(case, settings)
        before = {storage._cdata for storage in _forward(gpt, case)[0]}
        # what the first forward pass kept is alive until here, so no address is used twice
        storages, rows = _forward(gpt, case)
        parameters = {
            tensor.untyped_storage()._cdata for tensor in (*gpt.parameters(), *gpt.buffers())
        }
        return Kept(sum(s.nbytes() for s in storages if s._cdata not in before | parameters), rows)


def kept_of_all(cases: list[tuple[Case, dict[str, Any]]]) -> list[Kept]:
    """Of several cases, each as rank 0 of its layout."""
    return [kept_by_autograd(case, settings, rank=0) for case, settings in cases]


@dataclasses.dataclass(eq=False)
class _Held:
    """What autograd holds in place of a tensor; gone when nothing will need it."""

    tensor: Any


def _forward(gpt: Any, case: Case) -> tuple[list[Any], int]:
    """Storages that autograd keeps, and rows that local experts received."""
    import torch

    tokens = torch.randint(0, case.model.vocab, (MICRO_BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1)
    held: weakref.WeakSet[_Held] = weakref.WeakSet()
    rows: list[int] = []

    def keep(tensor: Any) -> _Held:
        held.add(kept := _Held(tensor))
        return kept

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        for name, module in gpt.named_modules()
        if name.endswith("mlp.experts")
    ]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        loss = gpt(tokens, positions, None, labels=tokens.roll(-1, 1))
    for hook in hooks:
        hook.remove()
    gpt.loss_of_the_last_forward_pass = loss  # with it, all that it keeps
    storages = [kept.tensor.untyped_storage() for kept in held]
    return list({storage._cdata: storage for storage in storages}.values()), sum(rows)


def _build(case: Case, settings: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    model = case.model
    config = dataclasses.replace(megatron_config(case), **settings)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=model.norm
    )
    mtp = None
    if model.mtp_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    gpt = GPTModel(
        config,
        spec,
        vocab_size=model.padded_vocab(case.layout.tp),
        max_sequence_length=model.max_positions,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type={"learned": "learned_absolute"}.get(model.position, model.position),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        mtp_block_spec=mtp,
    )
    for parameter in gpt.parameters():
        parameter.data = parameter.data.to(config.params_dtype).normal_(std=0.02)
    return gpt.train()


@contextmanager
def _groups(layout: ParallelLayout, rank: int | None) -> Iterator[None]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if rank is None:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=layout.world)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        MTPLossLoggingHelper.tracker.clear()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def peak_of_all(cases: list[tuple[Case, dict[str, Any]]]) -> list[int]:
    """Of several cases, each as rank 0 of its layout: the most bytes alive in one micro-batch.

    Forward and backward pass; parameters do not count, and a weight's gradient is gone as soon as
    it is complete.
    """
    return [_peak(case, settings) for case, settings in cases]


def _peak(case: Case, settings: dict[str, Any]) -> int:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with _groups(case.layout, 0):
        model_parallel_cuda_manual_seed(1)
        gpt = _build(case, settings)
        for parameter in gpt.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        _run(gpt, case)  # what stays is there now
        with living_storages() as living:
            _run(gpt, case)
        return living.peak


def _run(gpt: Any, case: Case) -> None:
    import torch

    tokens = torch.randint(0, case.model.vocab, (MICRO_BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1)
    gpt(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()


def _drop_gradient(parameter: Any) -> None:
    parameter.grad = None


def living_storages() -> Any:
    """A dispatch mode whose `peak` is the most bytes alive of storages made under it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Living(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes = self.peak = 0
            self.known: dict[int, int] = {}

        def __enter__(self) -> Any:
            self.resize = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = lambda storage, bytes: self._resized(storage, bytes)
            return super().__enter__()

        def __exit__(self, *exception: Any) -> None:
            torch.UntypedStorage.resize_ = self.resize
            super().__exit__(*exception)

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = {_storage(leaf) for leaf in tree_leaves((args, kwargs))} - {None}
            result = op(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                storage = _storage(leaf)
                if storage is None or storage in given or id(storage) in self.known:
                    continue
                self._holds(storage)
                weakref.finalize(storage, self._gone, id(storage))
            self.peak = max(self.peak, self.bytes)
            return result

        def _holds(self, storage: Any) -> None:
            self.bytes += storage.nbytes() - self.known.get(id(storage), 0)
            self.known[id(storage)] = storage.nbytes()

        def _gone(self, key: int) -> None:
            self.bytes -= self.known.pop(key)

        def _resized(self, storage: Any, bytes: int) -> Any:
            result = self.resize(storage, bytes)
            if id(storage) in self.known:
                self._holds(storage)
            return result

    return Living()


def _storage(value: Any) -> Any:
    import torch

    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
