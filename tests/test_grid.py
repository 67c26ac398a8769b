"""The rank grid against Megatron's own group generator, and against the groups it really builds."""

import math

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from piper_megatron.errors import LayoutError
from piper_megatron.layout.grid import GROUPS, ParallelLayout
from piper_megatron.workload.piper_flags import parse_grid

ORDER = "tp-cp-ep-dp-pp"
# kind -> (generator, token) of Megatron's RankGenerator
DENSE_TOKENS = {"tp": "tp", "cp": "cp", "dp": "dp-cp", "pp": "pp"}
EXPERT_TOKENS = {"ep": "ep", "etp": "tp", "tp_ep": "tp-ep", "edp": "dp"}

sizes = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 16])


@st.composite
def layouts(draw, max_world=2048):
    tp, cp, pp, ep, etp = (draw(sizes) for _ in range(5))
    smallest = pp * math.lcm(tp * cp, ep * etp)
    assume(smallest <= max_world)
    world = smallest * draw(st.integers(1, min(max_world // smallest, 12)))
    return ParallelLayout(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def assert_groups_are_megatrons(layout: ParallelLayout) -> None:
    dense = mpu.RankGenerator(
        tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER
    )
    expert = mpu.RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER
    )
    assert set(GROUPS) == {*DENSE_TOKENS, *EXPERT_TOKENS}
    for generator, tokens in ((dense, DENSE_TOKENS), (expert, EXPERT_TOKENS)):
        for kind, token in tokens.items():
            assert layout.groups(kind).tolist() == generator.get_ranks(token), kind
            assert layout.groups(kind).shape[1] == layout.group_size(kind)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(layouts(max_world=512))
def test_groups_are_megatrons(layout):
    assert_groups_are_megatrons(layout)


@pytest.mark.parametrize(
    "axes",
    [
        {"pp": 16, "ep": 8},
        {"pp": 8, "ep": 64, "tp": 2, "etp": 1},
        {"pp": 4, "ep": 16, "tp": 4, "etp": 4, "cp": 2},
        {"pp": 1, "ep": 2048},
        {"pp": 2, "tp": 8, "cp": 4, "etp": 2, "ep": 128},
    ],
)
def test_groups_are_megatrons_at_2048_ranks(axes):
    assert_groups_are_megatrons(ParallelLayout(world=2048, **axes))


GROUP_GETTERS = {
    "tp": mpu.get_tensor_model_parallel_group,
    "cp": mpu.get_context_parallel_group,
    "dp": lambda: mpu.get_data_parallel_group(with_context_parallel=True),
    "pp": mpu.get_pipeline_model_parallel_group,
    "ep": mpu.get_expert_model_parallel_group,
    "etp": mpu.get_expert_tensor_parallel_group,
    "tp_ep": mpu.get_expert_tensor_and_model_parallel_group,
    "edp": mpu.get_expert_data_parallel_group,
}


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (ParallelLayout(world=64, pp=4, ep=8), 37),
        (ParallelLayout(world=48, pp=2, tp=2, cp=2, ep=3, etp=2), 29),
        (ParallelLayout(world=256, pp=8, ep=16, tp=4, etp=1), 0),
        (ParallelLayout(world=2048, pp=16, ep=64, tp=2, etp=2), 1531),
    ],
)
def test_groups_are_those_that_megatron_builds(layout, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        for kind, group in GROUP_GETTERS.items():
            mine = [ranks for ranks in layout.groups(kind).tolist() if rank in ranks]
            assert [dist.get_process_group_ranks(group())] == mine, kind
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts())
def test_coordinates_number_the_ranks(layout):
    at = layout.coordinates()
    dense = ((at["pp"] * layout.dp + at["dp"]) * layout.cp + at["cp"]) * layout.tp + at["tp"]
    expert = ((at["pp"] * layout.edp + at["edp"]) * layout.ep + at["ep"]) * layout.etp + at["etp"]
    assert np.array_equal(dense, np.arange(layout.world))
    assert np.array_equal(expert, np.arange(layout.world))


def test_world_that_the_grid_does_not_divide_names_legal_grids():
    with pytest.raises(LayoutError, match=r"world size 24 is not a multiple of .*EP 16.*12x2") as e:
        ParallelLayout(world=24, pp=12, ep=16)
    for grid in str(e.value).partition("legal PPxEP grids: ")[2].split(" and ")[0].split(", "):
        pp, ep = parse_grid("--grid", grid)
        ParallelLayout(world=24, pp=pp, ep=ep)


@pytest.mark.parametrize("text", ["16", "0x8", "8x", "axb", "2x4x8", "-2x4", "2 x 4"])
def test_malformed_grid(text):
    with pytest.raises(LayoutError, match="PPxEP"):
        parse_grid("--grid", text)
