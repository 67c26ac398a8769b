"""Device memory outside torch's allocator: the process itself and its communicators."""

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.accelerator import MemoryOverheads

_RING_PEERS = 2
# torch gives its cache back before it gives up; what stays of it in fragments, over the peak
_FRAGMENTS = 0.02


def needed_gib(peak_gib: Number, outside_gib: Number) -> Number:
    """Device memory without which a job dies.

    Args:
        peak_gib: what torch allocates.
        outside_gib: beside its allocator, `communicators_gib`.
    """
    return peak_gib * (1 + _FRAGMENTS) + outside_gib


def communicators_gib(sizes: Sizes, overheads: MemoryOverheads) -> Number:
    """Device context and buffers of NCCL or RCCL on a rank.

    An all-to-all keeps a connection to every peer, a ring to two.

    Args:
        sizes: of one layout, or arrays of them.
        overheads: of the accelerator.
    """
    rings = (sizes.tp, sizes.cp, sizes.pp, sizes.dp * sizes.cp, sizes.edp, sizes.etp)
    peers = sizes.ep - 1 + sum(np.minimum(members - 1, _RING_PEERS) for members in rings)
    first = np.where(np.greater(sizes.world, 1), overheads.communicator_gib, 0.0)
    return overheads.context_gib + first + peers * overheads.peer_communicator_gib
