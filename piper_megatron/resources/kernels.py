"""How long single kernels take on an accelerator, and what a part of the model adds up to.

Curves are those of `platform/accelerator.py`; arguments may be arrays [layouts].
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.platform.accelerator import Accelerator, Precision

# bytes of an operand of a matrix product
OPERAND_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
_BACKWARD_OVER_FORWARD = 2.5  # products of fused attention: five, one of them the scores again


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a part of the model costs on one rank, for one micro-batch.

    Attributes:
        forward_s: device time of the forward pass.
        backward_s: of the backward pass, without what is recomputed.
        weight_s: of that, products that only the weights' gradients need.
        recompute_s: of forward work that the backward pass repeats.
        forward_launches, backward_launches: kernels that the host launches one by one, in both
            passes; recomputation is part of the backward ones.
    """

    forward_s: Number = 0.0
    backward_s: Number = 0.0
    weight_s: Number = 0.0
    recompute_s: Number = 0.0
    forward_launches: Number = 0.0
    backward_launches: Number = 0.0

    def __add__(self, other: "Work") -> "Work":
        names = (field.name for field in fields(Work))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, count: Number) -> "Work":
        """The same, several times."""
        return Work(**{field.name: getattr(self, field.name) * count for field in fields(Work)})

    def repeated_in_backward(self) -> "Work":
        """The same, with all forward work recomputed."""
        return replace(
            self,
            recompute_s=self.forward_s,
            backward_launches=self.backward_launches + self.forward_launches,
        )

    def replayed(self) -> "Work":
        """The same as a CUDA graph replays it: the host launches none of its kernels."""
        return replace(self, forward_launches=0.0, backward_launches=0.0)


def memory_s(accelerator: Accelerator, moved_bytes: Number, efficiency: float) -> Number:
    """Time to move bytes from and to device memory."""
    return moved_bytes / (accelerator.hbm.gbps * 1e9 * efficiency)


def elementwise(
    accelerator: Accelerator,
    forward_bytes: Number,
    backward_bytes: Number,
    *,
    kernels: Number = 1,
    efficiency: float | None = None,
) -> Work:
    """Kernels that are bound by device memory.

    Args:
        accelerator: whose curves hold.
        forward_bytes: read and written by the forward pass.
        backward_bytes: by the backward pass.
        kernels: in each of the two passes.
        efficiency: of the bandwidth; that of elementwise kernels unless given.
    """
    efficiency = efficiency or accelerator.kernels.efficiency
    fixed_s = kernels * accelerator.kernels.kernel_s
    return Work(
        forward_s=fixed_s + memory_s(accelerator, forward_bytes, efficiency),
        backward_s=fixed_s + memory_s(accelerator, backward_bytes, efficiency),
        forward_launches=kernels,
        backward_launches=kernels,
    )


def product_s(
    accelerator: Accelerator,
    precision: Precision,
    flops: Number,
    moved_bytes: Number,
    *,
    groups: Number = 1,
    relative: float = 1.0,
) -> Number:
    """Time of a matrix product.

    Arithmetic and traffic add up: tiles that do not fill the device, and prologues without
    arithmetic, make up for what overlaps.

    Args:
        accelerator: whose curves hold.
        precision: of the operands.
        flops: 2 m n k.
        moved_bytes: of operands and result.
        groups: products in one call.
        relative: efficiency over that of a large single product.
    """
    gemm = accelerator.gemm
    rate = accelerator.peak_flops(precision) * gemm.efficiency[precision] * relative
    return (
        flops / rate
        + memory_s(accelerator, moved_bytes, gemm.memory_efficiency)
        + gemm.kernel_s
        + gemm.group_s * (groups - 1)
    )


def linear(
    accelerator: Accelerator,
    precision: Precision,
    rows: Number,
    inputs: Number,
    outputs: Number,
    *,
    groups: Number = 1,
    gradient_bytes: float = 4,
    cast_bytes: float = 0,
    grouped: bool = False,
    relative: float = 1.0,
    launches: float = 3,
) -> Work:
    """A linear layer: its product forward, and those for both gradients backward.

    Args:
        accelerator: whose curves hold.
        precision: of the operands; results are of 16 bits.
        rows: tokens, of all groups together.
        inputs: width of what comes in, on this rank.
        outputs: width of what goes out.
        groups: weight matrices that the rows are shared out to.
        gradient_bytes: of an element of the weight's gradient, which is read and written
            (fused accumulation, or an addition after the product).
        cast_bytes: moved for each element of an operand to quantise it.
        grouped: one call for all groups, instead of one for each.
        relative: efficiency over that of the precision's large products.
        launches: of the forward pass; the backward pass has twice as many.
    """
    operand = OPERAND_BYTES[precision]
    result = max(operand, 2)
    flops = 2 * rows * inputs * outputs
    weight = groups * inputs * outputs
    gemm = accelerator.gemm
    calls = 1 if grouped else groups
    grouped_over_single = (
        (gemm.grouped_forward, gemm.grouped_dgrad, gemm.grouped_wgrad) if grouped else (1, 1, 1)
    )

    def product(moved_bytes: Number, over_single: float) -> Number:
        # a loop over groups pays the fixed time of a whole product for each
        return (calls - 1) * gemm.kernel_s + product_s(
            accelerator,
            precision,
            flops,
            moved_bytes,
            groups=groups if grouped else 1,
            relative=relative * over_single,
        )

    cast_s = memory_s(accelerator, cast_bytes * rows, accelerator.kernels.cast_efficiency)
    forward_s, dgrad_s, wgrad_s = (
        product(moved, over_single)
        for moved, over_single in zip(
            (
                operand * (rows * inputs + weight) + result * rows * outputs,
                operand * (rows * outputs + weight) + result * rows * inputs,
                operand * rows * (inputs + outputs) + 2 * gradient_bytes * weight,
            ),
            grouped_over_single,
            strict=True,
        )
    )
    # one kernel for each group, but launched from C++
    inner_launches = groups if grouped else 0
    return Work(
        forward_s=cast_s * inputs + forward_s,
        backward_s=cast_s * outputs + dgrad_s + wgrad_s,
        weight_s=wgrad_s,
        forward_launches=launches * calls + inner_launches / 2,
        backward_launches=2 * launches * calls + inner_launches,
    )


def fused_attention(
    accelerator: Accelerator, rows: Number, keys: Number, heads: Number, channels: Number
) -> Work:
    """Flash attention forward and backward.

    Args:
        accelerator: whose curves hold.
        rows: queries.
        keys: that a query meets, on average.
        heads: query heads on this rank.
        channels: of a head; of queries or values, whichever is wider.
    """
    curve = accelerator.attention
    peak = accelerator.peak_flops("bf16")
    # the exponentials of the softmax take as long as 32 channels do; curves hold for 128
    slower = (channels + 32) / (128 + 32) * 128 / channels
    flops = 4 * rows * keys * heads * channels * slower
    return Work(
        forward_s=curve.kernel_s + flops / (peak * curve.forward),
        backward_s=curve.kernel_s + _BACKWARD_OVER_FORWARD * flops / (peak * curve.backward),
        forward_launches=1,
        backward_launches=3,
    )


def host_s(accelerator: Accelerator, launches: Number) -> Number:
    """Time in which the host launches kernels."""
    return np.asarray(launches) * accelerator.host.launch_s
