"""How long a layer takes, computation and communication put together as Megatron overlaps them.

Arguments may be arrays [layouts].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.accelerator import Accelerator, Stack
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.communication import Exchange, Order, Pass, layer_communication
from piper_megatron.resources.compute import layer_compute
from piper_megatron.resources.kernels import Work, host_s
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# what a part of `compute.py` or `communication.py` is called in a report
COMPUTE_PARTS = {
    "projections": "attention",
    "attention": "attention",
    "experts": "experts",
    "mlp": "mlp",
    "shared_experts": "mlp",
    "norms": "other",
    "router": "other",
    "permute": "other",
    "prediction": "other",
    "embedding": "head",
    "logits": "head",
    "loss": "head",
}
EXCHANGE_PARTS = {
    "attention": "tp",
    "mlp": "tp",
    "shared_experts": "tp",
    "embedding": "tp",
    "head": "tp",
    "context": "cp",
    "dispatch": "dispatch",
    "combine": "dispatch",
}
# share of the multiprocessors that an exchange takes from the computation beside it: DeepEP uses 20
# of an H100's 132 unless told otherwise (transformer_config.py: moe_deepep_num_sms), NCCL about as
# many; HybridEP reaches its rates with 8 (DeepEP's public figures of 2025)
_EXCHANGE_SHARE = 20 / 132
_HYBRIDEP_SHARE = 8 / 132
# computation between dispatch and combine, and the share of each part that happens there
_BETWEEN = {"experts": 1.0, "permute": 0.5}

Seconds = dict[str, Number]


@dataclass(frozen=True)
class Sides:
    """A pass cut where its layer exchanges tokens, for running it beside another one.

    Attributes:
        before_s: up to the dispatch forward; from the combine's end backward.
        dispatch_s: exchange on the side of the router.
        between_s: between the exchanges; of a dense layer, its MLP.
        combine_s: exchange on the side of the output.
        before_weight_s, between_weight_s: products for the weights' gradients that may come later
            (`--delay-wgrad-compute`); not part of the other times.
    """

    before_s: Number
    dispatch_s: Number
    between_s: Number
    combine_s: Number
    before_weight_s: Number = 0.0
    between_weight_s: Number = 0.0

    @property
    def computing_s(self) -> Number:
        """All but the exchanges."""
        return self.before_s + self.between_s + self.before_weight_s + self.between_weight_s

    @property
    def exchanging_s(self) -> Number:
        """Both exchanges."""
        return self.dispatch_s + self.combine_s

    def computing(self, slower: Number) -> "Sides":
        """The same with computation that takes so many times as long."""
        return Sides(
            self.before_s * slower,
            self.dispatch_s,
            self.between_s * slower,
            self.combine_s,
            self.before_weight_s * slower,
            self.between_weight_s * slower,
        )


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer, or of an end of the model, for one micro-batch.

    Attributes:
        forward, backward: by part of a report; they add up to the pass.
        forward_host_s, backward_host_s: that the host needs to launch the kernels.
        forward_sides, backward_sides: None at the ends of the model.
    """

    forward: Seconds
    backward: Seconds
    forward_host_s: Number = 0.0
    backward_host_s: Number = 0.0
    forward_sides: Sides | None = None
    backward_sides: Sides | None = None

    @property
    def forward_s(self) -> Number:
        """Of the forward pass."""
        return total(self.forward)

    @property
    def backward_s(self) -> Number:
        """Of the backward pass."""
        return total(self.backward)


def total(seconds: Mapping[str, Number]) -> Number:
    """Sum of the parts."""
    return sum(seconds.values(), start=0.0)


def add(*many: Mapping[str, Number]) -> Seconds:
    """Part by part."""
    sums: Seconds = {}
    for seconds in many:
        for part, spent in seconds.items():
            sums[part] = sums.get(part, 0.0) + spent
    return sums


def scaled(seconds: Mapping[str, Number], factor: Number) -> Seconds:
    """Every part, several times."""
    return {part: spent * factor for part, spent in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What computes and communicates.

    Attributes:
        platform: curves of accelerator and network.
        stack: software that runs on it.
        order: of the ranks on the devices.
    """

    platform: Platform
    stack: Stack
    order: Order = "megatron"

    @property
    def accelerator(self) -> Accelerator:
        """What a rank drives."""
        return self.platform.need_accelerator()


def layer_time(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    machine: Machine,
    *,
    moe: bool,
    windowed: bool = False,
    imbalance: float = 1.0,
) -> LayerTime:
    """Time of one transformer layer for one micro-batch.

    Args:
        model: what is trained.
        training: kernels, recomputation, overlap.
        sizes: one layout, or arrays of them.
        machine: whose curves hold.
        moe: the layer has experts.
        windowed: its attention sees a window.
        imbalance: rows of the most loaded rank's experts over the mean.
    """
    work = layer_compute(
        model,
        training,
        sizes,
        machine.accelerator,
        moe=moe,
        windowed=windowed,
        imbalance=imbalance,
    )
    exchanges = layer_communication(
        model,
        training,
        sizes,
        machine.platform,
        moe=moe,
        imbalance=imbalance,
        order=machine.order,
    )
    beside = training.overlap_moe_expert_parallel_comm
    return compose(work, exchanges, machine, dispatch_alone=beside, sides=beside)


def compose(
    work: Mapping[str, Work],
    exchanges: Mapping[str, Exchange],
    machine: Machine,
    *,
    dispatch_alone: bool = False,
    sides: bool = False,
) -> LayerTime:
    """Computation and communication of a layer or of an end of the model.

    An exchange that something hides shows as far as it takes longer. Where the host needs longer to
    launch the kernels than they run, the rest is the part `host`.

    Args:
        work: by part.
        exchanges: by part.
        machine: whose software makes kernels slower and launches longer.
        dispatch_alone: nothing of this micro-batch runs beside the experts' exchanges.
        sides: whether the result has some.
    """
    slower = 1 / machine.stack.efficiency
    forward = _compute_parts(work, "forward_s", slower)
    backward = _compute_parts(work, "backward_s", slower)
    recompute = sum((each.recompute_s for each in work.values()), start=0.0) * slower
    for part, exchange in exchanges.items():
        name = EXCHANGE_PARTS[part]
        alone = dispatch_alone and name == "dispatch"
        forward[name] = forward.get(name, 0.0) + _shown(exchange.forward, work, slower, alone)
        backward[name] = backward.get(name, 0.0) + _shown(exchange.backward, work, slower, alone)
        recompute = recompute + exchange.recompute_s
    backward["recompute"] = recompute
    host_forward, host_backward = (
        machine.stack.host
        * host_s(machine.accelerator, sum(getattr(each, launches) for each in work.values()))
        for launches in ("forward_launches", "backward_launches")
    )
    forward["host"] = np.maximum(host_forward - total(forward), 0.0)
    backward["host"] = np.maximum(host_backward - total(backward), 0.0)
    return LayerTime(
        forward,
        backward,
        host_forward,
        host_backward,
        _sides(work, exchanges, forward, "forward", slower) if sides else None,
        _sides(work, exchanges, backward, "backward", slower) if sides else None,
    )


def _compute_parts(work: Mapping[str, Work], name: str, slower: float) -> Seconds:
    return add(*({COMPUTE_PARTS[part]: getattr(w, name) * slower} for part, w in work.items()))


def _shown(exchanges: Pass, work: Mapping[str, Work], slower: float, alone: bool) -> Number:
    """What an exchange adds to the pass."""
    if alone or not exchanges.behind:
        return exchanges.seconds
    meanwhile: Number = 0.0
    for part, phase in exchanges.behind:
        if part in work:
            meanwhile = meanwhile + getattr(work[part], f"{phase}_s") * slower
    return exchanges.exposed_s + np.maximum(exchanges.hideable_s - meanwhile, 0.0)


def _sides(
    work: Mapping[str, Work],
    exchanges: Mapping[str, Exchange],
    seconds: Seconds,
    phase: str,
    slower: float,
) -> Sides:
    """Cuts a pass; what is neither between nor an exchange of tokens happens before."""

    def between(name: str) -> Number:
        return slower * sum(
            share * getattr(work[part], name) for part, share in _BETWEEN.items() if part in work
        )

    dispatch, combine = (
        getattr(exchanges[part], f"{phase}_s") if part in exchanges else 0.0
        for part in ("dispatch", "combine")
    )
    between_s = between(f"{phase}_s")
    between_weight_s = between("weight_s") if phase == "backward" else 0.0
    before_weight_s: Number = 0.0
    if phase == "backward":
        every_weight_s = slower * sum(each.weight_s for each in work.values())
        before_weight_s = every_weight_s - between_weight_s
    before_s = total(seconds) - seconds["host"] - between_s - dispatch - combine - before_weight_s
    return Sides(
        before_s,
        dispatch,
        between_s - between_weight_s,
        combine,
        before_weight_s,
        between_weight_s,
    )


def together_s(forward: LayerTime, backward: LayerTime, training: TrainingSpec) -> Number:
    """Time of a layer's forward pass beside another layer's backward pass.

    The order of both streams is that of `TransformerLayerSchedulePlan.run`
    (models/common/model_chunk_schedule_plan.py of Megatron-Core 0.19.2):
        communication  combine backward | dispatch forward, dispatch backward | combine forward
        computation    before forward   | between backward, between forward   | before backward
    With `--delay-wgrad-compute` products for weights' gradients run apart from the others: those of
    the experts beside the backward dispatch, those before the dispatch beside the next combine.

    Args:
        forward: of the layer that runs forward.
        backward: of the layer that runs backward.
        training: gives the dispatcher and that setting.
    """
    assert forward.forward_sides is not None
    assert backward.backward_sides is not None
    slower = _beside_exchanges(forward.forward_sides, backward.backward_sides, training)
    f = forward.forward_sides.computing(slower)
    b = backward.backward_sides.computing(slower)
    late = 1.0 if training.delay_wgrad_compute else 0.0
    # weight products of the layer before run while this one's combine goes back
    begun = np.maximum(b.combine_s, late * b.before_weight_s + f.before_s)
    between_b = begun + b.between_s + (1 - late) * b.between_weight_s
    dispatched_f = begun + f.dispatch_s
    dispatched_b = np.maximum(dispatched_f, between_b) + b.dispatch_s
    between_f = np.maximum(between_b + late * b.between_weight_s, dispatched_f) + f.between_s
    exchanged = np.maximum(between_f, dispatched_b)
    rest_b = b.before_s + (1 - late) * b.before_weight_s
    end = exchanged + np.maximum(rest_b, f.combine_s)
    return np.maximum(end, forward.forward_host_s + backward.backward_host_s)


def _beside_exchanges(forward: Sides, backward: Sides, training: TrainingSpec) -> Number:
    """How much longer computation takes because exchanges run on some of the multiprocessors."""
    hybrid = training.dispatcher == "flex" and training.flex_backend == "hybridep"
    taken = _HYBRIDEP_SHARE if hybrid else _EXCHANGE_SHARE
    computing = forward.computing_s + backward.computing_s
    exchanging = forward.exchanging_s + backward.exchanging_s
    while_exchanging = np.minimum(exchanging / np.maximum(computing, 1e-12), 1.0)
    return 1 / (1 - taken * while_exchanging)
