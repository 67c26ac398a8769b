"""What attaches to Megatron: the hooks, applied at run time or as decorators in its source."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps

from piper_megatron.runtime.arguments import add_piper_group, notes, resolve
from piper_megatron.runtime.hooks import Hook, HookSet, require_known_megatron
from piper_megatron.runtime.user_errors import one_line_errors
from piper_megatron.switches import switched_on


def _add_group(original: Callable) -> Callable:
    @wraps(original)
    def add_megatron_arguments(parser, *args, **kwargs):
        return add_piper_group(original(parser, *args, **kwargs))

    return add_megatron_arguments


def _resolve_flags(original: Callable) -> Callable:
    @wraps(original)
    def parse_args(*args, **kwargs):
        from piper_megatron.runtime import cpu

        with one_line_errors():
            parsed = resolve(original(*args, **kwargs))
            _say_once(notes(parsed))
            if cpu.is_enabled():
                _say_once(cpu.translate(parsed))
            return parsed

    return parse_args


def _place_ranks(original: Callable) -> Callable:
    @wraps(original)
    def validate_args(args, *rest, **kwargs):
        from piper_megatron.runtime.parallel_state import place_ranks

        validated = original(args, *rest, **kwargs)
        with one_line_errors():
            return place_ranks(validated)

    return validate_args


def _add_groups(original: Callable) -> Callable:
    @wraps(original)
    def _initialize_distributed(embedding_ranks, position_ranks, store, *rest, **kwargs):
        from megatron.training import get_args

        from piper_megatron.runtime.parallel_state import build_expert_groups, placed_job

        job = placed_job()
        if job is not None and store is None:
            store = job.store
        original(embedding_ranks, position_ranks, store, *rest, **kwargs)
        build_expert_groups(timedelta(minutes=get_args().distributed_timeout_minutes))

    return _initialize_distributed


def _attach_dispatcher(original: Callable) -> Callable:
    @wraps(original)
    def __init__(self, *args, **kwargs):
        from piper_megatron.runtime.dispatch.attach import attach

        original(self, *args, **kwargs)
        attach(self)

    return __init__


def _remember_plans(original: Callable) -> Callable:
    @wraps(original)
    def checkpoint(function, *args, **kwargs):
        from piper_megatron.runtime.dispatch.recall import Remembering

        return original(Remembering(function), *args, **kwargs)

    return checkpoint


def _log_dispatcher(original: Callable) -> Callable:
    @wraps(original)
    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **kwargs):
        from piper_megatron.runtime.dispatch.stats import log_iteration

        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **kwargs)
        log_iteration(iteration)
        return result

    return training_log


HOOKS = (
    Hook(
        "arguments.group",
        "megatron.training.arguments:add_megatron_arguments",
        _add_group,
        "adds the --piper-* flags",
    ),
    Hook(
        "arguments.parse",
        "megatron.training.arguments:parse_args",
        _resolve_flags,
        "turns --piper-* flags into Megatron's arguments",
    ),
    Hook(
        "arguments.validate",
        "megatron.training.arguments:validate_args",
        _place_ranks,
        "gives every device its logical rank",
    ),
    Hook(
        "initialize.distributed",
        "megatron.training.initialize:_initialize_distributed",
        _add_groups,
        "adds node and rail groups",
    ),
    Hook(
        "dispatcher.attach",
        "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
        _attach_dispatcher,
        "gives MoE layers the dispatcher of --piper-dispatcher",
    ),
    Hook(
        "dispatcher.recall",
        "megatron.core.tensor_parallel.random:checkpoint",
        _remember_plans,
        "lets dispatchers recompute with the plan that they have",
    ),
    Hook(
        "dispatcher.log",
        "megatron.training.training:training_log",
        _log_dispatcher,
        "logs what --piper-dispatcher-stats counts",
    ),
)

_hooks = HookSet("megatron")
_in_source: set[str] = set()
_said: set[str] = set()


def register() -> None:
    """Applies the hooks; see `piper_megatron.register`."""
    if switched_on("PIPER_DISABLE") or _hooks.applied:
        return
    from piper_megatron.runtime import cpu

    require_known_megatron()
    if switched_on("PIPER_CPU") and not cpu.is_enabled():
        cpu.enable()
        _say_once(cpu.describe())
    _hooks.apply(HOOKS, _in_source)
    in_source = [f"in the source: {hook_id}" for hook_id in sorted(_in_source)]
    _say_once([f"piper_megatron: {line}" for line in [*_hooks.log, *in_source]])


def unregister() -> None:
    """Undoes `register`, the CPU backend included."""
    from piper_megatron.runtime import cpu

    if _hooks.applied:
        _hooks.undo()
    if cpu.is_enabled():
        cpu.disable()
    _said.clear()


def source_hook(function: Callable) -> Callable:
    """Decorator that a patched Megatron tree puts on a hooked function (see `patches/`)."""
    if switched_on("PIPER_DISABLE"):
        return function
    target = f"{function.__module__}:{function.__qualname__}"
    hook = next(hook for hook in HOOKS if hook.target == target)
    _in_source.add(hook.id)
    return hook.replace(function)


def _say_once(lines: list[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            if line not in _said:
                print(line, flush=True)
    _said.update(lines)
