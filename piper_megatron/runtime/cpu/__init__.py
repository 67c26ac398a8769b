"""Runs the unmodified Megatron training loop on CPU tensors over gloo, for rehearsal."""

from piper_megatron.runtime.cpu.arguments import translate
from piper_megatron.runtime.cpu.backend import describe, disable, enable, is_enabled

__all__ = ["describe", "disable", "enable", "is_enabled", "translate"]
