"""Node sets as Slurm and ClusterShell write them: `n[001-016,020]`."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from piper_megatron.errors import TopologyError


def node_set(text: str) -> Any:
    """A ClusterShell NodeSet; `@` is a letter, no group file is read.

    Raises:
        TopologyError: the text is not a node set.
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except NodeSetException:
        raise TopologyError(
            f"'{text}' is not a node set; write for instance n[001-016,020]"
        ) from None


def expand(text: str) -> list[str]:
    """Names in a node set, in its order, each once.

    Raises:
        TopologyError: the text is not a node set.
    """
    return list(node_set(text))


def fold(hosts: Iterable[str]) -> str:
    """The node set of some names."""
    return str(node_set(",".join(hosts)))


def describe(hosts: Sequence[str]) -> str:
    """Hosts for a message: `node n1`, `4 nodes n[1-4]`; long sets are cut."""
    text = fold(hosts)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"node {text}" if len(hosts) == 1 else f"{len(hosts)} nodes {text}"


def in_natural_order(hosts: Iterable[str]) -> list[str]:
    """Sorted so that n2 comes before n10."""
    return sorted(hosts, key=lambda host: (re.sub(r"\d+", lambda m: m[0].zfill(12), host), host))
