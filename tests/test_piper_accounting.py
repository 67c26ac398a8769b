"""The published numbers of Piper that concern parameters and states, by the list's own numbers."""

import pytest

from piper_megatron.resources import piper_accounting as piper
from piper_megatron.workload.spec import Attention, Experts, ModelSpec

GIGA = 1e9
CAPACITY = 64 * GIGA
SEQ = 4096


def model_of(hidden, ffn, experts, topk, layers, heads=128, gated=False) -> ModelSpec:
    return ModelSpec(
        hidden=hidden,
        ffn=ffn,
        gated=gated,
        attention=Attention(heads=heads, groups=heads, head_dim=max(hidden // heads, 1)),
        moe_layers=(True,) * layers,
        experts=Experts(count=experts, topk=topk, ffn=ffn),
        vocab=50257,
        max_positions=SEQ,
    )


SMALL = model_of(2048, 1408, 64, 6, 28, heads=16)
MEDIUM = model_of(5120, 1536, 128, 6, 28)
LARGE = model_of(7168, 2048, 256, 8, 28)
SUPER = model_of(7168, 2560, 256, 8, 61)
SUPER_64 = model_of(7168, 2560, 256, 8, 64)


def m10b(experts: int) -> ModelSpec:
    return model_of(5120, 20480, experts, min(experts, 2), 32)


def gigabytes(model: ModelSpec, pp: int, ep: int, tokens: int) -> tuple[float, float]:
    """States, and all, of the largest stage."""
    grid = piper.grid(model, pp, ep, tokens)
    return round(grid.states_bytes / GIGA, 1), round(grid.total_bytes / GIGA, 1)


@pytest.mark.parametrize(
    ("model", "total", "active", "published", "published_active"),
    [
        (SMALL, 10.06, 1.34, 10.1, 1.3),
        (MEDIUM, 55.23, 5.20, 55.2, 5.2),
        (LARGE, 201.36, 11.48, 201.4, 11.5),
        (SUPER, 545.43, 28.36, 545.4, 28.7),
    ],
    ids=["small", "medium", "large", "super"],
)
def test_1_sizes_of_the_x_moe_models(model, total, active, published, published_active):
    assert round(piper.parameters(model) / 2**30, 2) == total
    assert total == pytest.approx(published, rel=0.005)
    assert round(piper.active_parameters(model) / 2**30, 2) == active
    embedding = 50257 * model.hidden if model is SUPER else 0
    assert (piper.active_parameters(model) + embedding) / 2**30 == pytest.approx(
        published_active, abs=0.05
    )


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (SUPER_64, 614.4),
        (m10b(16), 110.7),
        (m10b(32), 218.1),
        (m10b(64), 432.9),
        (m10b(128), 862.3),
        (m10b(256), 1721.3),
        (model_of(4096, 14336, 8, 2, 32, gated=True), 47.2),
        (model_of(6144, 16384, 8, 2, 56, gated=True), 143.7),
        (model_of(6144, 16384, 8, 2, 60, gated=True), 154.0),
        (model_of(5120, 8192, 16, 1, 48, gated=True), 101.7),
        (model_of(7168, 2048, 384, 8, 61, gated=True), 1044.1),
        (model_of(4096, 1536, 128, 8, 94, gated=True), 233.4),
    ],
)
def test_2_sizes_of_the_other_models(model, billions):
    assert round(piper.parameters(model) / GIGA, 1) == billions


def test_2_the_dense_member_of_the_weak_scaling_family():
    assert round(piper.parameters(m10b(1)) / GIGA, 2) == 10.07


def test_3_large_needs_80_gpus_and_one_grid():
    tokens = 4096
    counts = [
        gpus for gpus in range(8, 129, 8) if piper.fitting_grids(LARGE, gpus, tokens, CAPACITY, 32)
    ]
    assert counts[0] == 80
    (only,) = piper.fitting_grids(LARGE, 80, tokens, CAPACITY, 32)
    assert (only.pp, only.ep) == (10, 8)
    assert gigabytes(LARGE, 10, 8, tokens) == (55.0, 58.5)
    assert round(gigabytes(LARGE, 5, 16, tokens)[1]) > 64
    assert round(gigabytes(LARGE, 20, 4, tokens)[1]) > 64


def test_4_small_fits_8_gpus():
    expected = {(1, 8): (28.2, 29.1), (2, 4): (24.4, 25.4), (4, 2): (22.5, 23.5)}
    expected[8, 1] = (24.7, 25.8)
    grids = piper.fitting_grids(SMALL, 8, 4096, CAPACITY, 32)
    assert {(grid.pp, grid.ep) for grid in grids} == set(expected)
    for (pp, ep), published in expected.items():
        assert gigabytes(SMALL, pp, ep, 4096) == pytest.approx(published, abs=0.15)


def test_4_medium_fits_24_gpus_and_not_fewer():
    expected = {(4, 8): (39.9, 42.3), (8, 4): (38.9, 41.6), (2, 16): (51.7, 54.0)}
    for (pp, ep), published in expected.items():
        assert gigabytes(MEDIUM, pp, ep, 4096) == pytest.approx(published, abs=0.15)
    counts = [
        gpus for gpus in range(8, 65, 8) if piper.fitting_grids(MEDIUM, gpus, 4096, CAPACITY, 32)
    ]
    assert counts[:2] == [24, 32]
    assert gigabytes(MEDIUM, 3, 8, 4096) == pytest.approx((57.0, 59.6), abs=0.15)


def test_5_super_needs_64_nodes():
    tokens = 16384

    def fitting(nodes: int) -> dict[int, float]:
        grids = piper.fitting_grids(SUPER_64, 8 * nodes, tokens, CAPACITY, 256)
        return {grid.ep: round(grid.total_bytes / GIGA) for grid in grids}

    assert fitting(32) == {}
    assert round(gigabytes(SUPER_64, 64, 4, tokens)[1]) == 71
    assert fitting(64) == {8: 52, 16: 55, 32: 62}
    assert round(gigabytes(SUPER_64, 8, 64, tokens)[1]) == 75
    assert fitting(128) == {16: 43, 32: 46, 64: 53}


def test_5_fewer_tokens_would_fit_32_nodes():
    grids = piper.fitting_grids(SUPER_64, 256, 4096, CAPACITY, 256)
    assert {grid.ep: round(grid.total_bytes / GIGA) for grid in grids} == {4: 48, 8: 52, 16: 58}


def test_6_states_of_super_on_512_gpus():
    assert gigabytes(SUPER_64, 16, 32, 4096)[0] == 31.9
    assert gigabytes(SUPER_64, 64, 8, 4096)[0] == 22.1


@pytest.mark.parametrize(
    ("experts", "pp", "ep", "gigabytes_of_states"),
    [
        (16, 4, 16, 40.3),
        (32, 4, 32, 40.3),
        (128, 4, 128, 40.3),
        (256, 4, 256, 40.3),
        (64, 8, 32, 33.6),
        (64, 8, 16, 60.4),
        (16, 4, 8, 67.1),
        (128, 4, 64, 67.1),
    ],
)
def test_7_states_of_the_weak_scaling_family(experts, pp, ep, gigabytes_of_states):
    assert gigabytes(m10b(experts), pp, ep, SEQ)[0] == gigabytes_of_states
    out_of_memory = gigabytes_of_states > 64
    assert (piper.grid(m10b(experts), pp, ep, 0).states_bytes > CAPACITY) == out_of_memory


def test_8_identities_of_the_equations():
    batch, pp, ep, micro_batches = 64, 4, 8, 16
    for model in (SMALL, LARGE, m10b(16)):
        first, last = (
            piper.memory_1f1b_bytes(model, SEQ, batch, pp, ep, micro_batches, stage)
            for stage in (0, pp - 1)
        )
        assert first - last == pytest.approx(
            piper.stage_imbalance_bytes(model, SEQ, batch, pp, ep, micro_batches)
        )
        states = piper.memory_1f1b_bytes(model, SEQ, 0, pp, ep, 1, 0)
        assert (first - states) / (last - states) == pytest.approx(pp)
        assert piper.memory_gpipe_bytes(model, SEQ, batch, pp, ep) == pytest.approx(
            piper.memory_1f1b_bytes(model, SEQ, batch, pp, ep, micro_batches=pp, stage=0)
        )
        assert piper.memory_gpipe_bytes(model, SEQ, batch, 1, ep) == pytest.approx(
            piper.memory_expert_parallel_bytes(model, SEQ, batch, ep)
        )
        assert piper.memory_expert_parallel_bytes(model, SEQ, batch, 1) == pytest.approx(
            piper.memory_alone_bytes(model, SEQ, batch)
        )


def test_9_flash_attention_keeps_no_scores():
    linear = 12 * SEQ * LARGE.hidden
    scores = piper.attention_activation_bytes(LARGE, SEQ, 1) - linear
    with_flash = piper.attention_activation_bytes(LARGE, SEQ, 1, flash=True) - linear
    assert scores == pytest.approx(8.59e9, rel=1e-3)
    assert with_flash == pytest.approx(1.05e6, rel=2e-3)
