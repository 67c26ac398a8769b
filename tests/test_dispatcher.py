"""A MoE layer with each of Piper's dispatchers, against the layer with Megatron's own.

Differences are shares of the largest number of a tensor: of the output, of the gradients of the
input, the probabilities and every weight, and of what the experts were given.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from real_dispatchers import (
    EACH,
    Differences,
    Layout,
    Problem,
    Variant,
    compare_all,
    maps_of,
    modes_of,
    random_map,
    sums_of_ones,
)

# Where sums are taken in another order. A sum of n numbers is off by less than n roundings of half
# an epsilon (2**-23, 2**-8) each: of the k experts of a token, here up to 8, in outputs and in
# gradients of the input; of the rows of an expert in gradients of weights, in fp32 at least.
TOLERANCES = {"float64": 1e-10, "float32": 8 * 2**-23, "bfloat16": 4 * 2**-8}
GIVEN_TO_EXPERTS = {"rows of experts", "probabilities of experts", "rows of each expert"}
TOKENS = (7, 5, 8, 4)
# not dropless: Megatron then counts the rows instead of multiplying tokens by experts
ANY_MAP = {"moe_expert_capacity_factor": 1000.0}
CHUNKED = tuple(Variant(name, chunks) for name in ("halo", "rail") for chunks in (1, 2, 3, 4))


def routed(layout: Layout, local_experts: int, topk: int, choose=None, **more) -> Problem:
    """A problem whose map `choose(rank, tokens, experts)` makes; random by default."""
    tokens = more.pop("tokens", TOKENS * (layout.world // 4))
    experts = local_experts * layout.expert_ranks
    maps = maps_of(tokens, experts, choose or partial(random_map, topk=topk))
    return Problem(layout, local_experts, topk, tokens, maps, **more)


def by_router(layout: Layout, local_experts: int, topk: int, tokens: int = 8, **settings):
    """A problem that Megatron's router routes; it wants as many tokens on every rank."""
    return Problem(layout, local_experts, topk, (tokens,) * layout.world, settings=dict(settings))


def only(*experts_of_rank):
    """A map in which every token of a rank goes to the same experts."""

    def choose(rank: int, tokens: int, experts: int) -> np.ndarray:
        chosen = experts_of_rank[rank % len(experts_of_rank)]
        return np.repeat(np.isin(np.arange(experts), list(chosen))[None], tokens, 0)

    return choose


def ragged(rank: int, tokens: int, experts: int) -> np.ndarray:
    """Some tokens have no expert at all, others several."""
    return (
        np.random.default_rng(rank).random((tokens, experts)) < np.linspace(0, 0.5, tokens)[:, None]
    )


PAIRS = Layout("aabb")
CAPACITY = {"moe_expert_capacity_factor": 0.5}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
FP8 = {"moe_router_padding_for_quantization": True, "fp8": "hybrid"}
SHARED = {"moe_shared_expert_intermediate_size": 8}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

FOUR_RANKS = {
    **{f"top-{topk}": routed(PAIRS, 2, topk) for topk in range(1, 9)},
    "one local expert": routed(PAIRS, 1, 2),
    "four local experts": routed(PAIRS, 4, 4),
    "rows of 4 KiB": routed(PAIRS, 2, 3, hidden=512),
    "router picks": by_router(PAIRS, 2, 3),
    "capacity": by_router(PAIRS, 2, 3, **CAPACITY),
    "capacity by position": by_router(PAIRS, 2, 3, **CAPACITY, moe_token_drop_policy="position"),
    "padded to capacity": by_router(PAIRS, 2, 3, **PADDED),
    "padded to capacity, one local expert": by_router(PAIRS, 1, 2, **PADDED),
    "padded for fp8": replace(by_router(PAIRS, 2, 3, tokens=40), late=FP8),
    "too few tokens to pad for fp8": routed(PAIRS, 2, 3, late=FP8),
    "shared experts": by_router(PAIRS, 2, 3, **SHARED),
    "shared experts overlap": by_router(PAIRS, 2, 3, **OVERLAPPED),
    "recomputation": by_router(PAIRS, 2, 3, **RECOMPUTED),
    "all tokens to one expert": routed(PAIRS, 2, 1, only({5})),
    "all tokens to their own rank": routed(PAIRS, 2, 2, only({0, 1}, {2, 3}, {4, 5}, {6, 7})),
    "all experts of a token on one rank": routed(PAIRS, 4, 4, only({8, 9, 10, 11})),
    "a rank receives nothing": routed(PAIRS, 2, 2, only({0, 7}, {4, 5}, {1, 6}, {0, 5})),
    "a rank sends nothing": routed(PAIRS, 2, 3, tokens=(7, 0, 8, 4)),
    "a rank has no part": routed(PAIRS, 2, 2, only({0, 7}), tokens=(7, 0, 8, 4)),
    "a node receives nothing": routed(PAIRS, 2, 2, only({0, 1}, {0, 3})),
    "a node sends nothing": routed(PAIRS, 2, 3, tokens=(0, 0, 8, 4)),
    "a node has no part": routed(PAIRS, 2, 2, only({4, 6}), tokens=(0, 0, 8, 4)),
    "no tokens": routed(PAIRS, 2, 3, tokens=(0, 0, 0, 0)),
    "one token": routed(PAIRS, 2, 3, tokens=(0, 0, 1, 0)),
    "tokens without an expert": routed(PAIRS, 2, 8, ragged, settings=ANY_MAP),
    "no token has an expert": routed(PAIRS, 2, 8, only(()), settings=ANY_MAP),
    "nodes alternate": routed(Layout("abab"), 2, 3),
    "nodes nest": routed(Layout("abba"), 2, 3),
    "one node": routed(Layout("aaaa"), 2, 3),
    "nodes of one rank": routed(Layout("abcd"), 2, 3, variants=EACH + CHUNKED),
    "tp 2": routed(Layout("aabb", tp=2), 2, 3),
    "tp 2, shared experts overlap": by_router(Layout("aabb", tp=2), 2, 3, **OVERLAPPED),
    "etp 2": routed(Layout("aabb", tp=2, etp=2), 2, 3),
    "etp 2, one local expert": routed(Layout("aabb", tp=2, etp=2), 1, 2),
    "etp 2, padded to capacity": by_router(Layout("aabb", tp=2, etp=2), 2, 3, **PADDED),
    "etp 2, groups inside a node": routed(Layout("abab", tp=2, etp=2), 2, 3),
    "ep 1": routed(Layout("aabb", ep=1), 4, 2),
    "ep 2, two copies of the experts": routed(Layout("abab", ep=2), 4, 2),
}
LONG = (5, 3, 6, 4) * 2
EIGHT_RANKS = {
    "2x4": routed(Layout("aaaabbbb"), 1, 4, tokens=LONG),
    "2x4, four local experts": routed(Layout("aaaabbbb"), 4, 8, tokens=LONG),
    "2x4, one expert": routed(Layout("aaaabbbb"), 2, 1, only({9}), tokens=LONG),
    "4x2": routed(Layout("aabbccdd"), 2, 4, tokens=LONG, variants=EACH + CHUNKED),
    "4x2, rows of 4 KiB": routed(
        Layout("aabbccdd"), 2, 4, tokens=LONG, hidden=512, variants=CHUNKED
    ),
    "4x2, a node has no part": routed(
        Layout("aabbccdd"), 2, 2, only({0, 5}, {2, 13}), tokens=(5, 3, 6, 4, 0, 0, 2, 1),
        variants=EACH + CHUNKED,
    ),
    "4x2, padded to capacity": by_router(Layout("aabbccdd"), 1, 4, **PADDED),
    "2x4 in disorder": routed(Layout("abbaabab"), 2, 3, tokens=LONG),
    "4x2 in disorder": routed(Layout("dabcbdca"), 2, 3, tokens=LONG, variants=EACH + CHUNKED),
    "8x1": routed(Layout("abcdefgh"), 1, 3, tokens=LONG, variants=EACH + CHUNKED),
    "tp 2": routed(Layout("aabbccdd", tp=2), 2, 3, tokens=LONG),
    "etp 2 over 2x2": routed(Layout("aaaabbbb", tp=2, etp=2), 2, 3, tokens=LONG),
    "etp 2 over 2x2 in disorder": routed(Layout("aabbbbaa", tp=2, etp=2), 2, 3, tokens=LONG),
    "etp 2, tokens without an expert": routed(
        Layout("aaaabbbb", tp=2, etp=2), 2, 8, ragged, tokens=LONG, settings=ANY_MAP
    ),
}  # fmt: skip
SHORT_TYPES = {
    f"{dtype}, {name}": replace(FOUR_RANKS[name], dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for name in ("top-2", "top-8", "router picks", "etp 2", "padded to capacity")
}


@pytest.fixture(scope="module")
def on_four(ranks):
    return run(ranks, FOUR_RANKS | SHORT_TYPES)


@pytest.fixture(scope="module")
def on_eight(ranks):
    return run(ranks, EIGHT_RANKS)


def run(ranks, problems: dict[str, Problem]) -> dict[str, Differences]:
    """Of every problem the worst of the ranks, in one job."""
    ordered = sorted(problems, key=lambda name: repr(problems[name].layout))
    world = problems[ordered[0]].layout.world
    done = ranks.call(compare_all, [problems[name] for name in ordered], world=world).check()
    return dict(zip(ordered, map(worst, zip(*done.values, strict=True)), strict=True))


def worst(of_ranks: tuple[Differences, ...]) -> Differences:
    return {
        variant: {
            tensor: max(each[variant][tensor] for each in of_ranks)
            for tensor in of_ranks[0][variant]
        }
        for variant in of_ranks[0]
    }


def assert_equal(problem: Problem, found: Differences) -> None:
    for variant in problem.variants:
        by_tensor = found[str(variant)]
        assert by_tensor.keys() >= {"output", "hidden", *GIVEN_TO_EXPERTS}
        tolerance = 0 if variant.only_moves else TOLERANCES[problem.dtype]
        wrong = {
            tensor: difference
            for tensor, difference in by_tensor.items()
            # on their way to the experts, rows and probabilities are never changed
            if difference > (0 if tensor in GIVEN_TO_EXPERTS else tolerance)
        }
        assert not wrong, variant


@pytest.mark.parametrize("name", FOUR_RANKS | SHORT_TYPES)
def test_four_ranks(on_four, name):
    assert_equal((FOUR_RANKS | SHORT_TYPES)[name], on_four[name])


@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_eight_ranks(on_eight, name):
    assert_equal(EIGHT_RANKS[name], on_eight[name])


@pytest.fixture(scope="module")
def modes(ranks):
    return worst(tuple(ranks.call(modes_of, routed(PAIRS, 2, 8), world=4).check().values))


@pytest.mark.parametrize("variant", EACH, ids=str)
def test_evaluation_gives_the_output_of_training(modes, variant):
    assert modes[str(variant)]["evaluated"] == 0


@pytest.mark.parametrize("variant", EACH, ids=str)
def test_deterministic_mode(modes, variant):
    found = modes[str(variant)]
    assert found["twice"] == 0
    assert found["deterministic"] <= (0 if variant.only_moves else TOLERANCES["float64"])
    # the others leave the sums to Megatron
    assert variant.only_moves or found["index_add"] == 0


def test_rows_are_added_up_in_fp32(ranks):
    # in bf16, 256 + 1 is 256
    done = ranks.call(sums_of_ones, 1024, world=1).check()
    assert done.values == [[[1024, 1024, 0]] * 2]


@st.composite
def any_problem(draw) -> Problem:
    """Any map over four ranks: any experts of any token, none and all included."""
    hosts = draw(st.sampled_from(["aabb", "abab", "abba", "abcd"]))
    local_experts = draw(st.sampled_from([1, 2, 4]))
    experts = 4 * local_experts
    experts_of_rank = [draw(st.lists(st.integers(0, 2**experts - 1), max_size=6)) for _ in range(4)]
    maps = tuple(
        np.array([[token >> e & 1 for e in range(experts)] for token in tokens], bool).reshape(
            -1, experts
        )
        for tokens in experts_of_rank
    )
    return Problem(
        Layout(hosts),
        local_experts,
        experts,
        tuple(map(len, maps)),
        maps,
        hidden=draw(st.sampled_from([3, 1024])),
        settings=ANY_MAP,
        variants=(*EACH, *(Variant(v.algorithm, draw(st.integers(2, 4))) for v in CHUNKED[::4])),
    )


# a job takes seconds, a problem milliseconds; a failing batch is not made smaller
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
@given(batch=st.lists(any_problem(), min_size=12, max_size=12))
def test_any_map(ranks, batch):
    problems = {str(i): problem for i, problem in enumerate(batch)}
    for name, found in run(ranks, problems).items():
        assert_equal(problems[name], found)
