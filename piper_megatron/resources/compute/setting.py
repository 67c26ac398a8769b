"""What the operations of a layer depend on, and the two kinds most of them are of."""

from dataclasses import dataclass

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.accelerator import Accelerator, Precision
from piper_megatron.resources.kernels import Work, elementwise, linear
from piper_megatron.workload.spec import DTYPE_BYTES, Experts, ModelSpec, TrainingSpec

# bytes moved to quantise an element of an operand for its use in two products: a read, and writes
# of both layouts; scaling by the current tensor reads it twice
_CAST_BYTES = {"delayed": 4.0, "tensorwise": 6.0, "blockwise": 4.0, "mxfp8": 4.0, "custom": 6.0}
_CAST_BYTES_FP4 = 5.0  # with a Hadamard transform of one layout
_CAST_LAUNCHES = 3
_UNFUSED = 2.5  # traffic and kernels of a chain of elementwise operations over those of a fused one


@dataclass(frozen=True)
class Operation:
    """A piece of a layer's work.

    Attributes:
        part: of the layer that it belongs to.
        work: its time.
        modules: names of `--recompute-modules` that repeat it.
    """

    part: str
    work: Work
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Setting:
    """Model, training and sizes on an accelerator."""

    model: ModelSpec
    training: TrainingSpec
    sizes: Sizes
    accelerator: Accelerator

    @property
    def experts(self) -> Experts:
        """Of the model, which must have some."""
        assert self.model.experts is not None
        return self.model.experts

    @property
    def rows(self) -> Number:
        """Tokens of a micro-batch that attention and MLPs see on this rank."""
        return self.sizes.tokens

    @property
    def local_rows(self) -> Number:
        """Tokens of a micro-batch that norms, residuals and the router see."""
        return self.rows / self.sizes.tp if self.training.sequence_parallel else self.rows

    @property
    def precision(self) -> Precision:
        """Of the large matrix products; only Transformer Engine's are in 8 or 4 bits."""
        if self.training.transformer_impl != "local":
            if self.training.fp4:
                return "fp4"
            if self.training.fp8:
                return "fp8"
        return self.training.precision

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient buffer."""
        return DTYPE_BYTES[self.training.main_grads_dtype]

    def linear(
        self,
        inputs: Number,
        outputs: Number,
        *,
        rows: Number | None = None,
        groups: Number = 1,
        grouped: bool = False,
    ) -> Work:
        """A linear layer in the precision of the large products.

        Args:
            inputs: width of what comes in, on this rank.
            outputs: width of what goes out.
            rows: tokens, those of a micro-batch unless given.
            groups: experts that the rows are shared out to.
            grouped: one call for all of them.
        """
        quantised = self.precision in ("fp8", "fp4")
        block_scaled = self.precision == "fp8" and self.training.fp8_recipe == "blockwise"
        return linear(
            self.accelerator,
            self.precision,
            self.rows if rows is None else rows,
            inputs,
            outputs,
            groups=groups,
            grouped=grouped,
            gradient_bytes=self.gradient_bytes,
            cast_bytes=self._cast_bytes(),
            relative=self.accelerator.gemm.block_scaled if block_scaled else 1.0,
            launches=3 + _CAST_LAUNCHES * quantised,
        )

    def _cast_bytes(self) -> float:
        if self.precision == "fp4":
            return _CAST_BYTES_FP4
        return _CAST_BYTES[self.training.fp8_recipe] if self.precision == "fp8" else 0.0

    def pointwise(
        self, forward: Number, backward: Number, *, fused: bool = True, kernels: float = 1
    ) -> Work:
        """Elementwise kernels.

        Args:
            forward: elements that the forward pass reads and writes.
            backward: those of the backward pass.
            fused: no intermediate result goes to memory.
            kernels: of each pass.
        """
        more = 1.0 if fused else _UNFUSED
        scale = self.training.element_bytes * more
        return elementwise(
            self.accelerator, scale * forward, scale * backward, kernels=kernels * more
        )

    def activation(self, elements: Number) -> Work:
        """The nonlinearity of an MLP, by the elements that it puts out.

        A gated one reads two for each; backward reads those and the gradient, and writes as many
        gradients as it read.
        """
        read = 2 if self.model.gated else 1
        return self.pointwise(
            (read + 1) * elements,
            (2 * read + 1) * elements,
            fused=self.training.bias_activation_fusion,
        )

    def mlp(self, width: Number) -> Work:
        """A dense MLP of a width on this rank."""
        matrices = 2 if self.model.gated else 1
        hidden = self.model.hidden
        return (
            self.linear(hidden, matrices * width)
            + self.linear(width, hidden)
            + self.activation(self.rows * width)
        )
