"""What is before the first and behind the last transformer layer: embedding, head, loss, MTP.

Sources, megatron/core of 0.19.2: models/common/embeddings/language_model_embedding.py,
models/gpt/gpt_model.py (`_postprocess`), tensor_parallel/{layers,cross_entropy}.py,
fusions/fused_cross_entropy.py, transformer/multi_token_prediction.py; Transformer Engine 2.4 to
2.17: pytorch/triton/cross_entropy.py.
"""

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.activations.core_attention import dropout
from piper_megatron.resources.activations.layer import (
    Activations,
    measured,
    setup_of,
    transformer_layer,
)
from piper_megatron.resources.activations.setup import FP32, INT64, Setup, linear, norm
from piper_megatron.resources.activations.tape import Tape, Tensor
from piper_megatron.workload.spec import ModelSpec, TrainingSpec


def embedding_activations(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, *, cpu: bool = False
) -> Activations:
    """What the input embedding keeps; its output is the first layer's input and counted there.

    Args:
        model: as for a layer.
        training: as for a layer.
        sizes: as for a layer.
        cpu: operators are torch's for the CPU.
    """
    setup = setup_of(model, training, sizes, cpu=cpu)
    tape = Tape()
    out = _embedding(tape, setup)
    return measured(tape, [], out)


def head_activations(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    *,
    final_norm: bool = True,
    cpu: bool = False,
) -> Activations:
    """What the final norm, the output layer and the loss keep.

    With multi-token prediction, every depth has logits and a loss of its own, one after the other;
    each keeps its own.

    Args:
        model: as for a layer.
        training: as for a layer.
        sizes: as for a layer.
        final_norm: the decoder's last norm is on this stage.
        cpu: operators are torch's for the CPU.
    """
    setup = setup_of(model, training, sizes, cpu=cpu)
    tape = Tape()
    hidden = x = tape.tensor("hidden states", setup.hidden_shard)
    if final_norm:
        x = _final_norm(tape, setup, x)
    inputs = [x]
    if model.mtp_layers:
        # all depths are joined in one tensor, of which each output layer keeps a part
        depths = 1 + model.mtp_layers
        joined = tape.tensor("joined hidden states", depths * setup.hidden_shard)
        tape.add("head", [x], [joined])
        inputs = [joined.view(setup.hidden_shard) for _ in range(depths)]
        tape.add("head", [joined], inputs)
    for x in reversed(inputs):
        _loss(tape, setup, _logits(tape, setup, x))
    return measured(tape, [hidden], None)


def mtp_activations(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    *,
    imbalance: Number = 1.0,
    moe: bool | None = None,
    cpu: bool = False,
) -> Activations:
    """What one multi-token-prediction layer keeps, its embedding included, its logits not.

    Full recomputation applies to it with the method `uniform` alone
    (`MultiTokenPredictionLayer._checkpointed_forward`).

    Args:
        model: as for a layer.
        training: as for a layer.
        sizes: as for a layer.
        imbalance: rows on the most loaded expert rank over the mean.
        moe: whether it has experts; None for those of the last decoder layer.
        cpu: operators are torch's for the CPU.
    """
    setup = setup_of(model, training, sizes, imbalance, cpu)
    tape = Tape()
    hidden = tape.tensor("hidden states", setup.hidden_shard)
    embedded = _embedding(tape, setup)
    checkpointed = (
        training.recompute_granularity == "full" and training.recompute_method == "uniform"
    )
    with tape.recomputed(checkpointed, "checkpoints"):
        x = _joined(tape, setup, embedded, hidden)
        x = transformer_layer(tape, setup, x, moe=model.mtp_moe if moe is None else moe)
        out = _final_norm(tape, setup, x)
    return measured(tape, [hidden], out)


def _embedding(tape: Tape, setup: Setup) -> Tensor:
    """Word embedding: keeps token numbers, and with tensor parallelism those of other ranks."""
    hidden, tokens = setup.model.hidden, setup.tokens
    split = np.asarray(setup.sizes.tp) > 1
    numbers = tape.tensor("token numbers", tokens * INT64, differentiable=False)
    elsewhere = tape.tensor("tokens of other ranks", np.where(split, tokens, 0))
    out = tape.tensor("hidden states", setup.hidden_shard)
    whole = setup.if_split(tokens * hidden * setup.element)
    keeps = [numbers, elsewhere]
    if setup.model.position == "learned":
        keeps.append(tape.tensor("position numbers", tokens * INT64, differentiable=False))
    # the weight's gradient is as large as the weight, whatever is fused elsewhere
    gradient = setup.vocabulary * hidden * setup.element
    tape.add(
        "embedding", [], [out, *keeps], keeps, forward_extra=whole, backward_extra=whole + gradient
    )
    if setup.training.hidden_dropout:
        out = dropout(tape, setup, "embedding", out, setup.shard * hidden)
    return out


def _final_norm(tape: Tape, setup: Setup, x: Tensor) -> Tensor:
    return norm(tape, setup, "head", x, rows=setup.shard, width=setup.model.hidden)


def _joined(tape: Tape, setup: Setup, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Both inputs of an MTP layer, normalized, joined and projected.

    The projection is gathered over all ranks and sliced, which keeps all of it.
    """
    width = setup.model.hidden
    normed = [
        norm(tape, setup, "mtp", x, rows=setup.shard, width=width) for x in (embedded, hidden)
    ]
    joined = tape.tensor("joined", 2 * setup.hidden_shard)
    tape.add("mtp", normed, [joined])
    projected = tape.tensor("projected", setup.tokens * width * setup.element)
    linear(
        tape,
        setup,
        "mtp",
        joined,
        projected,
        inputs=setup.shard * 2 * width,
        weight=2 * width * width / setup.sizes.tp,
        gathers=setup.if_split(setup.tokens * 2 * width * setup.element),
        scatters=projected.bytes / setup.sizes.tp,
    )
    sliced = projected.view(setup.hidden_shard)
    tape.add("mtp", [projected], [sliced])
    return sliced


def _logits(tape: Tape, setup: Setup, x: Tensor) -> Tensor:
    """The output layer is Megatron's own, in the training precision."""
    rows = setup.vocabulary
    logits = tape.tensor("logits", setup.tokens * rows * setup.element)
    hidden = setup.model.hidden
    # the gradient of all tokens is there before it is scattered
    whole = setup.if_split(setup.tokens * hidden * setup.element)
    weight_gradient = setup.weight_gradient(rows * hidden)
    tape.add("logits", [x], [logits], [x], backward_extra=whole + weight_gradient)
    return logits


def _loss(tape: Tape, setup: Setup, logits: Tensor) -> None:
    """Cross entropy.

    Megatron's own, fused or not, works on an fp32 copy and keeps the probabilities in its place;
    Transformer Engine's writes the gradient over the logits.
    """
    training = setup.training
    pairs = logits.bytes / setup.element
    if training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl != "native":
        tape.add("logits", [logits], [], [logits], writes_over_kept=True)
        return
    probabilities = tape.tensor("softmax in fp32", pairs * FP32, differentiable=False)
    masks = tape.tensor("target masks", setup.tokens * (1 + INT64), differentiable=False)
    tape.add("logits", [logits], [probabilities, masks], [probabilities, masks])
