"""Packing: items at the leaves of a tree form groups of k, each in the smallest subtree possible.

Two switches, one with 5 nodes and one with 3, and pairs of nodes (k = 2):

    switch 0: a b c d e      switch 1: f g h
              [a b] [c d] e            [f g] h      every switch makes floor(n / k) groups
                          \\________________/
                                [e h]              leftovers meet one level up

Packing differs from cutting a sorted list as soon as sizes are odd. Switches of 3, 4 and 5 nodes,
k = 4: the sorted list gives |aaab|bbbc|cccc|, one whole group; packing gives two, |bbbb|cccc|aaac|.

Items carry nested domain numbers, innermost level first, as `Topology.domains` returns them. A
group of items is again an item, so packing repeats: nodes into cells, cells into replicas.
"""

from bisect import bisect_left, insort
from itertools import groupby
from operator import itemgetter

import numpy as np


def tree_order(domains: np.ndarray) -> np.ndarray:
    """Indices that put items of one domain side by side at every level.

    Args:
        domains: int array [items, levels], innermost level first, nested.

    Returns:
        int array [items]; items of one innermost domain keep their order.
    """
    return np.lexsort(domains.T)


def pack(domains: np.ndarray, k: int) -> np.ndarray:
    """Forms groups of k items; every domain with n items holds floor(n / k) whole groups.

    Args:
        domains: int array [items, levels], innermost level first, nested, with one domain at the
            outermost level; k divides the number of items.
        k: items in a group.

    Returns:
        int array [items / k, k] of item indices, ascending inside a group; groups are ordered by
        their first item.
    """
    items, levels = domains.shape
    assert items % k == 0, f"{items} items do not form groups of {k}"
    order = tree_order(domains)
    innermost = domains[order, 0]
    pieces = np.split(order, np.flatnonzero(np.diff(innermost)) + 1)
    groups: list[np.ndarray] = []
    for level in range(levels):
        leftovers = []
        parent = [int(domains[piece[0], level]) for piece in pieces]
        for _, siblings in groupby(zip(parent, pieces, strict=True), key=itemgetter(0)):
            made, rest = _combine([piece for _, piece in siblings], k)
            groups += made
            if rest is not None:
                leftovers.append(rest)
        pieces = leftovers
    assert not pieces, "the outermost level holds every item"
    packed = np.sort(np.array(groups), axis=1)
    return packed[np.argsort(packed[:, 0])]


def _combine(pieces: list[np.ndarray], k: int) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Groups of k out of sibling pieces, each group from as few pieces as a greedy choice finds.

    Whole groups are cut from each piece first. Then the largest remainder is completed by one that
    fits exactly, else by a part of the smallest that suffices, else by the next largest.

    Returns:
        The groups, and what is left over (fewer than k items) or None.
    """
    groups = []
    remainders = []
    for piece in pieces:
        whole = len(piece) // k * k
        groups += list(piece[:whole].reshape(-1, k))
        if whole < len(piece):
            remainders.append(piece[whole:])

    by_size = sorted((len(piece), i) for i, piece in enumerate(remainders))
    left = sum(size for size, _ in by_size)
    while left >= k:
        left -= k
        parts: list[np.ndarray] = []
        need = k
        while need:
            # the smallest piece that suffices, hence an exact fit if there is one; or the largest
            at = bisect_left(by_size, (min(need, by_size[-1][0]), 0))
            size, i = by_size.pop(at)
            parts.append(remainders[i][:need])
            if size > need:
                remainders[i] = remainders[i][need:]
                insort(by_size, (size - need, i))
            need -= min(size, need)
        groups.append(np.concatenate(parts))
    rest = [remainders[i] for _, i in reversed(by_size)]
    return groups, np.concatenate(rest) if rest else None


def merge_domains(domains: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Domain numbers of groups of items.

    A group has the number of the domain that holds all its members; at levels where its members
    are apart it is a domain of its own.

    Args:
        domains: int array [items, levels], innermost level first, nested.
        groups: int array [groups, k] of item indices.

    Returns:
        int array [groups, levels], nested again.
    """
    members = domains[groups]
    whole = (members == members[:, :1]).all(axis=1)
    own = domains.max() + 1 + np.arange(len(groups))
    return np.where(whole, members[:, 0], own[:, None])
