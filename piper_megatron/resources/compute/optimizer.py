"""The optimizer step."""

from piper_megatron.layout.sizes import Number
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.resources.kernels import memory_s
from piper_megatron.workload.spec import DTYPE_BYTES, TrainingSpec


def optimizer_seconds(
    training: TrainingSpec,
    accelerator: Accelerator,
    *,
    held: Number,
    updated: Number,
    tensors: Number = 0,
    host_factor: float = 1.0,
) -> Number:
    """Time of gradient norm, Adam step and zeroing of the gradients, and of the host around them.

    Args:
        training: optimizer, its types and its offload.
        accelerator: bandwidths of device, host and the link between them.
        held: parameters of this rank.
        updated: those whose states it keeps; fewer than `held` with a distributed optimizer.
        tensors: in which the parameters of this rank are.
        host_factor: of the software stack, its host time over the accelerator's.
    """
    gradient = DTYPE_BYTES[training.main_grads_dtype]
    main = DTYPE_BYTES[training.main_params_dtype]
    moments = DTYPE_BYTES[training.exp_avg_dtype] + DTYPE_BYTES[training.exp_avg_sq_dtype]
    weight = training.element_bytes if training.precision != "fp32" else 0
    # norm, clipping and step read gradients; states are read and written
    per_parameter = 3 * gradient + 2 * (main + moments) + weight
    away = training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0.0
    moved = (1 - away) * updated * per_parameter + held * gradient
    device_s = memory_s(accelerator, moved, accelerator.kernels.efficiency)
    host = accelerator.host
    # gradients go to the host, Adam runs on its memory, weights come back
    per_byte = per_parameter / host.optimizer_gbps + (gradient + (weight or 4)) / host.link_gbps
    offloaded_s = away * updated * per_byte / 1e9
    return device_s + offloaded_s + host_factor * (host.step_s + tensors * host.tensor_s)
