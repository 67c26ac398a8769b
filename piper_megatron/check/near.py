"""Legal values near a wrong one."""

from collections.abc import Iterable
from math import isqrt


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending; none of another one."""
    small = [d for d in range(1, isqrt(max(number, 0)) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(wanted: int, legal: Iterable[int], count: int = 4) -> str:
    """A few legal values around a wrong one, ascending, for a message; `none` when there is none.

    Distances are ratios: 4 and 16 are equally far from 8.
    """

    def distance(value: int) -> float:
        return max(value / max(wanted, 1), max(wanted, 1) / value)

    close = sorted(sorted(value for value in legal if value > 0), key=distance)[:count]
    return ", ".join(map(str, sorted(close))) or "none"


def next_multiple(number: int, factor: int) -> int:
    """The smallest multiple of `factor` that is at least `number`."""
    return -(-number // factor) * factor
