"""What is known of an accelerator: memory, peaks, how much of them kernels reach, and by which
software.

`docs/platforms.md` describes the format. A file of `library/accelerators/` holds what the members
of one hardware generation share; platforms name it and state what differs.
"""

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from piper_megatron.errors import PlatformError
from piper_megatron.platform.evidence import Name, Stated, Text
from piper_megatron.strict import StrictModel, nearest, read_yaml

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
Share = Annotated[float, Field(gt=0, le=1)]


class DeviceMemory(Stated):
    """Device memory, GB = 1e9 and GiB = 2^30 bytes.

    Attributes:
        nominal_gb: of the data sheet.
        capacity_gib: that the driver shows to a process.
    """

    nominal_gb: PositiveFloat
    capacity_gib: PositiveFloat

    @model_validator(mode="after")
    def _capacity_is_part_of_it(self) -> "DeviceMemory":
        if self.capacity_gib > self.nominal_gb:
            raise ValueError(
                f"capacity_gib {self.capacity_gib} is above nominal_gb {self.nominal_gb}"
            )
        return self


class MemoryOverheads(Stated):
    """What a process holds beside its tensors, GiB = 2^30 bytes.

    Attributes:
        context_gib: device context, code and libraries' workspaces, outside torch's allocator.
        communicator_gib: buffers of the first communicator of NCCL, RCCL or oneCCL.
        peer_communicator_gib: added for each peer in further communicators.
        reserved_ratio: what torch's allocator reserves over what it has allocated at the peak.
        workspace_gib: scratch of the library of matrix products, of which there are several; none
            on CPUs. That of cuBLAS on GPUs since Hopper; older ones take 4 and 8 MiB.
    """

    context_gib: NonNegativeFloat
    communicator_gib: NonNegativeFloat
    peer_communicator_gib: NonNegativeFloat
    reserved_ratio: Annotated[float, Field(ge=1)]
    workspace_gib: NonNegativeFloat = 32 / 1024


class Peaks(Stated):
    """Dense matrix peaks without sparsity, 1e12 FLOP/s; None where the device lacks the format."""

    fp32: PositiveFloat
    bf16: PositiveFloat
    fp16: PositiveFloat
    fp8: PositiveFloat | None = None
    fp4: PositiveFloat | None = None


class DeviceBandwidth(Stated):
    """Device memory bandwidth.

    Attributes:
        gbps: peak, GB/s (1e9 bytes a second), reads and writes together.
    """

    gbps: PositiveFloat


class MemoryKernels(Stated):
    """Kernels that are bound by device memory.

    Attributes:
        efficiency: share of the memory bandwidth that fused elementwise kernels and norms reach.
        permute_efficiency: that gathers and scatters of token rows reach.
        loss_efficiency: that the cross entropy of a vocabulary reaches.
        cast_efficiency: that quantisation of operands reaches.
        kernel_s: shortest time of a kernel.
    """

    efficiency: Share
    permute_efficiency: Share
    loss_efficiency: Share
    cast_efficiency: Share
    kernel_s: NonNegativeFloat


class MatrixKernels(Stated):
    """Matrix products: FLOP / (peak * efficiency) + bytes / (bandwidth * memory_efficiency).

    Attributes:
        efficiency: share of the dense peak that large products reach, by precision.
        grouped_forward, grouped_dgrad, grouped_wgrad: the same for a grouped product of experts
            over that of one large product.
        block_scaled: of fp8 products with a scale for each block in software (the `blockwise`
            recipe) over those with one for each tensor.
        memory_efficiency: above 1 where a part of the traffic hides behind the arithmetic.
        kernel_s: fixed time of a product.
        group_s: fixed time for each further expert of a grouped product.
    """

    efficiency: dict[Precision, Share]
    grouped_forward: PositiveFloat
    grouped_dgrad: PositiveFloat
    grouped_wgrad: PositiveFloat
    block_scaled: PositiveFloat = 1
    memory_efficiency: PositiveFloat
    kernel_s: NonNegativeFloat
    group_s: NonNegativeFloat


class AttentionKernels(Stated):
    """Fused attention: FLOP that a causal mask leaves / (peak * efficiency) + fixed time.

    Attributes:
        forward, backward: share of the dense bf16 peak; backward counts 2.5 times the FLOP of
            forward, since it recomputes the scores.
        kernel_s: fixed time of a call.
    """

    forward: Share
    backward: Share
    kernel_s: NonNegativeFloat


class Host(Stated):
    """The CPU that launches kernels and may run the optimizer.

    Attributes:
        launch_s: host time for each kernel that PyTorch launches, Python's included.
        step_s: host time of a training step beside launches: data, logging, scheduling.
        tensor_s: more for each parameter tensor of a rank: hooks of gradients, bookkeeping of the
            optimizer.
        link_gbps: between host and device, GB/s in one direction.
        optimizer_gbps: CPU memory traffic of an Adam step on the host, GB/s for each rank.
    """

    launch_s: NonNegativeFloat
    step_s: NonNegativeFloat
    tensor_s: NonNegativeFloat
    link_gbps: PositiveFloat
    optimizer_gbps: PositiveFloat


class Stack(Stated):
    """A software stack.

    Attributes:
        name: by which it is chosen.
        match: regular expression that is searched in a description of the stack (container,
            framework, versions), upper and lower case alike; the stack without one is the default.
        efficiency: of its kernels over the curves of the accelerator.
        host: of its host time over the accelerator's.
    """

    name: Name
    match: re.Pattern[str] | None = None
    efficiency: PositiveFloat = 1
    host: PositiveFloat = 1


class Accelerator(StrictModel):
    """A device that one rank drives.

    Attributes:
        name: of the product.
        memory, overheads: capacity, and what takes a part of it.
        tflops, hbm: peaks.
        kernels, gemm, attention, host: what is reached of them.
        stacks: known software stacks, in order of preference; one is the default.
    """

    name: Text
    memory: DeviceMemory
    overheads: MemoryOverheads
    tflops: Peaks
    hbm: DeviceBandwidth
    kernels: MemoryKernels
    gemm: MatrixKernels
    attention: AttentionKernels
    host: Host
    stacks: tuple[Stack, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _like_another(cls, data: Any) -> Any:
        """Fills in what a library accelerator says: `accelerator: h100`, or `like: h100`."""
        if isinstance(data, str):
            return _library_accelerator(data)
        if isinstance(data, dict) and "like" in data:
            return _library_accelerator(data["like"]) | {
                key: value for key, value in data.items() if key != "like"
            }
        return data

    @model_validator(mode="after")
    def _one_default_stack(self) -> "Accelerator":
        names = [stack.name for stack in self.stacks]
        if len(set(names)) < len(names):
            raise ValueError(f"stacks need distinct names, got {', '.join(names)}")
        defaults = [stack.name for stack in self.stacks if stack.match is None]
        if len(defaults) != 1:
            raise ValueError(
                f"one stack is the default and has no match, got {', '.join(defaults) or 'none'}"
            )
        return self

    def stack(self, text: str | None = None) -> Stack:
        """The software stack of that name, or else the first whose rule matches a description.

        Args:
            text: name or description; None takes the default, and so does what nothing matches.
        """
        default = next(stack for stack in self.stacks if stack.match is None)
        if text is None:
            return default
        for stack in self.stacks:
            if stack.name == text:
                return stack
        for stack in self.stacks:
            if stack.match and re.search(stack.match.pattern, text, re.IGNORECASE):
                return stack
        return default

    def check_stack(self, text: str | None) -> None:
        """Refuses a name or description that says nothing of a known stack.

        Raises:
            PlatformError: the stacks that there are.
        """
        default = self.stack()
        if text not in (None, default.name) and self.stack(text) is default:
            names = [stack.name for stack in self.stacks]
            raise PlatformError(f"unknown software stack '{text}'; {nearest(str(text), names)}")

    def peak_flops(self, precision: Precision) -> float:
        """Dense peak, FLOP/s.

        Raises:
            PlatformError: the device has no such format.
        """
        tflops = getattr(self.tflops, precision)
        if tflops is None:
            raise PlatformError(
                f"{self.name} has no {precision} peak; train in bf16, or add tflops.{precision} to "
                "the platform file"
            )
        return tflops * 1e12

    @property
    def transposes_8_bit(self) -> bool:
        """Whether 8-bit products take one orientation alone, so that weights exist in two.

        So it is before the generation that brought 4-bit formats (Transformer Engine:
        `is_non_tn_fp8_gemm_supported`).
        """
        return self.tflops.fp4 is None

    def evidence(self) -> dict[str, str]:
        """Evidence label of each group of numbers."""
        labels: dict[str, str] = {}
        for name in type(self).model_fields:
            part = getattr(self, name)
            if isinstance(part, Stated):
                labels[name] = part.evidence
        return labels


def _folder() -> Path:
    return Path(str(resources.files("piper_megatron.platform") / "library" / "accelerators"))


@cache
def list_accelerators() -> tuple[str, ...]:
    """Names of the library's accelerators, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def _library_accelerator(name: str) -> dict[str, Any]:
    if name not in list_accelerators():
        raise ValueError(f"unknown accelerator '{name}'; {nearest(name, list_accelerators())}")
    return read_yaml(_folder() / f"{name}.yaml", PlatformError)
