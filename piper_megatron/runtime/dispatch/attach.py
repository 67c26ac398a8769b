"""Puts a dispatcher into Megatron's MoE layers, once they are built."""

from functools import cache
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args

from piper_megatron.runtime.dispatch.choice import resolve_dispatcher
from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec
from piper_megatron.runtime.dispatch.stats import LayerRecorder
from piper_megatron.runtime.parallel_state import expert_groups
from piper_megatron.workload.dispatcher_flags import dispatcher_flags


def attach(layer: Any) -> None:
    """Replaces the alltoall dispatcher of a MoELayer, if `--piper-dispatcher` asks for it."""
    spec = _job_spec()
    if spec is None:
        return
    old = layer.token_dispatcher
    recorder = LayerRecorder(layer, spec.algorithm) if _flags().stats else None
    layer.token_dispatcher = spec.build(
        old.num_local_experts,
        old.local_expert_indices,
        layer.config,
        ProcessGroupCollection(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group),
        where=lambda: f"{'MTP layer' if layer.is_mtp_layer else 'layer'} {layer.layer_number}",
        recorder=recorder,
    )
    if old.shared_experts is not None:
        layer.token_dispatcher.set_shared_experts(old.shared_experts)


def _flags() -> Any:
    return dispatcher_flags(get_args())


@cache
def _job_spec() -> DispatcherSpec | None:
    """The dispatcher of this job; None without `--piper-dispatcher`."""
    flags, groups = _flags(), expert_groups()
    if flags.algorithm is None:
        return None
    assert groups is not None, "ranks are placed when a flag is given"
    algorithm, chunks = resolve_dispatcher(get_args(), groups)
    return DispatcherSpec(algorithm, groups, chunks)
