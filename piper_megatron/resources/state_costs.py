"""Bytes that one element of a parameter costs: weight, copies, gradient, optimizer.

Sources: megatron/core/optimizer/{__init__,optimizer,optimizer_config,distrib_optimizer,
emerging_optimizers}.py and cpu_offloading/hybrid_optimizer.py of 0.19.2. What Transformer Engine's
FusedAdam and 8-bit tensors allocate is read from its public source (transformer_engine/pytorch:
optimizers/fused_adam.py, module/base.py, tensor/*.py; 2.9 to August 2026), not measured here.
"""

from dataclasses import dataclass

from piper_megatron.resources.parameters import Tensor
from piper_megatron.workload.spec import DTYPE_BYTES, TrainingSpec

_FP32 = 4
# one copy of a weight in 8 or 4 bits with its scales, where these are more than a few numbers: an
# fp32 one for 128 x 128 elements (blockwise), a byte for 32 (mxfp8) or for 16 (nvfp4)
_COPY_BYTES = {"blockwise": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes for each element that a rank updates.

    Attributes:
        resident: main parameter and moments on the device, after the first step.
        host: what is offloaded to the host's memory.
        gradient_copy: on the device from before any optimizer's step to the end of all.
        upcast: on the device while this optimizer steps.
    """

    resident: float
    host: float
    gradient_copy: float = 0
    upcast: float = 0

    @property
    def step(self) -> float:
        """More on the device while this optimizer steps."""
        return self.gradient_copy + self.upcast


@dataclass(frozen=True)
class WeightCost:
    """Bytes for each element that a rank holds.

    Attributes:
        weight: in the buffer of weights, or where there is none as the parameter itself.
        low_precision: 8- or 4-bit copies outside of it.
    """

    weight: float
    low_precision: float


def is_emerging(training: TrainingSpec) -> bool:
    """Whether an optimizer like Muon updates matrices and Adam the rest."""
    return training.optimizer not in ("adam", "sgd")


def is_sharded(training: TrainingSpec) -> bool:
    """Whether parameters live in a buffer of which each rank updates a share."""
    return training.use_distributed_optimizer or training.use_layer_wise_distributed_optimizer


def has_quantized_weights(training: TrainingSpec) -> bool:
    """Whether weights of linear layers exist in 8 bits only."""
    return bool(training.fp8) and training.fp8_param_gather


def in_low_precision(tensor: Tensor, training: TrainingSpec, layers: int) -> bool:
    """Whether a tensor is a weight that Transformer Engine multiplies in 8 or 4 bits.

    `--first-last-layers-bf16` leaves out one layer at each end (its default).
    """
    if tensor.kind != "linear" or not (training.fp8 or training.fp4):
        return False
    return not (training.first_last_layers_bf16 and tensor.layer in (0, layers - 1))


def gradient_bytes(training: TrainingSpec) -> int:
    """Bytes of an element of the gradient buffers."""
    return _FP32 if training.grad_reduce_in_fp32 else training.element_bytes


def weight_cost(training: TrainingSpec, *, low_precision: bool, transposed: bool) -> WeightCost:
    """Bytes of one element of a weight.

    Args:
        training: the precision and its recipe.
        low_precision: of a weight that is multiplied in 8 or 4 bits.
        transposed: the device multiplies 8-bit matrices of the per-tensor recipes in one
            orientation only, so that two copies are kept (before Blackwell).
    """
    if not low_precision:
        return WeightCost(training.element_bytes, 0)
    if training.fp4:
        return WeightCost(training.element_bytes, 2 * _COPY_BYTES["nvfp4"])
    two = transposed or training.fp8_recipe in ("blockwise", "mxfp8")
    copies = (2 if two else 1) * _COPY_BYTES.get(training.fp8_recipe, 1)
    if not has_quantized_weights(training):
        # made at a step's first micro-batch, in memory that is kept
        return WeightCost(training.element_bytes, copies)
    if training.fp8_recipe == "mxfp8":
        # gathered through the gradients' buffer (param_and_grad_buffer.py: shared_buffer)
        return WeightCost(0, copies)
    return WeightCost(1, copies - 1)


def optimizer_cost(training: TrainingSpec, *, matrix: bool, quantized: bool) -> OptimizerCost:
    """Bytes of one element in the optimizer.

    Muon keeps one momentum of matrices. Of `soap`, Adam's moments are counted but not its factors.

    Args:
        training: names the optimizer and its settings.
        matrix: of a weight that Muon and its like would update.
        quantized: of a weight that exists in 8 bits only.
    """
    moments = _moments_bytes(training, matrix)
    gradient_copy = 0 if gradient_bytes(training) == _FP32 else _FP32
    if training.precision == "fp32":
        return OptimizerCost(moments, 0)
    if training.optimizer_cpu_offload:
        # HybridDeviceOptimizer keeps fp32 parameters and moments in both places, and gradients on
        # the host; it moves whole parameters, so up to one more than this fraction
        host = training.optimizer_offload_fraction
        kept = 1 - host
        return OptimizerCost(3 * _FP32 * kept, 4 * _FP32 * host, gradient_copy * kept)
    if not _adam_holds_main_parameters(training):
        return OptimizerCost(
            _FP32 + moments, 0, gradient_copy, _upcast_bytes(training, with_main=False)
        )
    if training.main_params_dtype == "fp32" and training.precision == "bf16" and not quantized:
        main = 2  # the half of fp32 that the bf16 weight lacks (store_param_remainders)
    else:
        main = DTYPE_BYTES[training.main_params_dtype]
    return OptimizerCost(main + moments, 0, upcast=_upcast_bytes(training, with_main=True))


def _adam_holds_main_parameters(training: TrainingSpec) -> bool:
    """`use_precision_aware_optimizer_no_fp8_or_ds_fp8`: then it takes gradients of any type."""
    return training.use_precision_aware_optimizer and (
        training.main_params_dtype != "fp32" or training.fp8_recipe == "delayed"
    )


def _moments_bytes(training: TrainingSpec, matrix: bool) -> int:
    if training.optimizer in ("sgd", "lion") or (training.optimizer == "muon" and matrix):
        return _FP32
    if training.use_precision_aware_optimizer:
        return DTYPE_BYTES[training.exp_avg_dtype] + DTYPE_BYTES[training.exp_avg_sq_dtype]
    return 2 * _FP32


def _upcast_bytes(training: TrainingSpec, *, with_main: bool) -> int:
    """FusedAdam's fp32 copies of states in other types, of all parameters of a group at once.

    Since Transformer Engine 2.13 two bf16 moments need none; they are counted here.
    """
    if not training.use_precision_aware_optimizer:
        return 0
    states = [training.exp_avg_dtype, training.exp_avg_sq_dtype]
    if with_main:
        states.append(training.main_params_dtype)
    return _FP32 * sum(state != "fp32" for state in states)
