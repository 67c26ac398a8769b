"""Puts a dispatcher into Megatron's MoE layers, once they are built."""

from functools import cache
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args

from piper_megatron.runtime.dispatch.choice import resolve_dispatcher
from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec
from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.stats import LayerRecorder
from piper_megatron.runtime.parallel_state import expert_groups
from piper_megatron.workload.dispatcher_flags import dispatcher_flags


def attach(layer: Any) -> None:
    """Replaces the alltoall dispatcher of a MoELayer, if `--piper-dispatcher` asks for it."""
    groups = expert_groups()
    if groups is None:  # no --piper-* flag, or no training job
        return
    flags, spec = dispatcher_flags(get_args()), _job_spec(groups)
    if spec is None:
        return
    old = layer.token_dispatcher
    recorder = LayerRecorder(layer, spec.algorithm) if flags.stats else None
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


@cache
def _job_spec(groups: ExpertGroups) -> DispatcherSpec | None:
    """The dispatcher of this job; None without `--piper-dispatcher`."""
    args = get_args()
    if dispatcher_flags(args).algorithm is None:
        return None
    algorithm, chunks = resolve_dispatcher(args, groups)
    return DispatcherSpec(algorithm, groups, chunks)
