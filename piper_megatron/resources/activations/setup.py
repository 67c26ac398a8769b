"""What a layer is built from, and the building blocks that all modules share: norms and linears.

Sources. Megatron-Core 0.19.2: tensor_parallel/layers.py, tensor_parallel/mappings.py,
extensions/transformer_engine.py. Transformer Engine 2.20: pytorch/module/linear.py (`_Linear`),
module/layernorm_linear.py (`_LayerNormLinear`), module/grouped_linear.py (`_GroupedLinear`),
ops/basic/{rmsnorm,layer_norm}.py: each keeps the input of its matrix product, in 8 bits where the
product is, and a fused norm keeps its own input, its output and fp32 statistics beside.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.activations.tape import Tape, Tensor
from piper_megatron.workload.spec import Experts, ModelSpec, TrainingSpec

FP32 = 4
INT32 = 4
INT64 = 8
# bytes of an element in the one layout that backward needs, its scales included
# (transformer_engine/common/recipe/__init__.py: block sizes)
_QUANTIZED = {"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}
_FP4 = 1 / 2 + 1 / 16


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that the sizes of a layer's tensors depend on.

    Attributes:
        model, training, sizes: as everywhere.
        imbalance: rows on the most loaded expert rank over the mean.
        cpu: operators are torch's for the CPU, which keep more than a GPU's.
    """

    model: ModelSpec
    training: TrainingSpec
    sizes: Sizes
    imbalance: Number = 1.0
    cpu: bool = False

    def in_training_precision(self) -> "Setup":
        """The same for a layer that computes nothing in 8 or 4 bits."""
        high = self.training.model_copy(update={"fp8": None, "fp4": False})
        return replace(self, training=high)

    @property
    def te(self) -> bool:
        """Layers are Transformer Engine's."""
        return self.training.transformer_impl != "local"

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return self.training.element_bytes

    @property
    def quantized(self) -> float | None:
        """Bytes of an element that a matrix product keeps in 8 or 4 bits; None in 16 or 32."""
        if not self.te:
            return None
        if self.training.fp4:
            return _FP4
        return _QUANTIZED.get(self.training.fp8_recipe, 1) if self.training.fp8 else None

    @property
    def keeps_original_input(self) -> bool:
        """Linears can keep a 16-bit input that is kept anyway, instead of a copy in 8 bits.

        megatron/core/extensions/transformer_engine.py: set_save_original_input; not with delayed
        scaling.
        """
        return self.training.fp4 or self.training.fp8_recipe != "delayed"

    @property
    def experts(self) -> Experts:
        """Of the model, which must have some."""
        assert self.model.experts is not None
        return self.model.experts

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on this rank, before sequence parallelism."""
        return self.sizes.tokens

    @property
    def shard(self) -> Number:
        """Tokens of a micro-batch that norms, residuals and the router see on this rank."""
        return self.tokens / self.sizes.tp if self.training.sequence_parallel else self.tokens

    @cached_property
    def hidden_shard(self) -> Number:
        """Bytes of hidden states on this rank."""
        return self.shard * self.model.hidden * self.element

    @property
    def vocabulary(self) -> Number:
        """Rows of the embedding on this rank, padded."""
        multiple = self.model.vocab_divisor * self.sizes.tp
        return -(-self.model.vocab // multiple) * self.model.vocab_divisor

    def if_split(self, bytes: Number) -> Number:
        """So many bytes where sequence parallelism splits tokens over several ranks, else 0."""
        if not self.training.sequence_parallel:
            return 0
        return np.where(np.asarray(self.sizes.tp) > 1, bytes, 0)

    def recomputes(self, module: str) -> bool:
        """Whether `--recompute-modules` names it."""
        return (
            self.training.recompute_granularity == "selective"
            and module in self.training.recompute_modules
        )

    def offloads(self, module: str) -> bool:
        """Whether `--offload-modules` names it."""
        return (
            self.training.fine_grained_activation_offloading
            and module in self.training.offload_modules
        )

    def weight_gradient(self, elements: Number) -> Number:
        """Bytes of a weight's gradient on its way to the gradient buffer."""
        return 0 if self.training.gradient_accumulation_fusion else elements * self.element


def norm(tape: Tape, setup: Setup, part: str, x: Tensor, *, rows: Number, width: Number) -> Tensor:
    """A norm over the last dimension.

    Args:
        tape: to write on.
        setup: of the layer.
        part: for reports.
        x: what is normalized.
        rows: of it.
        width: of it.
    """
    elements = rows * width
    out = tape.tensor("norm output", elements * setup.element)
    if setup.cpu and setup.model.norm == "RMSNorm":
        _composite_rms_norm(tape, setup, part, x, out, rows, elements)
        return out
    internals = _statistics(tape, setup, rows)
    tape.add(part, [x], [out, *internals], [x, *internals])
    return out


def _statistics(tape: Tape, setup: Setup, rows: Number) -> list[Tensor]:
    statistic = setup.element if setup.cpu else FP32
    per_row = statistic * (2 if setup.model.norm == "LayerNorm" else 1)
    return [tape.tensor("norm statistics", rows * per_row, differentiable=False)]


def _composite_rms_norm(
    tape: Tape, setup: Setup, part: str, x: Tensor, out: Tensor, rows: Number, elements: Number
) -> None:
    """torch.nn.RMSNorm out of single operations in fp32: keeps their inputs."""
    wide = tape.tensor("norm input in fp32", elements * FP32)
    normalized = tape.tensor("normalized", elements * FP32)
    statistics = tape.tensor("norm statistics", rows * FP32, differentiable=False)
    if setup.element == FP32:
        wide = x
    else:
        tape.add(part, [x], [wide])
    tape.add(part, [wide], [normalized, statistics], [wide, statistics])
    tape.add(part, [normalized], [out], [normalized])


def linear(
    tape: Tape,
    setup: Setup,
    part: str,
    x: Tensor,
    out: Tensor,
    *,
    inputs: Number,
    weight: Number,
    gathers: Number = 0,
    scatters: Number = 0,
    keeps_original: bool = False,
) -> None:
    """A matrix product with a weight.

    Args:
        tape: to write on.
        setup: of the layer.
        part: for reports.
        x: what it reads.
        out: what it writes.
        inputs: elements of `x`.
        weight: elements of the weight on this rank.
        gathers: bytes of `x` once sequence parallelism has gathered it, where it does.
        scatters: bytes of the output before sequence parallelism scatters it, where it does.
        keeps_original: in 8 bits, the input is kept as it came.
    """
    backward_extra = 2 * gathers + scatters + setup.weight_gradient(weight)
    if setup.quantized is None or keeps_original:
        kept, internals = x, []
    else:
        kept = tape.tensor("quantized input", inputs * setup.quantized, differentiable=False)
        internals = [kept]
    tape.add(
        part,
        [x],
        [out, *internals],
        [kept],
        forward_extra=gathers + scatters,
        backward_extra=backward_extra,
    )


def norm_linear(
    tape: Tape,
    setup: Setup,
    part: str,
    x: Tensor,
    out: Tensor,
    *,
    rows: Number,
    width: int,
    weight: Number,
    gathers: Number = 0,
) -> None:
    """A norm and the matrix product behind it, one module in Transformer Engine."""
    statistics = _statistics(tape, setup, rows)
    kept_bytes = rows * width * (setup.element if setup.quantized is None else setup.quantized)
    normalized = tape.tensor("norm output", kept_bytes, differentiable=False)
    tape.add(
        part,
        [x],
        [out, normalized, *statistics],
        [x, normalized, *statistics],
        forward_extra=gathers,
        backward_extra=2 * gathers + rows * width * setup.element + setup.weight_gradient(weight),
    )
