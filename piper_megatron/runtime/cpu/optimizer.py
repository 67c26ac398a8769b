"""torch's Adam in checkpoints of the distributed optimizer.

The fused Adam of a GPU run counts steps once for each parameter group; torch's counts them in the
state of every parameter, and has no state before its first step. Megatron reads the count from
there before it loads, takes it for a state like the moments, and gives one and the same tensor to
all parameters, which then count it up together.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper_megatron.runtime.hooks import Hook

SUMMARY = "Adam is torch's, and its step counter is kept through checkpoints"

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _start_counting(state_dict: Callable) -> Callable:
    @wraps(state_dict)
    def started(self: Any) -> dict[str, Any]:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return state_dict(self)

    return started


def _keep_count(set_states: Callable) -> Callable:
    @wraps(set_states)
    def set_all_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][place]
        set_states(self, model_param, {**tensors, "step": self.optimizer.state[main_param]["step"]})

    return set_all_but_step


def _count_apart(load_state_dict: Callable) -> Callable:
    @wraps(load_state_dict)
    def loaded(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return loaded


MEGATRON_HOOKS = (
    Hook("optimizer.save", f"{_OPTIMIZER}.state_dict", _start_counting),
    Hook("optimizer.states", f"{_OPTIMIZER}._set_main_param_and_optimizer_states", _keep_count),
    Hook("optimizer.load", f"{_OPTIMIZER}.load_state_dict", _count_apart),
)
