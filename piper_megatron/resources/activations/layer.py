"""A transformer layer as a whole: what it keeps, and what it needs while it runs.

Sources, megatron/core of 0.19.2: transformer/transformer_layer.py, recompute.py
(`checkpointed_forward`), tensor_parallel/random.py (`CheckpointFunction`,
`CheckpointWithoutOutput`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.activations.attention import self_attention
from piper_megatron.resources.activations.latent_attention import latent_attention
from piper_megatron.resources.activations.mlp import add_to_residual, dense_mlp
from piper_megatron.resources.activations.moe import moe as moe_mlp
from piper_megatron.resources.activations.setup import Setup
from piper_megatron.resources.activations.tape import (
    Region,
    Tape,
    Tensor,
    backward_peak,
    by_part,
    forward_peak,
    kept,
    total,
)
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

ROUTED = ("dispatch", "experts")
"""Parts whose size follows the rows that experts receive."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    Attributes:
        saved: kept from forward to backward, by part; the module's input belongs to it.
        recomputed: back again while it runs backward, by part.
        offloaded: on the host between forward and backward, by part.
        working: beyond `saved`, at the highest point of its backward; the gradients of its output
            and of its input are in it.
        working_forward: the same for its forward; its output is in it.
    """

    saved: Mapping[str, Number]
    recomputed: Mapping[str, Number]
    offloaded: Mapping[str, Number]
    working: Number
    working_forward: Number

    @property
    def total(self) -> Number:
        """Bytes kept from forward to backward."""
        return sum(self.saved.values(), start=0)

    @property
    def routed(self) -> Number:
        """Of these, rows of experts and their exchange."""
        return sum((self.saved.get(part, 0) for part in ROUTED), start=0)


def layer_activations(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    *,
    moe: bool,
    imbalance: Number = 1.0,
    cpu: bool = False,
    checkpointed: bool | None = None,
    offloading: bool = True,
    low_precision: bool = True,
) -> Activations:
    """What one transformer layer keeps and needs.

    Args:
        model: of the layer.
        training: decides what is kept, recomputed and offloaded.
        sizes: of one layout, or arrays.
        moe: whether the layer has experts.
        imbalance: rows on the most loaded expert rank over the mean.
        cpu: operators are torch's for the CPU (transformer_impl `local`).
        checkpointed: only its input is kept; None for what `--recompute-granularity` says of a
            layer by itself.
        offloading: what `--offload-modules` names is offloaded; the last layer's stays.
        low_precision: 8- and 4-bit formats apply to it.
    """
    setup = setup_of(model, training, sizes, imbalance, cpu, offloading, low_precision)
    if checkpointed is None:
        checkpointed = training.recompute_granularity == "full"
    return _layers(setup, [moe], checkpointed)


def layers_activations(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    *,
    moe: Sequence[bool],
    imbalance: Number = 1.0,
    cpu: bool = False,
) -> Activations:
    """What several layers keep and need of which only the first one's input is kept.

    Args:
        model: as for one layer.
        training: as for one layer.
        sizes: as for one layer.
        moe: of each layer, whether it has experts.
        imbalance: rows on the most loaded expert rank over the mean.
        cpu: operators are torch's for the CPU.
    """
    return _layers(setup_of(model, training, sizes, imbalance, cpu), moe, True)


def _layers(setup: Setup, moe: Sequence[bool], checkpointed: bool) -> Activations:
    tape = Tape()
    hidden = out = tape.tensor("hidden states", setup.hidden_shard)
    scattered_by = setup.sizes.tp if setup.training.distribute_saved_activations else 1
    with tape.recomputed(checkpointed, "checkpoints", scattered_by=scattered_by):
        for has_experts in moe:
            out = transformer_layer(tape, setup, out, moe=has_experts)
    return measured(tape, [hidden], out)


def setup_of(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    imbalance: Number = 1.0,
    cpu: bool = False,
    offloading: bool = True,
    low_precision: bool = True,
) -> Setup:
    """What the tensors of a layer depend on; see `layer_activations`."""
    if not offloading:
        training = training.model_copy(update={"fine_grained_activation_offloading": False})
    setup = Setup(model=model, training=training, sizes=sizes, imbalance=imbalance, cpu=cpu)
    return setup if low_precision else setup.in_training_precision()


def transformer_layer(tape: Tape, setup: Setup, hidden: Tensor, *, moe: bool) -> Tensor:
    """Writes down a layer; returns its output."""
    attend: Callable[[Tape, Setup, Tensor], Tensor] = self_attention
    if setup.model.attention.latent:
        attend = latent_attention
    attended = add_to_residual(tape, setup, attend(tape, setup, hidden), hidden)
    feed = moe_mlp if moe else dense_mlp
    return add_to_residual(tape, setup, feed(tape, setup, attended), attended)


def measured(tape: Tape, inputs: list[Tensor], output: Tensor | None) -> Activations:
    """What a tape keeps and needs.

    Args:
        tape: written to its end.
        inputs: tensors from outside.
        output: whose gradient comes back; None where backward begins here.
    """
    saved = kept(tape.items)
    bytes = total(saved)
    recomputed: dict[str, Number] = {}
    for item in tape.items:
        if isinstance(item, Region):
            for part, size in by_part(kept(item.body)).items():
                recomputed[part] = recomputed.get(part, 0) + size
    return Activations(
        saved=by_part(saved),
        recomputed=recomputed,
        offloaded=by_part(kept(tape.items, offloaded=True)),
        working=backward_peak(tape.items, output) - bytes,
        working_forward=forward_peak(tape.items, inputs) - bytes,
    )
