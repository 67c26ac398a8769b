"""Both ends of the model: embedding, output layer and loss, multi-token prediction."""

from dataclasses import replace

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.accelerator import Accelerator
from piper_megatron.resources.compute.setting import Setting
from piper_megatron.resources.kernels import Work, elementwise, linear, product_s
from piper_megatron.workload.spec import ModelSpec, TrainingSpec


def embedding_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> Work:
    """Work of the input embedding for one micro-batch: rows are gathered, and gradients added."""
    setting = Setting(model, training, sizes, accelerator)
    elements = setting.rows * model.hidden
    return elementwise(
        accelerator,
        2 * training.element_bytes * elements,
        (training.element_bytes + 2 * setting.gradient_bytes) * elements,
        kernels=4,
        efficiency=accelerator.kernels.permute_efficiency,
    )


def head_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> dict[str, Work]:
    """Work of the last norm, the output layer and the cross entropy for one micro-batch.

    Each depth of multi-token prediction has one of its own. The output layer is not quantised.
    """
    setting = Setting(model, training, sizes, accelerator)
    multiple = model.vocab_divisor * sizes.tp
    vocab = -(-model.vocab // multiple) * multiple / sizes.tp
    elements = setting.local_rows * model.hidden
    logits = linear(
        accelerator,
        training.precision,
        setting.rows,
        model.hidden,
        vocab,
        gradient_bytes=setting.gradient_bytes,
    )
    return {
        "logits": setting.pointwise(2 * elements, 4 * elements) + logits,
        "loss": _cross_entropy(setting, setting.rows * vocab),
    }


def _cross_entropy(setting: Setting, logits: Number) -> Work:
    """Passes over the logits, by the bytes that they read and write for each.

    Unfused (tensor_parallel/cross_entropy.py), the logits are converted to fp32 (6 bytes), and fp32
    is read or written eight times more; backward scales the kept softmax and converts it back.
    TE's kernel takes a running softmax and leaves the gradient in place. The fusion with the output
    layer keeps nothing and repeats its product.
    """
    training = setting.training
    forward, backward, kernels = 38.0, 14.0, 10.0
    if training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl == "native":
        forward, backward, kernels = 26.0, 14.0, 4.0
    elif training.cross_entropy_loss_fusion:
        forward, backward, kernels = 6.0, 4.0, 2.0
    work = elementwise(
        setting.accelerator,
        forward * logits,
        backward * logits,
        kernels=kernels,
        efficiency=setting.accelerator.kernels.loss_efficiency,
    )
    if training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl == "linear":
        flops = 2 * logits * setting.model.hidden
        return replace(
            work, recompute_s=product_s(setting.accelerator, training.precision, flops, 0)
        )
    return work


def prediction_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> Work:
    """Work that a depth of multi-token prediction has beside its transformer layer and its head.

    Two norms, and a projection from twice the hidden size (multi_token_prediction.py).
    """
    setting = Setting(model, training, sizes, accelerator)
    elements = setting.local_rows * model.hidden
    norms = setting.pointwise(6 * elements, 10 * elements, kernels=3)
    return norms + setting.linear(2 * model.hidden, model.hidden / sizes.tp)
