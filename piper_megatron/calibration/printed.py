"""Megatron's arguments as a job prints them: `name ..... text`, a line each."""

import argparse
import ast
import re
from collections.abc import Mapping
from typing import Any

from piper_megatron.workload import flags
from piper_megatron.workload.command import PIPER_OPTIONS

_WORDS = {"None": None, "True": True, "False": False}
_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
_MEMBER = re.compile(r"[A-Z]\w*\.(\w+)")  # of an enumeration: AttnBackend.flash
_MEMBERS = re.compile(r"<[A-Z]\w*\.(\w+): [^>]*>")  # in a list: [<CudaGraphModule.attn: 1>]
# Megatron fills these in from num_layers and seq_length
_COPIES = ("encoder_num_layers", "encoder_seq_length")


def printed_values(texts: Mapping[str, str]) -> argparse.Namespace:
    """The values behind the texts; what cannot be read is left at Megatron's default.

    Args:
        texts: destination -> what stands behind the dots.
    """
    known = _options()
    values = flags.defaults() | {option.dest: option.default for option in PIPER_OPTIONS}
    for dest, text in texts.items():
        if dest in known and dest not in _COPIES:
            try:
                values[dest] = _value(known[dest], text)
            except (ValueError, SyntaxError):
                continue
    return argparse.Namespace(**values)


def _options() -> dict[str, flags.Option]:
    """Destination -> option, of the newest release that has it."""
    found = {option.dest: option for option in PIPER_OPTIONS}
    for version in reversed(flags.supported_versions()):
        found |= {option.dest: option for option in flags.options(version).values()}
    return found


def _value(option: flags.Option, text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("["):
        return ast.literal_eval(_MEMBERS.sub(r"'\1'", text))
    if text in _DTYPES:
        return _DTYPES[text]
    if option.type == "str":
        member = _MEMBER.fullmatch(text)
        return member[1] if member else text
    return flags.CONVERTERS[option.type][0](text)
