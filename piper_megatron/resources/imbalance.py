"""Load imbalance of experts out of a routing trace."""

import json
from pathlib import Path

import numpy as np

from piper_megatron.errors import WorkloadError


def imbalance_of_trace(path: Path, ep: int) -> float:
    """Rows of the most loaded expert-parallel rank over the mean, in the layer where it is worst.

    Megatron gives rank r the experts r E / EP to (r + 1) E / EP - 1 of a layer.

    Args:
        path: one JSON array a line: rows that each expert of one MoE layer received.
        ep: expert parallel size.

    Raises:
        WorkloadError: one line that names the file, the line and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise WorkloadError(f"cannot read the routing trace {path}: {reason}") from None
    loads = [
        _imbalance(line, ep, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not loads:
        raise WorkloadError(f"the routing trace {path} has no layer")
    return max(loads)


def _imbalance(line: str, ep: int, where: str) -> float:
    try:
        rows = np.array(json.loads(line), dtype=float)
    except ValueError:
        rows = np.empty(0)
    if rows.ndim != 1 or not rows.size or (rows < 0).any() or not np.isfinite(rows).all():
        raise WorkloadError(f"{where}: a layer is an array of rows by expert, such as [512, 498]")
    if rows.size % ep:
        raise WorkloadError(f"{where}: {rows.size} experts cannot be shared by EP {ep}")
    by_rank = rows.reshape(ep, -1).sum(axis=1)
    if not by_rank.any():
        raise WorkloadError(f"{where}: no expert received a row")
    return float(by_rank.max() / by_rank.mean())
