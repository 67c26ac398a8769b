"""Work in parts, in this process or in several, with word of how much of it is done."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

# told a stage of the search and the share of it that is done
Progress = Callable[[str, float], None]
# runs a stage: a function over many tuples of arguments; returns the results in their order
Run = Callable[[str, Callable[..., Any], Sequence[tuple]], list]


def run_here(stage: str, function: Callable[..., Any], many: Sequence[tuple]) -> list:
    """One after the other, in this process, and nobody is told."""
    return [function(*each) for each in many]


@contextmanager
def workers(processes: int, progress: Progress | None = None) -> Iterator[Run]:
    """Several processes where there can be some; they are started when they are needed.

    Args:
        processes: that work at the same time.
        progress: called in this process when a part is done.
    """

    def tell(stage: str, done: int, parts: int) -> None:
        if progress is not None:
            progress(stage, done / parts)

    def here(stage: str, function: Callable[..., Any], many: Sequence[tuple]) -> list:
        results = []
        for each in many:
            results.append(function(*each))
            tell(stage, len(results), len(many))
        return results

    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield here
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:

        def run(stage: str, function: Callable[..., Any], many: Sequence[tuple]) -> list:
            futures = [pool.submit(function, *each) for each in many]
            for done, _ in enumerate(as_completed(futures), start=1):
                tell(stage, done, len(futures))
            return [future.result() for future in futures]

        yield run
