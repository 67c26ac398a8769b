"""Activation functions and norms."""

from piper_megatron.check.command import Command
from piper_megatron.check.rule import Problem, rule

CONFIG = "core/transformer/transformer_config.py"


def _activation(c: Command) -> str:
    if c.squared_relu:
        return "squared ReLU"
    if c.swiglu:
        return "SwiGLU"
    return "quick GeGLU" if c.quick_geglu else "GELU"


def _fused(c: Command) -> bool:
    """Bias and activation in one kernel, as validation leaves it."""
    if c.swiglu:
        return c.bias_swiglu_fusion
    return c.bias_gelu_fusion and c.add_bias_linear


@rule("activation.one", "training/argument_utils.py:321", "training/argument_utils.py:324")
def one_activation_function(c: Command) -> Problem | None:
    """A model has one activation function."""
    others = [
        flag
        for flag, given in (("--squared-relu", c.squared_relu), ("--quick-geglu", c.quick_geglu))
        if given
    ]
    if c.swiglu and others:
        return Problem(f"--swiglu excludes {' and '.join(others)}", f"drop {' and '.join(others)}")
    return None


@rule("activation.fusion", f"{CONFIG}:2116", fix="add --no-bias-gelu-fusion")
def squared_relu_has_no_fused_bias(c: Command) -> bool:
    """--squared-relu with linear biases needs --no-bias-gelu-fusion."""
    return c.squared_relu and not c.swiglu and _fused(c)


@rule("activation.offset", f"{CONFIG}:2135", fix="--glu-linear-offset 0, or --quick-geglu")
def offset_of_the_linear_half_needs_quick_geglu(c: Command) -> bool:
    """--glu-linear-offset {c.glu_linear_offset} with a fused activation needs --quick-geglu."""
    return _fused(c) and c.glu_linear_offset != 0.0 and _activation(c) != "quick GeGLU"


@rule("activation.engine-and-fusion", f"{CONFIG}:2141", fix="drop --use-te-activation-func")
def engine_activation_excludes_fusion(c: Command) -> bool:
    """--use-te-activation-func excludes the fused bias and activation."""
    return c.use_te_activation_func and _fused(c)


@rule("activation.engine", f"{CONFIG}:2155", fix="drop --use-te-activation-func")
def engine_activation_is_a_common_one(c: Command) -> Problem | None:
    """Transformer Engine's activation functions are GELU, SiLU and ReLU."""
    if c.use_te_activation_func and _activation(c) in ("squared ReLU", "quick GeGLU"):
        return Problem(
            f"--use-te-activation-func does not know {_activation(c)}",
            "drop --use-te-activation-func",
        )
    return None


@rule("norm.residual", f"{CONFIG}:2149", fix="--normalization RMSNorm")
def fused_residual_needs_rmsnorm(c: Command) -> bool:
    """--fused-residual-rmsnorm needs --normalization RMSNorm."""
    return c.fused_residual_rmsnorm and c.normalization != "RMSNorm"


@rule(
    "init.xavier",
    "training/argument_utils.py:376",
    fix="drop --init-method-xavier-uniform",
)
def xavier_initialisation_is_broken(c: Command) -> bool:
    """--init-method-xavier-uniform stops Megatron: it sets a field that its configuration has \
    not."""
    return c.init_method_xavier_uniform


@rule("init.mup", f"{CONFIG}:2201", fix="--mup-base-hidden-size {c.hidden_size}")
def mup_base_is_positive(c: Command) -> bool:
    """--mup-base-hidden-size {c.mup_base_hidden_size} must be positive."""
    return c.use_mup and c.mup_base_hidden_size is not None and c.mup_base_hidden_size <= 0
