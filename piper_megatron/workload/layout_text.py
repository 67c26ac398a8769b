"""The text of `--pipeline-model-parallel-layout`."""

import re

from piper_megatron.errors import LayoutError

LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_NO_MODEL_IS_LONGER = 100_000  # symbols of an unrolled text


def stages_of_text(text: str) -> list[str]:
    """One text of `E`, `t`, `m` and `L` for each stage, as `parse_str_to_list` unrolls it."""
    expanded = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        length = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, expanded))
        if length > _NO_MODEL_IS_LONGER:
            raise LayoutError(
                f"{LAYOUT_FLAG} '{text}' unrolls to more than {_NO_MODEL_IS_LONGER:,} symbols"
            )
        expanded = re.sub(pattern, lambda m: m[1] * int(m[2]), expanded)
    for symbol in expanded:
        if symbol not in "EtmL|":
            raise LayoutError(
                f"{LAYOUT_FLAG} '{text}' has '{symbol}'; legal are E (embedding), t (decoder "
                "layer), m (MTP layer), L (loss), | (next stage), x*n and (...)*n"
            )
    return expanded.split("|")
