"""Plain ASCII text for terminals and log files: blocks, aligned tables, folded numbers."""

import io
import textwrap
from collections.abc import Iterable, Sequence

from ClusterShell.RangeSet import RangeSet
from rich.box import Box
from rich.console import Console
from rich.table import Table

_RULE_BELOW_HEADINGS = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(blocks: Sequence[str | Table]) -> str:
    """Text of several blocks with a blank line between them, without colours."""
    buffer = io.StringIO()
    # wider than any table: rich would shorten cells with an ellipsis that is not ASCII
    console = Console(file=buffer, width=10_000, color_system=None, markup=False, highlight=False)
    for i, block in enumerate(blocks):
        if i:
            console.print()
        console.print(block)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def facts(pairs: Iterable[tuple[str, str]], width: int) -> str:
    """A label and a text a line, the texts aligned and wrapped."""
    pairs = list(pairs)
    indent = max(len(label) for label, _ in pairs) + 2
    return "\n".join(
        textwrap.fill(
            text, width, initial_indent=label.ljust(indent), subsequent_indent=" " * indent
        )
        for label, text in pairs
    )


def table(*headings: str, left: Sequence[int] = (0,)) -> Table:
    """A table of aligned columns under a dashed line; columns not in `left` are right-aligned."""
    aligned = Table(box=_RULE_BELOW_HEADINGS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        aligned.add_column(heading, justify="left" if i in left else "right", no_wrap=True)
    return aligned


def fold(numbers: Iterable[int]) -> str:
    """A set of numbers in short: 0-7, or 0-56/8 for every eighth."""
    return str(RangeSet.fromlist([str(n) for n in numbers], autostep=4))


def count(number: int, noun: str) -> str:
    """1 node, 2 nodes, 9,408 nodes, 2 batches."""
    ending = "es" if noun.endswith(("ch", "x", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def percent(share: float) -> str:
    """A share in whole percent, where 0% and 100% mean none and all."""
    if 0 < share < 0.01:
        return "<1%"
    if 0.99 < share < 1:
        return ">99%"
    return f"{share:.0%}"


def seconds(value: float) -> str:
    """A time with three digits: 12.3 ms, 4.56 s, 16,700 s."""
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{float(f'{value:.3g}'):,.0f} s"
