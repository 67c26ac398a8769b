"""Work in parts, in this process or in several."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

# runs a function over many tuples of arguments and returns the results in their order
Run = Callable[[Callable[..., Any], Sequence[tuple]], list]


def run_here(function: Callable[..., Any], many: Sequence[tuple]) -> list:
    """One after the other, in this process."""
    return [function(*each) for each in many]


@contextmanager
def workers(processes: int) -> Iterator[Run]:
    """Several processes where there can be some; they are started when they are needed."""
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield run_here
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:

        def run(function: Callable[..., Any], many: Sequence[tuple]) -> list:
            return [future.result() for future in [pool.submit(function, *each) for each in many]]

        yield run
