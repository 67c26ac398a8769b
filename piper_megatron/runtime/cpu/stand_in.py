"""Shorthand for the hooks of this package."""

from collections.abc import Callable
from typing import Any

from piper_megatron.runtime.hooks import Hook

TORCH_VERSIONS = ">=2.6"


def torch_hook(target: str, replace: Callable[[Any], Any], create: bool = False) -> Hook:
    """A hook on torch; `target` is `module:attribute`."""
    return Hook(
        id=target.replace(":", "."),
        target=target,
        replace=replace,
        distribution="torch",
        versions=TORCH_VERSIONS,
        create=create,
    )


def always(value: Any) -> Callable[[Any], Any]:
    """Replaces a function by one that takes anything and returns `value`."""

    def replace(_original: Any) -> Callable:
        def stand_in(*_args: Any, **_kwargs: Any) -> Any:
            return value

        return stand_in

    return replace
