"""The platform of a running job: a known machine's numbers on the network that the job sees."""

from collections.abc import Sequence

from piper_megatron.platform.platform import NetworkLevel, Platform
from piper_megatron.platform.topology import Level, Location, Topology

_NAME = "this-job"


def platform_of_job(
    topology: Topology, locations: Sequence[Location], known: Platform | None
) -> Platform:
    """What is known of the machine under a job.

    Args:
        topology: levels of the network.
        locations: of the ranks.
        known: the machine, where it is a known one; lends its accelerator, its measurements, and
            the curves of levels of the same name.

    Returns:
        The known platform where its levels are the topology's. Without one there is no accelerator,
        and curves are the assumed ones of `transfer.py`.
    """
    if known is not None and known.network() == topology.levels:
        return known
    curves = {level.name: level.transfer for level in known.levels} if known else {}
    inside = [level.ranks or 1 for level in topology.levels[: topology.node_level]]
    largest = 1 + max(location.local_rank for location in locations)
    pieces = max(inside, default=1)
    return Platform(
        name=known.name if known else _NAME,
        description=f"topology {topology.name}",
        ranks_per_node=known.ranks_per_node if known else -(-largest // pieces) * pieces,
        levels=tuple(
            _network_level(level, topology.name).model_copy(
                update={"transfer": curves.get(level.name)}
            )
            for level in topology.levels
        ),
        accelerator=known.accelerator if known else None,
        dispatch=known.dispatch if known else (),
    )


def _network_level(level: Level, topology: str) -> NetworkLevel:
    return NetworkLevel.model_validate(
        {
            "name": level.name,
            "gbps": level.gbps,
            "ranks": level.ranks,
            "evidence": level.evidence,
            "source": level.source or f"topology {topology}",
        }
    )
