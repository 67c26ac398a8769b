"""What a message costs at a network level beyond its bytes at the level's bandwidth.

A collective in which a rank sends `sent` bytes past a level, in `steps` ring steps or messages,
takes

    startup_s + steps * latency_s + moved / (gbps * efficiency) * (1 + ramp / (moved + ramp))

with moved = sent + own_share * (the rank's own part of the tensor), ramp = ramp_bytes. The last
factor is 2 for short messages and 1 for long ones; `own_share` is why two members reach less than
eight. `resources/network.py` applies it; the numbers are in the platform files.
"""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from piper_megatron.platform.evidence import Stated
from piper_megatron.strict import StrictModel

Share = Annotated[float, Field(gt=0, le=1)]


class Efficiency(StrictModel):
    """Share of a level's `gbps` that long messages reach, by operation.

    Attributes:
        all_reduce, all_gather, reduce_scatter, all_to_all: the library's collectives.
        point_to_point: one sender and one receiver, and exchanges with one peer in every domain.
        deepep, hybridep: kernels that de-duplicate rows on their way; `hybridep` is NCCL-EP, too.
    """

    all_reduce: Share
    all_gather: Share
    reduce_scatter: Share
    all_to_all: Share
    point_to_point: Share
    deepep: Share
    hybridep: Share


class Transfer(Stated):
    """Latencies and message-size curve of a level.

    Attributes:
        startup_s: seconds once a collective, whatever its size.
        latency_s: seconds of each step of a ring and of each message of an all-to-all.
        ramp_bytes: bytes at which 2/3 of the long-message rate is reached.
        own_share: share of a rank's own part that is copied at the level's rate, too.
        mesh: every two ranks of a domain have a link of their own, so that a group of m of its n
            ranks has (m - 1) / (n - 1) of the bandwidth.
        fan_out: what is left of the rate when an all-to-all talks to all ranks of so many domains
            of the level inside; linear in the logarithm between, 1 for a single domain.
        efficiency: of the bandwidth, for long messages.
    """

    startup_s: NonNegativeFloat
    latency_s: NonNegativeFloat
    ramp_bytes: NonNegativeFloat
    own_share: NonNegativeFloat = 0.0
    mesh: bool = False
    fan_out: dict[PositiveInt, Share] = Field(default_factory=dict)
    efficiency: Efficiency


# for a platform file that does not say; the link inside a node as on a DGX H100, the network as
# InfiniBand with one port per rank
INSIDE_NODE = Transfer(
    startup_s=7e-6,
    latency_s=1e-6,
    ramp_bytes=12e6,
    own_share=0.4,
    efficiency=Efficiency(
        all_reduce=0.8,
        all_gather=0.8,
        reduce_scatter=0.8,
        all_to_all=0.8,
        point_to_point=0.6,
        deepep=0.6,
        hybridep=0.7,
    ),
    evidence="assumed",
    source="as inside a DGX H100",
)
BETWEEN_NODES = Transfer(
    startup_s=15e-6,
    latency_s=3e-6,
    ramp_bytes=2e6,
    efficiency=Efficiency(
        all_reduce=0.85,
        all_gather=0.85,
        reduce_scatter=0.85,
        all_to_all=0.92,
        point_to_point=0.95,
        deepep=0.9,
        hybridep=0.9,
    ),
    evidence="assumed",
    source="as between nodes of DGX H100",
)
