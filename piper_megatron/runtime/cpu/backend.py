"""The CPU backend as a whole: everything that gives way, in two steps.

torch's part comes first and Megatron is imported under it, because Megatron copies some of torch's
names when it is imported.
"""

from piper_megatron.runtime.cpu import (
    attention,
    collectives,
    datasets,
    dispatcher,
    hybrid,
    norm,
    optimizer,
    packages,
    queries,
    random_state,
    recompute,
    streams,
    tensors,
)
from piper_megatron.runtime.hooks import HookSet

_CONCERNS = (
    tensors,
    queries,
    streams,
    random_state,
    collectives,
    packages,
    attention,
    norm,
    recompute,
    optimizer,
    dispatcher,
    hybrid,
    datasets,
)
_torch_hooks = HookSet("torch on the CPU")
_megatron_hooks = HookSet("Megatron on the CPU")


def enable() -> None:
    """Makes torch and Megatron run on CPU tensors over gloo; once in a process, before Megatron.

    Raises:
        HookError: torch or Megatron lacks a symbol (named in the message).
    """
    _torch_hooks.apply(hook for concern in _CONCERNS for hook in getattr(concern, "HOOKS", ()))
    try:
        _megatron_hooks.apply(
            hook for concern in _CONCERNS for hook in getattr(concern, "MEGATRON_HOOKS", ())
        )
    except Exception:
        _torch_hooks.undo()
        raise


def disable() -> None:
    """Restores every symbol that `enable` replaced."""
    _megatron_hooks.undo()
    _torch_hooks.undo()


def is_enabled() -> bool:
    """Whether the backend is in force."""
    return _torch_hooks.applied


def describe() -> list[str]:
    """What gives way, one line for each concern, for the start of a run."""
    return [
        "CPU backend: a rehearsal on CPU tensors; its timings are not a GPU's",
        *(f"CPU backend: {concern.SUMMARY}" for concern in _CONCERNS),
    ]
