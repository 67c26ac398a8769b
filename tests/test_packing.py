"""Packing: whole groups wherever they fit, the rest across as few domains as possible."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.layout.packing import merge_domains, pack, tree_order


def tree(*sizes: int) -> np.ndarray:
    """Domains [items, 2] of switches with these numbers of nodes under one root."""
    switch = np.repeat(np.arange(len(sizes)), sizes)
    return np.column_stack([switch, np.zeros_like(switch)])


def spans(domains: np.ndarray, groups: np.ndarray, level: int = 0) -> list[int]:
    """In how many domains of a level each group has members, most first."""
    return sorted((len(set(domains[g, level].tolist())) for g in groups), reverse=True)


@st.composite
def packings(draw):
    """Switches in three groups of a machine, items in any order, and a k that divides them."""
    k = draw(st.integers(1, 9))
    switches = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=10))
    switches.append((draw(st.integers(0, 2)), k - sum(n for _, n in switches) % k))
    numbers = [[i, group, 0] for i, (group, n) in enumerate(switches) for _ in range(n)]
    shuffle = np.random.default_rng(draw(st.integers(0, 9))).permutation(len(numbers))
    return np.array(numbers)[shuffle], k


@settings(max_examples=150, deadline=None, derandomize=True)
@given(packings())
def test_every_item_is_in_one_group(packing):
    domains, k = packing
    groups = pack(domains, k)
    assert groups.shape == (len(domains) // k, k)
    assert sorted(groups.ravel().tolist()) == list(range(len(domains)))
    assert (np.diff(groups, axis=1) > 0).all()
    assert (np.diff(groups[:, 0]) > 0).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(packings())
def test_every_domain_holds_as_many_whole_groups_as_its_size_allows(packing):
    domains, k = packing
    groups = pack(domains, k)
    for of_item in domains.T:
        whole = Counter(d[0] for d in of_item[groups].tolist() if len(set(d)) == 1)
        possible = {d: n // k for d, n in Counter(of_item.tolist()).items() if n >= k}
        assert whole == possible


@settings(max_examples=150, deadline=None, derandomize=True)
@given(packings())
def test_merged_domains_are_nested_and_hold_exactly_the_whole_groups(packing):
    domains, k = packing
    groups = pack(domains, k)
    merged = merge_domains(domains, groups)
    for level, of_item in enumerate(domains.T):
        whole = [len(set(d)) == 1 for d in of_item[groups].tolist()]
        assert [int(m) in of_item for m in merged[:, level]] == whole
        if level:
            outer = dict(zip(merged[:, level - 1].tolist(), merged[:, level].tolist(), strict=True))
            assert [outer[m] for m in merged[:, level - 1].tolist()] == merged[:, level].tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(packings())
def test_tree_order_keeps_every_domain_together(packing):
    domains, _ = packing
    ordered = domains[tree_order(domains)]
    for of_item in ordered.T:
        runs = 1 + np.count_nonzero(np.diff(of_item))
        assert runs == len(set(of_item.tolist()))


def test_packing_beats_cutting_a_sorted_list():
    domains = tree(3, 4, 5)
    assert spans(domains, np.arange(12).reshape(3, 4)) == [2, 2, 1]
    assert spans(domains, pack(domains, 4)) == [2, 1, 1]


def test_five_and_three_nodes_in_pairs():
    domains = tree(5, 3)
    assert pack(domains, 2).tolist() == [[0, 1], [2, 3], [4, 7], [5, 6]]


def test_remainders_that_fit_exactly_are_joined():
    # remainders of 3, 2, 1 and 2 nodes make two groups of 4 across two switches each
    assert spans(tree(3, 2, 1, 2), pack(tree(3, 2, 1, 2), 4)) == [2, 2]


def test_the_smallest_remainder_that_suffices_is_split():
    # the 4 need one more: it comes from the 2, so that the 3 stay together
    groups = pack(tree(4, 3, 2, 1), 5)
    assert spans(tree(4, 3, 2, 1), groups) == [2, 2]
