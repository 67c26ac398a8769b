"""Exchanges with their price and with what Megatron computes meanwhile."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from piper_megatron.layout.collectives import Collective, Phase
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.network import Cost, collective_cost, no_cost
from piper_megatron.resources.reach import Order, Reach, members_at_levels
from piper_megatron.workload.spec import TrainingSpec

# a part of `compute.layer_compute` and a pass of it, or its products for weight gradients alone;
# for exchanges of a step: all work of the `last`, `first` or `every` micro-batch
Compute = tuple[str, Literal["forward", "backward", "weight"]]

# modules of --recompute-modules that repeat the forward exchanges of a part
_RECOMPUTED_WITH = {
    "context": {"core_attn"},
    "mlp": {"mlp"},
    "shared_experts": {"moe", "shared_experts"},
    "dispatch": {"moe"},
    "combine": {"moe"},
}


@dataclass(frozen=True)
class Pass:
    """Exchanges of one pass.

    Attributes:
        exposed_s: nothing is computed meanwhile.
        hideable_s: the computation of `behind` runs meanwhile; what lasts longer shows.
        behind: computations, together; of another micro-batch where the pass is not the same.
    """

    exposed_s: Number = 0.0
    hideable_s: Number = 0.0
    behind: tuple[Compute, ...] = ()

    @property
    def seconds(self) -> Number:
        """Both."""
        return self.exposed_s + self.hideable_s


@dataclass(frozen=True)
class Exchange:
    """Exchanges of one part of a layer, for one micro-batch.

    Attributes:
        forward, backward: of the two passes, without what recomputation repeats.
        recompute_s: exposed, of forward exchanges that the backward pass repeats.
        bytes_by_level: that a rank sends to receivers which it meets at each level, innermost
            first, in both passes.
        messages: that it sends.
    """

    forward: Pass
    backward: Pass
    recompute_s: Number
    bytes_by_level: tuple[Number, ...]
    messages: Number

    @property
    def forward_s(self) -> Number:
        """Seconds of the forward pass, hidden or not."""
        return self.forward.seconds

    @property
    def backward_s(self) -> Number:
        """Seconds of the backward pass, hidden or not, without recomputation."""
        return self.backward.seconds


@dataclass(frozen=True)
class Priced:
    """The cost of an exchange, and what runs meanwhile.

    Attributes:
        part: what it serves.
        phase: pass in which it happens.
        cost: of it.
        behind: computations that run meanwhile.
        exposed_share: of the cost, although something runs meanwhile.
        repeated: recomputation does it again.
    """

    part: str
    phase: Phase
    cost: Cost
    behind: tuple[Compute, ...] = ()
    exposed_share: Number = 0.0
    repeated: bool = True


@dataclass(frozen=True)
class Pricing:
    """Prices collectives in the groups of one or many layouts.

    Attributes:
        platform: levels and curves.
        sizes: of the layouts.
        order: of the ranks on the devices.
    """

    platform: Platform
    sizes: Sizes
    order: Order
    _reaches: dict[str, Reach] = field(default_factory=dict, init=False, repr=False)

    def reach(self, kind: str) -> Reach:
        """How the groups of a kind spread."""
        if kind not in self._reaches:
            self._reaches[kind] = members_at_levels(self.platform, self.sizes, kind, self.order)
        return self._reaches[kind]

    def collective(self, collective: Collective, training: TrainingSpec) -> Priced:
        """The cost of a collective, and what Megatron computes meanwhile."""
        cost = collective_cost(self.platform, self.reach(collective.kind), collective)
        behind = ((collective.behind, collective.phase),) if collective.behind else ()
        # a product that is cut into TP pieces starts or ends with one that nothing runs beside
        pieces = training.tp_comm_overlap and collective.kind == "tp"
        exposed = 1 / self.sizes.tp if pieces else 0.0
        return Priced(collective.part, collective.phase, cost, behind, exposed)


def exchange_of(
    platform: Platform, training: TrainingSpec, part: str, priced: list[Priced]
) -> Exchange:
    """Exchanges of one part, put together."""
    total = no_cost(platform)
    for each in priced:
        total = total + each.cost
    forward = _pass(each for each in priced if each.phase == "forward")
    backward = _pass(each for each in priced if each.phase == "backward")
    repeated = training.recompute_granularity == "full" or bool(
        _RECOMPUTED_WITH.get(part, set()) & set(training.recompute_modules)
    )
    again = _pass(each for each in priced if each.phase == "forward" and each.repeated)
    return Exchange(
        forward,
        backward,
        again.seconds if repeated else 0.0,
        total.bytes_by_level,
        total.messages,
    )


def _pass(priced: Iterable[Priced]) -> Pass:
    exposed: Number = 0.0
    hideable: Number = 0.0
    behind: dict[Compute, None] = {}
    for each in priced:
        shown = each.exposed_share if each.behind else 1.0
        exposed = exposed + shown * each.cost.seconds
        hideable = hideable + (1 - shown) * each.cost.seconds
        behind |= dict.fromkeys(each.behind)
    return Pass(exposed, hideable, tuple(behind))
