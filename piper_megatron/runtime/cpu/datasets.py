"""The compiled helpers of Megatron's datasets: the wheel has them, but not the Makefile."""

import importlib.util
from collections.abc import Callable
from functools import wraps

from piper_megatron.runtime.hooks import Hook

SUMMARY = "dataset helpers are not compiled again where the wheel brings them"


def _unless_compiled(compile_helpers: Callable) -> Callable:
    @wraps(compile_helpers)
    def compile_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_if_missing


MEGATRON_HOOKS = (
    Hook("datasets.helpers", "megatron.core.datasets.utils:compile_helpers", _unless_compiled),
)
