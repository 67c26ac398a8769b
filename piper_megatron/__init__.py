"""Pipeline-by-expert-parallel grids for Megatron-Core training jobs."""

__version__ = "0.1.0"
__all__ = ["register", "unregister"]


def register() -> None:
    """Attaches the plug-in to the installed Megatron; without a `--piper-*` flag nothing changes.

    Raises:
        HookError: Megatron is missing, unsupported, or lacks a symbol (named in the message).
    """
    from piper_megatron.runtime.register import register

    register()


def unregister() -> None:
    """Restores every symbol that `register` replaced."""
    from piper_megatron.runtime.register import unregister

    unregister()
