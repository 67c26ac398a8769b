"""Legal values near a wrong one."""

from collections.abc import Callable, Iterable


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(wanted: int, legal: Iterable[int], count: int = 4) -> str:
    """A few legal values around a wrong one, ascending, for a message; `none` when there is none.

    Distances are ratios: 4 and 16 are equally far from 8.
    """

    def distance(value: int) -> float:
        return max(value / max(wanted, 1), max(wanted, 1) / value)

    close = sorted(sorted(value for value in legal if value > 0), key=distance)[:count]
    return ", ".join(map(str, sorted(close))) or "none"


def sizes_that(wanted: int, limit: int, legal: Callable[[int], bool], count: int = 4) -> str:
    """The legal sizes from 1 to `limit` that are nearest to a wrong one."""
    return nearest(wanted, filter(legal, range(1, limit + 1)), count)


def next_multiple(number: int, factor: int) -> int:
    """The smallest multiple of `factor` that is at least `number`."""
    return -(-number // factor) * factor
