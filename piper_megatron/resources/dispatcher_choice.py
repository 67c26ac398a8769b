"""Which way tokens go to their experts when it is left to us: `--piper-dispatcher auto`.

The prices are those of an estimate. What a platform's file has measured decides over them.
"""

from dataclasses import dataclass, replace

from piper_megatron.platform.dispatch_profile import DispatchProfile
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.dispatch_rows import Distinct
from piper_megatron.resources.piper_dispatch import Exchanges
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.dispatcher_flags import ALGORITHMS
from piper_megatron.workload.spec import Experts, TrainingSpec


@dataclass(frozen=True)
class DispatcherChoice:
    """What was chosen.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        chunks: parts of the traffic between nodes; 1 where an algorithm has none.
        seconds: of one dispatch and one combine, forward, by algorithm; empty where nothing had to
            be compared.
        why: where the seconds come from, or what left no choice.
    """

    algorithm: str
    chunks: int
    seconds: dict[str, float]
    why: str


def choose_dispatcher(
    platform: Platform,
    training: TrainingSpec,
    experts: Experts,
    reach: Reach,
    *,
    tokens: int,
    row_bytes: int,
    equal_shares: bool = True,
    reached: Distinct | None = None,
    among: tuple[str, ...] = ALGORITHMS,
) -> DispatcherChoice:
    """The fastest dispatcher of an expert group; all arguments are the same on its ranks.

    Args:
        platform: levels and curves; measured times decide where it has those of the shape.
        training: precision, and the parts of the traffic between nodes if they are given.
        experts: routed experts.
        reach: of the expert group.
        tokens: of a rank.
        row_bytes: of a token.
        equal_shares: whether nodes hold equally many ranks of the group.
        reached: nodes and ranks that a token reaches, counted in a trace; None for uniform routing.
        among: the algorithms to choose from, the first of equally fast ones wins.
    """
    nodes = int(reach.domains[platform.node_level])
    if not equal_shares:
        return DispatcherChoice("flat", 1, {}, "nodes hold unequal shares of the expert group")
    if nodes == 1 and len(among) > 1:
        return DispatcherChoice("flat", 1, {}, "the expert group lies inside one node")
    exchanges = Exchanges(
        algorithm=among[0],
        platform=platform,
        training=training,
        experts=experts,
        reach=reach,
        tokens=tokens,
        row_bytes=row_bytes,
        chunks=training.dispatcher_chunks,
        reached=reached,
    )
    options = {name: replace(exchanges, algorithm=name) for name in among}
    measured, why = _measured(platform.dispatch, exchanges)
    measured = {name: s for name, s in (measured or {}).items() if name in among}
    # plain floats of few digits: equal prices are equal on all processors
    seconds = measured or {
        name: float(f"{float(each.round_trip().seconds):.6g}") for name, each in options.items()
    }
    best = min((name for name in among if name in seconds), key=seconds.__getitem__)
    if not measured:
        why = f"predicted{_assumed(platform, reach)} on {platform.name}{why}"
    return DispatcherChoice(best, int(options[best].best_chunks()), seconds, why)


def _measured(
    profiles: tuple[DispatchProfile, ...], exchanges: Exchanges
) -> tuple[dict[str, float] | None, str]:
    """Seconds that were measured for this shape and size; why there are none."""
    experts = exchanges.experts
    shape = (int(exchanges.nodes), int(exchanges.per_node), experts.count, experts.topk)
    token_bytes = float(exchanges.tokens * exchanges.row_bytes)
    for profile in profiles:
        if profile.shape != shape:
            continue
        if (seconds := profile.at(token_bytes)) is not None:
            return seconds, f"measured ({profile.source})"
        return None, ", since its measurements do not reach this size"
    return None, ", since its measurements have no such group" if profiles else ""


def _assumed(platform: Platform, reach: Reach) -> str:
    """Says so when a bandwidth that the group uses is only assumed."""
    inside = (reach.members, *reach.domains)
    met = [level for level, parts in zip(platform.levels, inside, strict=False) if parts > 1]
    return " from assumed bandwidths" if any(x.evidence == "assumed" for x in met) else ""
