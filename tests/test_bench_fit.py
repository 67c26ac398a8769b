"""Curves that are known come back from points that follow them, with noise and outliers."""

from dataclasses import replace

import numpy as np
import pytest

from piper_megatron.bench.accelerator_fit import Fitted, fit_accelerator
from piper_megatron.bench.least_squares import fit_nonnegative
from piper_megatron.bench.network_fit import OPERATIONS, fit_level, predict
from piper_megatron.bench.plan import GPU, QUICK_GPU, compute_points, link_points
from piper_megatron.bench.points import Measured, Point
from piper_megatron.bench.profile import Facts, assemble, base_for_device, rounded
from piper_megatron.errors import PlatformError
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.platform.platform import load_platform
from piper_megatron.platform.writer import platform_yaml
from piper_megatron.resources.kernels import fused_attention, memory_s, product_s

NOISE = 0.02
FACTS = Facts(
    name="mine",
    origin="a test",
    device="a device",
    capacity_gib=70.0,
    context_gib=0.9,
    nodes=2,
    per_node=8,
)


def noisy(points: list[Point], seconds, seed: int = 1) -> list[Measured]:
    """Points that take the given time, give or take; every tenth takes three times as long."""
    numbers = np.random.default_rng(seed)
    measured = []
    for place, point in enumerate(points):
        value = float(seconds(point)) * float(np.exp(NOISE * numbers.standard_normal()))
        value *= 3.0 if place % 10 == 7 else 1.0
        measured.append(Measured(point=point, seconds=value, low=value, high=value, turns=3))
    return measured


def kernel_seconds(device: Accelerator):
    """What the resource model says of a point of one device."""

    def seconds(point: Point) -> float:
        size, operand = point.size, {"bf16": 2, "fp32": 4}.get(point.dtype, 0)
        match point.kind:
            case "product":
                rows, inputs, outputs = size["rows"], size["inputs"], size["outputs"]
                groups = size["groups"]
                moved = operand * (rows * inputs + groups * inputs * outputs + rows * outputs)
                relative = {
                    "grouped": device.gemm.grouped_forward,
                    "grouped_weights": device.gemm.grouped_wgrad,
                }.get(point.what, 1.0)
                together = point.what.startswith("grouped")
                once = product_s(
                    device,
                    point.dtype,
                    2 * rows * inputs * outputs,
                    moved,
                    groups=groups if together else 1,
                    relative=relative,
                )
                more = groups - 1 if point.what == "loop" else 0
                return float(once) + more * device.gemm.kernel_s
            case "attention":
                work = fused_attention(
                    device,
                    size["batch"] * size["seq"],
                    size["seq"] / 2,
                    size["heads"],
                    size["channels"],
                )
                return float(work.forward_s if point.what == "forward" else work.backward_s)
            case "memory":
                elements = size["rows"] * size["width"]
                kernels = device.kernels
                moved, share, count = {
                    "copy": (2 * operand, kernels.efficiency, 1),
                    "add": (3 * operand, kernels.efficiency, 1),
                    "norm": (2 * operand, kernels.efficiency, 1),
                    "permute": (2 * operand, kernels.permute_efficiency, 1),
                    "loss": (38, kernels.loss_efficiency, 10),
                    "cast": (6, kernels.cast_efficiency, 1),
                }[point.what]
                moved_s = memory_s(device, moved * elements, share)
                return float(moved_s) + count * kernels.kernel_s
            case "copy":
                return 5e-6 + size["bytes"] / 50e9
        return 1e-3

    return seconds


@pytest.fixture(scope="module")
def fitted():
    truth = load_platform("dgx-h100").need_accelerator()
    gemm = truth.gemm.model_copy(
        update={"efficiency": {"fp32": 0.7, "bf16": 0.6, "fp16": 0.6}, "grouped_forward": 0.8}
    )
    truth = truth.model_copy(update={"gemm": gemm})
    points = compute_points(GPU, gpu=True)
    base = (
        load_platform("dgx-a100")
        .need_accelerator()
        .model_copy(update={"tflops": truth.tflops, "hbm": truth.hbm})
    )
    found = Fitted()
    device = fit_accelerator(base, noisy(points, kernel_seconds(truth)), "a test", found)
    return truth, base, device, found


def test_kernels_come_back(fitted):
    truth, _, device, _ = fitted
    for part, names in {
        "gemm": ("grouped_forward", "grouped_wgrad", "memory_efficiency", "kernel_s"),
        "attention": ("forward", "backward", "kernel_s"),
        "kernels": ("efficiency", "permute_efficiency", "loss_efficiency", "kernel_s"),
    }.items():
        for name in names:
            known, back = (getattr(getattr(each, part), name) for each in (truth, device))
            assert back == pytest.approx(known, rel=0.1), f"{part}.{name}"
        assert getattr(device, part).evidence == "measured"
    for dtype in ("fp32", "bf16"):
        assert device.gemm.efficiency[dtype] == pytest.approx(truth.gemm.efficiency[dtype], rel=0.1)


def test_what_has_no_points_stays_and_says_so(fitted):
    truth, base, device, _ = fitted
    assert device.gemm.efficiency["fp16"] == base.gemm.efficiency["fp16"]
    assert "efficiency of fp16" in device.gemm.source
    assert device.tflops == truth.tflops  # published peaks that nothing exceeded
    assert device.host.launch_s == base.host.launch_s
    assert device.host.link_gbps == pytest.approx(50, rel=0.05)
    assert device.host.evidence == base.host.evidence
    assert device.host.source.startswith("optimizer_gbps, link_gbps: a test; launch_s, step_s")


def test_faster_than_the_data_sheet_moves_the_peak(fitted):
    truth, base, _, _ = fitted
    slow_sheet = base.model_copy(update={"tflops": base.tflops.model_copy(update={"bf16": 10.0})})
    points = noisy(compute_points(QUICK_GPU, gpu=True), kernel_seconds(truth))
    device = fit_accelerator(slow_sheet, points, "a test", Fitted())
    assert device.tflops.bf16 > 100
    assert device.tflops.evidence == "measured"
    assert max(device.gemm.efficiency.values()) <= 1


@pytest.mark.parametrize("name", ["dgx-h100", "frontier"])
def test_levels_come_back(name):
    truth = load_platform(name)
    level = truth.node_level + 1
    members = {True: 4, False: 2}[truth.levels[level].nodes is None]
    ranks = truth.ranks_per_node
    points = link_points(GPU, truth.levels[level].name, members, members * ranks, ranks)
    busy = [p for p in points if p.size.get("pairs", ranks) == ranks]

    def seconds(point: Point) -> float:
        return predict(truth, Measured(point=point, seconds=1, low=1, high=1, turns=1))

    measured = noisy(busy, seconds)
    other = (
        load_platform("dgx-a100")
        .levels[-1]
        .model_copy(update={"name": truth.levels[level].name, "nodes": truth.levels[level].nodes})
    )
    base = truth.model_copy(
        update={"levels": (*truth.levels[:level], other, *truth.levels[level + 1 :])}
    )
    back = fit_level(base, level, measured, "a test", Fitted())
    after = base.model_copy(
        update={"levels": (*base.levels[:level], back, *base.levels[level + 1 :])}
    )
    errors = [predict(after, m) / seconds(m.point) - 1 for m in measured]
    assert np.median(np.abs(errors)) < 0.05
    known, found = truth.transfers()[level], back.transfer
    assert found is not None
    assert back.evidence == found.evidence == "measured"
    for operation in ("all_gather", "point_to_point"):
        rates = (
            each.gbps * getattr(transfer.efficiency, operation)
            for each, transfer in ((truth.levels[level], known), (back, found))
        )
        assert next(rates) == pytest.approx(next(rates), rel=0.1)


def test_a_level_without_all_operations_stays():
    base = load_platform("dgx-h100")
    points = [p for p in link_points(GPU, "node", 8, 8, 1) if p.what != OPERATIONS[0]]
    measured = noisy(points, lambda point: 1e-3)
    found = Fitted()
    assert fit_level(base, base.node_level, measured, "a test", found) == base.levels[0]
    assert found.notes == ["level node stays: no all_reduce was measured"]


def test_outliers_and_vanishing_coefficients():
    numbers = np.random.default_rng(3)
    columns = np.column_stack([numbers.uniform(1, 100, 40), np.ones(40), numbers.uniform(0, 1, 40)])
    seconds = columns @ [2.0, 5.0, 0.0]
    seconds[::8] *= 10
    found = fit_nonnegative(columns, seconds, [True, False, False])
    assert found == pytest.approx([2.0, 5.0, 0.0], rel=0.02, abs=0.2)
    # a rate that does not show is twice the best that was seen
    flat = fit_nonnegative(columns[:, :2], np.full(40, 7.0), [True, False])
    assert flat[0] == pytest.approx(0.5 * 7.0 / columns[:, 0].max())


def test_a_whole_platform_reads_as_it_was_written(tmp_path):
    base = load_platform("dgx-h100")
    points = compute_points(QUICK_GPU, gpu=True)
    measured = noisy(points, kernel_seconds(base.need_accelerator()))
    profile = assemble(base, measured, replace(FACTS, capacity_gib=79.0))
    path = tmp_path / "mine.yaml"
    path.write_text(platform_yaml(rounded(profile.platform)))
    back = load_platform(str(path))
    assert back == rounded(profile.platform)
    assert back.levels == base.levels
    assert back.need_accelerator().overheads.context_gib == 0.9
    assert back.need_accelerator().memory.nominal_gb == 80


def test_the_base_of_a_device():
    assert base_for_device("NVIDIA H200").need_accelerator().name.startswith("NVIDIA H200")
    assert "A100" in base_for_device("NVIDIA A100-SXM4-40GB").need_accelerator().name
    assert base_for_device(None).name == "cpu-lab"
    with pytest.raises(PlatformError, match="has a Some Chip 9000; name the nearest"):
        base_for_device("Some Chip 9000")
