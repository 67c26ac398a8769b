"""Compares an accelerator's curves with a public table of operator efficiencies.

    python tools/compare_operators.py PLATFORM TABLE.json

The table is a system file of SimuMax (github.com/MooreThreads/SimuMax at 4dcaae51, configs/system/
`b200_bf16_ceperm.json` for dgx-b200, `a100_pcie.json` for dgx-a100): operator and shape -> share of
the dense bf16 peak. Printed is predicted over measured time.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.kernels import fused_attention, linear, product_s

STAGES = {"fwd": "forward", "bwd_grad_act": "input gradient", "bwd_grad_w": "weight gradient"}


def shape_of(text: str) -> dict[str, str]:
    """`a=1, b=2` as a mapping."""
    return dict(re.findall(r"(\w+)=(\w+)", text))


def dense_s(device: Accelerator, shape: dict[str, str]) -> tuple[float, float]:
    """Predicted seconds and FLOP of a matrix product."""
    m, k, n = (int(shape[key]) for key in "mkn")
    result = (4 if shape["out_dtype"] == "fp32" else 2) * (
        2 if shape["accumulate"] == "True" else 1
    )
    moved = 2 * m * k + 2 * k * n + result * m * n
    return float(product_s(device, "bf16", 2 * m * k * n, moved)), 2.0 * m * k * n


def grouped_s(device: Accelerator, shape: dict[str, str]) -> tuple[float, float]:
    """Predicted seconds and FLOP of a grouped product, or of one of its gradients."""
    groups, rows, n, k = (int(shape[key]) for key in ("ng", "M", "N", "K"))
    gradient = 4 if shape["main_grad_dtype"] == "fp32" else 2
    work = linear(
        device,
        "bf16",
        groups * rows,
        k,
        n,
        groups=groups,
        grouped=True,
        gradient_bytes=gradient,
    )
    seconds = {
        "fwd": work.forward_s,
        "bwd_grad_act": work.backward_s - work.weight_s,
        "bwd_grad_w": work.weight_s,
    }[shape["stage"]]
    return float(seconds), 2.0 * groups * rows * n * k


def attention_s(device: Accelerator, shape: dict[str, str], name: str) -> tuple[float, float]:
    """Predicted seconds of causal attention, and the FLOP of the full square."""
    batch, seq, heads, query, value = (
        int(shape[key]) for key in ("batch", "seq_len", "head_num", "qk_head_dim", "v_head_dim")
    )
    work = fused_attention(device, batch * seq, seq / 2, heads, max(query, value))
    square = batch * heads * seq**2 * (query + value)
    if name == "sdp_fwd":
        return float(work.forward_s), 2.0 * square
    return float(work.backward_s), 5.0 * square


def ratios(device: Accelerator, table: dict) -> Iterator[tuple[str, float]]:
    """Kind of operator, and predicted over measured time."""
    for name, operator in table["accelerator"]["op"].items():
        for text, efficiency in (operator.get("accurate_efficient_factor") or {}).items():
            shape = shape_of(text)
            kind = name
            if name == "matmul":
                seconds, flops = dense_s(device, shape)
            elif name == "group_matmul":
                seconds, flops = grouped_s(device, shape)
                kind = f"group_matmul, {STAGES[shape['stage']]}"
            elif name in ("sdp_fwd", "sdp_bwd"):
                seconds, flops = attention_s(device, shape, name)
            else:
                continue
            yield kind, seconds * operator["tflops"] * 1e12 * efficiency / flops


def main(platform: str, table: str) -> None:
    """Prints the spread of the ratios by kind of operator."""
    found: dict[str, list[float]] = defaultdict(list)
    device = load_platform(platform).need_accelerator()
    for kind, ratio in ratios(device, json.loads(Path(table).read_text(encoding="utf-8"))):
        found[kind].append(ratio)
    for kind, each in sorted(found.items()):
        error = np.abs(np.array(each) - 1)
        print(
            f"{kind:30} {len(each):4} shapes: median ratio {np.median(each):.2f}, error median "
            f"{np.median(error):.0%}, 90th percentile {np.quantile(error, 0.9):.0%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
