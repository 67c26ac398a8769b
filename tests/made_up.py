"""Platforms with round numbers, for arithmetic that one can do by hand."""

from piper_megatron.platform.platform import NetworkLevel, Platform, load_platform
from piper_megatron.platform.transfer import Efficiency, Transfer

OPERATIONS = tuple(Efficiency.model_fields)


def transfer(efficiency: float = 1.0, **numbers) -> Transfer:
    """Every operation as efficient as any other; no latencies and no ramp unless given."""
    zero = {"startup_s": 0.0, "latency_s": 0.0, "ramp_bytes": 0.0}
    return Transfer(
        **zero | numbers,
        efficiency=Efficiency(**dict.fromkeys(OPERATIONS, efficiency)),
        evidence="assumed",
        source="made up",
    )


def platform(
    node_gbps: float = 50.0,
    network_gbps: float = 12.5,
    *,
    ranks_per_node: int = 8,
    inside: Transfer | None = None,
    between: Transfer | None = None,
) -> Platform:
    """Nodes under one switch, of accelerators that copy in no time."""
    accelerator = load_platform("frontier").need_accelerator()
    at_once = accelerator.model_copy(
        update={"hbm": accelerator.hbm.model_copy(update={"gbps": 1e12})}
    )
    level = {"evidence": "assumed", "source": "made up"}
    return Platform(
        name="made-up",
        description="made up",
        ranks_per_node=ranks_per_node,
        levels=(
            NetworkLevel(name="node", gbps=node_gbps, transfer=inside or transfer(), **level),
            NetworkLevel(
                name="machine", gbps=network_gbps, transfer=between or transfer(), **level
            ),
        ),
        accelerator=at_once,
    )
