"""What training a MoE with Piper's dispatchers holds at most, in bytes.

Runs where the CPU backend is in force (a fork of `ranks.RankServer`).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from real_activations import _build, _drop_gradient, _groups, _run, living_storages
from real_models import Case


@dataclass(frozen=True)
class Held:
    """Of one micro-batch on one rank.

    Attributes:
        peak: most bytes alive, without parameters and what stays between micro-batches.
        rows: that this rank's experts received, in all layers.
    """

    peak: int
    rows: int


def peaks_by_algorithm(
    case: Case, settings: dict[str, Any], algorithms: list[str], hosts: list[str]
) -> dict[str, Held]:
    """Trains a micro-batch with every dispatcher; all of the model is on one pipeline stage.

    Args:
        case: the model.
        settings: of Megatron's configuration.
        algorithms: None of Piper's for `alltoall`.
        hosts: of the members of the expert group.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from piper_megatron.runtime.dispatch.groups import split_group

    with _groups(case.layout, None):
        ep = parallel_state.get_expert_model_parallel_group()
        groups = split_group(ep, hosts, timedelta(minutes=1))
        held = {}
        for algorithm in algorithms:
            torch.manual_seed(1)
            model_parallel_cuda_manual_seed(1)
            gpt = _build(case, settings)
            _put_in(gpt, algorithm, groups)
            for parameter in gpt.parameters():
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
            _run(gpt, case)
            rows: list[int] = []
            for name, module in gpt.named_modules():
                if name.endswith("mlp.experts"):
                    module.register_forward_pre_hook(lambda _, x, rows=rows: rows.append(len(x[0])))
            with living_storages() as living:
                _run(gpt, case)
            held[algorithm] = Held(living.peak, sum(rows))
        return held


def _put_in(gpt: Any, algorithm: str, groups: Any) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from piper_megatron.runtime.dispatch.dispatcher import DispatcherSpec

    for layer in gpt.modules():
        if isinstance(layer, MoELayer) and algorithm != "alltoall":
            old = layer.token_dispatcher
            layer.token_dispatcher = DispatcherSpec(algorithm, groups).build(
                old.num_local_experts,
                old.local_expert_indices,
                layer.config,
                ProcessGroupCollection(
                    ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group
                ),
            )
