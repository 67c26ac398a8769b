"""The rank grid of a training job: sizes, derived sizes, and which ranks form which group.

Megatron keeps two grids over the same ranks, both with the pipeline outermost ("tp-cp-ep-dp-pp"):
    dense   rank = ((pp * DP + dp) * CP + cp) * TP + tp
    expert  rank = ((pp * EDP + edp) * EP + ep) * ETP + etp
"""

from dataclasses import asdict, dataclass
from math import prod

import numpy as np

from piper_megatron.errors import LayoutError

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
# kind of group -> (grid, axes inside the group, slowest first)
GROUPS = {
    "tp": (DENSE_AXES, ("tp",)),
    "cp": (DENSE_AXES, ("cp",)),
    "dp": (DENSE_AXES, ("dp", "cp")),
    "ep": (EXPERT_AXES, ("ep",)),
    "etp": (EXPERT_AXES, ("etp",)),
    "tp_ep": (EXPERT_AXES, ("ep", "etp")),
    "edp": (EXPERT_AXES, ("edp",)),
    "pp": (DENSE_AXES, ("pp",)),
}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of a job; `dp` and `edp` follow from the world size.

    Attributes:
        world: number of ranks.
        tp, cp, pp, ep, etp: tensor, context, pipeline, expert and expert-tensor parallel sizes.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise LayoutError(f"{name} must be at least 1, got {size}")
        # megatron/core/parallel_state.py (0.19.2): lines 823 and 881
        for sizes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            product = prod(getattr(self, s) for s in sizes)
            if self.world % product:
                raise LayoutError(
                    f"world size {self.world} is not a multiple of "
                    f"{' x '.join(f'{s.upper()} {getattr(self, s)}' for s in sizes)} = {product}; "
                    f"{self._legal_grids()}"
                )

    def _legal_grids(self) -> str:
        dense, expert = self.tp * self.cp, self.etp
        grids = [
            f"{pp}x{ep}"
            for pp in range(1, self.world + 1)
            if self.world % pp == 0 and (self.world // pp) % dense == 0
            for ep in range(2, self.world // pp + 1)
            if (self.world // pp) % (ep * expert) == 0
        ]
        wanted = np.log([self.pp, self.ep])
        grids.sort(
            key=lambda g: float(np.abs(np.log([int(n) for n in g.split("x")]) - wanted).sum())
        )
        if not grids:
            return f"no PPxEP grid exists with TP {self.tp}, CP {self.cp}, ETP {self.etp}"
        more = f" and {len(grids) - 12} more" if len(grids) > 12 else ""
        return f"legal PPxEP grids: {', '.join(grids[:12])}{more}"

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parameters, without context parallelism."""
        return self.world // (self.pp * self.cp * self.tp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert parameters."""
        return self.world // (self.pp * self.ep * self.etp)

    def _grid(self, axes: tuple[str, ...]) -> np.ndarray:
        return np.arange(self.world).reshape([getattr(self, axis) for axis in axes])

    def group_size(self, kind: str) -> int:
        """Members of each group of a kind (a key of `GROUPS`)."""
        return prod(getattr(self, axis) for axis in GROUPS[kind][1])

    def groups(self, kind: str) -> np.ndarray:
        """Ranks of every group of a kind (a key of `GROUPS`), in Megatron's order inside a group.

        Returns:
            int array [groups, group size].
        """
        axes, inside = GROUPS[kind]
        outside = [axis for axis in axes if axis not in inside]
        order = [axes.index(axis) for axis in (*outside, *inside)]
        return self._grid(axes).transpose(order).reshape(-1, self.group_size(kind))

    def coordinates(self) -> dict[str, np.ndarray]:
        """Position of every rank along every axis: axis name -> int array [world]."""
        found: dict[str, np.ndarray] = {}
        for axes in (DENSE_AXES, EXPERT_AXES):
            index = np.unravel_index(np.arange(self.world), [getattr(self, a) for a in axes])
            found |= dict(zip(axes, index, strict=True))
        return found
