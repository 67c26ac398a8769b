"""From measured points to the curves of an accelerator, as `resources/kernels.py` reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_megatron.bench.least_squares import fit_nonnegative
from piper_megatron.bench.points import Measured
from piper_megatron.platform.accelerator import Accelerator, Stack
from piper_megatron.platform.evidence import Evidence
from piper_megatron.resources.kernels import OPERAND_BYTES, fused_attention

# what the model counts for a layer of `kernels.prepare`'s launches: product, norm, activation, sum
_LAUNCHES_A_LAYER = (3 + 6) + 3 * (1 + 1)
# read and written by Adam with fp32 states and gradients (`compute/optimizer.py`)
_ADAM_BYTES = 3 * 4 + 2 * (4 + 8)
# bytes of an element, and kernels, that the model counts
_MEMORY_KERNELS: dict[str, tuple[str, Callable[[float], float], int]] = {
    "copy": ("efficiency", lambda element: 2 * element, 1),
    "add": ("efficiency", lambda element: 3 * element, 1),
    "norm": ("efficiency", lambda element: 2 * element, 1),
    "permute": ("permute_efficiency", lambda element: 2 * element, 1),
    "loss": ("loss_efficiency", lambda _: 38, 10),
    "cast": ("cast_efficiency", lambda _: 6, 1),
}
# a product's traffic may hide; one that hides entirely leaves this much of the bandwidth's inverse
_FASTEST_MEMORY = 10.0


@dataclass
class Fitted:
    """Curves, and what they say of the points.

    Attributes:
        predicted: seconds by the key of a point.
        notes: what could not be measured.
    """

    predicted: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fit_accelerator(
    base: Accelerator, points: Sequence[Measured], origin: str, fitted: Fitted
) -> Accelerator:
    """The accelerator with the curves that its points give.

    Args:
        base: keeps whatever has no points.
        points: of all kinds.
        origin: who measured, for the sources.
        fitted: takes predictions and notes.
    """
    by_kind = {
        kind: [p for p in points if p.point.kind == kind]
        for kind in ("product", "attention", "memory", "host", "copy")
    }
    rates = _Rates(base, origin)
    memory = _fit_memory(by_kind["memory"], fitted)
    products = _fit_products(by_kind["product"], fitted)
    attention = _fit_attention(base, by_kind["attention"], fitted)
    changes: dict[str, Any] = {}
    changes["hbm"] = rates.bandwidth(memory)
    changes["tflops"] = rates.peaks(products, attention)
    peaks, gbps = changes["tflops"], changes["hbm"].gbps
    if memory:
        changes["kernels"] = base.kernels.model_copy(
            update={
                **{
                    name: min(1 / (memory[name] * gbps * 1e9), 1.0)
                    for name in (
                        "efficiency",
                        "permute_efficiency",
                        "loss_efficiency",
                        "cast_efficiency",
                    )
                },
                "kernel_s": memory["kernel_s"],
                **_measured(origin),
            }
        )
    if products:
        changes["gemm"] = _gemm(base, products, peaks, gbps, origin)
    if attention:
        changes["attention"] = base.attention.model_copy(
            update={
                **{
                    name: min(1 / (attention[name] * peaks.bf16 * 1e12), 1.0)
                    for name in ("forward", "backward")
                },
                "kernel_s": attention["kernel_s"],
                **_measured(origin),
            }
        )
    changes["host"] = _host(base, by_kind["host"], by_kind["copy"], origin, fitted)
    changes["stacks"] = (
        Stack(
            name=base.stack().name,
            evidence="assumed",
            source="the curves of the accelerator hold for it",
        ),
    )
    return base.model_copy(update=changes)


def _measured(origin: str, kept: str = "") -> dict[str, str]:
    return {"evidence": "measured", "source": f"{origin}{f'; {kept}' if kept else ''}"}


@dataclass(frozen=True)
class _Rates:
    """Peaks that shares are of: published ones stay, unless something was faster."""

    base: Accelerator
    origin: str

    def _peak(self, known: float, evidence: Evidence, best: float) -> float:
        return max(known, best) if evidence == "published" else best

    def bandwidth(self, memory: dict[str, float]) -> Any:
        """Of the device memory."""
        hbm = self.base.hbm
        if not memory:
            return hbm
        gbps = self._peak(hbm.gbps, hbm.evidence, memory["best"] / 1e9)
        if gbps == hbm.gbps:
            return hbm
        return hbm.model_copy(
            update={"gbps": _short(gbps), **_measured(f"fastest kernel; {self.origin}")}
        )

    def peaks(self, products: dict[str, float], attention: dict[str, float]) -> Any:
        """Of every precision that was measured."""
        known, changes = self.base.tflops, {}
        for dtype in ("fp32", "bf16", "fp16"):
            found = [1 / products[dtype]] if dtype in products else []
            found += [products[f"best {dtype}"]] if found else []
            if dtype == "bf16" and attention:
                found += [1 / attention["forward"], 1 / attention["backward"]]
            if found:
                peak = self._peak(getattr(known, dtype), known.evidence, max(found) / 1e12)
                if peak != getattr(known, dtype):
                    changes[dtype] = _short(peak)
        if not changes:
            return known
        others = [d for d in ("fp32", "bf16", "fp16") if d not in changes]
        kept = f"{', '.join(others)} as before ({known.evidence})" if others else ""
        fastest = f"fastest product or attention; {self.origin}"
        return known.model_copy(update={**changes, **_measured(fastest, kept)})


def _short(value: float) -> float:
    """Rounded up to four digits, so that no share of it comes out above 1."""
    return float(f"{value * 1.0005:.4g}")


def _fit(
    columns: list[list[float]], points: Sequence[Measured], positive: Sequence[bool], to: Fitted
) -> np.ndarray:
    table = np.array(columns, dtype=float)
    seconds = np.array([p.seconds for p in points])
    coefficients = fit_nonnegative(table, seconds, positive)
    predicted = table @ coefficients
    to.predicted |= {p.point.key: float(s) for p, s in zip(points, predicted, strict=True)}
    return coefficients


def _fit_products(points: Sequence[Measured], to: Fitted) -> dict[str, float]:
    """Inverse rates in s / FLOP by precision, of grouped products, and fixed times."""
    if not points:
        return {}
    columns_of = sorted({_rate_of(p) for p in points})
    columns = []
    best: dict[str, float] = {}
    for p in points:
        size = p.point.size
        flops = 2.0 * size["rows"] * size["inputs"] * size["outputs"]
        dtype, groups = p.point.dtype, size["groups"]
        looped, grouped = p.point.what == "loop", p.point.what.startswith("grouped")
        columns.append(
            [flops * (name == _rate_of(p)) for name in columns_of]
            + [_product_bytes(p), groups if looped else 1.0, (groups - 1.0) * grouped]
        )
        if p.point.what == "single":
            best[f"best {dtype}"] = max(best.get(f"best {dtype}", 0), flops / p.seconds)
    positive = [True] * len(columns_of) + [False] * 3
    found = _fit(columns, points, positive, to)
    names = [*columns_of, "bytes", "kernel_s", "group_s"]
    return dict(zip(names, map(float, found), strict=True)) | best


def _rate_of(measured: Measured) -> str:
    point = measured.point
    return point.dtype if point.what in ("single", "loop") else f"{point.what} {point.dtype}"


def _product_bytes(measured: Measured) -> float:
    size, operand = measured.point.size, OPERAND_BYTES[measured.point.dtype]
    rows, inputs, outputs = size["rows"], size["inputs"], size["outputs"]
    weight, result = size["groups"] * inputs * outputs, max(operand, 2)
    if measured.point.what == "grouped_weights":
        return operand * rows * (inputs + outputs) + result * weight
    return operand * (rows * inputs + weight) + result * rows * outputs


def _gemm(
    base: Accelerator, products: dict[str, float], peaks: Any, gbps: float, origin: str
) -> Any:
    measured = [d for d in ("fp32", "bf16", "fp16") if d in products]
    efficiency = dict(base.gemm.efficiency) | {
        dtype: min(1 / (products[dtype] * getattr(peaks, dtype) * 1e12), 1.0) for dtype in measured
    }
    unmeasured = [d for d in efficiency if d not in measured]
    kept = [f"efficiency of {', '.join(unmeasured)}"] if unmeasured else []
    changes: dict[str, Any] = {
        "efficiency": efficiency,
        "memory_efficiency": min(
            1 / max(products["bytes"] * gbps * 1e9, 1 / _FASTEST_MEMORY), _FASTEST_MEMORY
        ),
        "kernel_s": products["kernel_s"],
    }
    for what, names in (
        ("grouped", ("grouped_forward", "grouped_dgrad")),
        ("grouped_weights", ("grouped_wgrad",)),
    ):
        grouped = next((d for d in measured if f"{what} {d}" in products), None)
        if grouped is None:
            kept += names
            continue
        over_single = products[grouped] / products[f"{what} {grouped}"]
        changes |= dict.fromkeys(names, over_single) | {"group_s": products["group_s"]}
    text = f"{', '.join(kept)} as before ({base.gemm.evidence})" if kept else ""
    return base.gemm.model_copy(update={**changes, **_measured(origin, text)})


def _fit_attention(base: Accelerator, points: Sequence[Measured], to: Fitted) -> dict[str, float]:
    """Inverse rates in s / FLOP and the fixed time."""
    if not points:
        return {}
    # the model's own count: at a rate of 1 FLOP/s and without fixed time
    unit = base.model_copy(
        update={
            "attention": base.attention.model_copy(
                update={"forward": 1.0, "backward": 1.0, "kernel_s": 0.0}
            ),
            "tflops": base.tflops.model_copy(update={"bf16": 1e-12}),
        }
    )

    def flops(measured: Measured) -> float:
        size = measured.point.size
        work = fused_attention(
            unit,
            size["batch"] * size["seq"],
            size["seq"] / 2,
            size["heads"],
            size["channels"],
        )
        return float(work.forward_s if measured.point.what == "forward" else work.backward_s)

    whats = [w for w in ("forward", "backward") if any(p.point.what == w for p in points)]
    columns = [[flops(p) * (p.point.what == w) for w in whats] + [1.0] for p in points]
    found = dict(
        zip(
            [*whats, "kernel_s"],
            map(float, _fit(columns, points, [True] * len(whats) + [False], to)),
            strict=True,
        )
    )
    if "forward" not in found or "backward" not in found:
        to.notes.append("attention was measured in one direction only and stays as it was")
        return {}
    return found


def _fit_memory(points: Sequence[Measured], to: Fitted) -> dict[str, float]:
    """Inverse rates in s / byte by kind, the fixed time of a kernel, and the best rate."""
    names = sorted({name for name, _, _ in _MEMORY_KERNELS.values()})
    if not {_MEMORY_KERNELS[p.point.what][0] for p in points} >= set(names):
        return {}
    columns, best = [], 0.0
    for p in points:
        name, bytes_of, kernels = _MEMORY_KERNELS[p.point.what]
        elements = p.point.size["rows"] * p.point.size["width"]
        moved = elements * bytes_of(OPERAND_BYTES[p.point.dtype])
        columns.append([moved * (name == each) for each in names] + [float(kernels)])
        best = max(best, moved / p.seconds)
    found = _fit(columns, points, [True] * len(names) + [False], to)
    rates = dict(zip([*names, "kernel_s"], map(float, found), strict=True))
    return rates | {"best": max(best, *(1 / rates[name] for name in names))}


def _host(
    base: Accelerator,
    points: Sequence[Measured],
    copies: Sequence[Measured],
    origin: str,
    to: Fitted,
) -> Any:
    """Launches where they were assumed; Megatron's own, fitted to trainings, say more."""
    seconds = {p.point.what: p for p in points}
    changes: dict[str, Any] = {}
    if "launch" in seconds and base.host.evidence == "assumed":
        launch = seconds["launch"]
        changes["launch_s"] = launch.seconds / (launch.point.size["layers"] * _LAUNCHES_A_LAYER)
    if "adam" in seconds:
        adam = seconds["adam"]
        moved = adam.point.size["elements"] * _ADAM_BYTES
        changes["optimizer_gbps"] = moved / adam.seconds / 1e9
    if copies:
        columns = [[float(p.point.size["bytes"]), 1.0] for p in copies]
        changes["link_gbps"] = 1 / _fit(columns, copies, [True, False], to)[0] / 1e9
    if not changes:
        return base.host
    names = ("launch_s", "step_s", "tensor_s", "link_gbps", "optimizer_gbps")
    kept = ", ".join(name for name in names if name not in changes)
    text = f"{', '.join(changes)}: {origin}; {kept} as before: {base.host.source}"
    return base.host.model_copy(update={**changes, "source": text})
