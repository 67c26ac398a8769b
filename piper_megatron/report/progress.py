"""A progress bar for long work, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None] | None]:
    """A function that draws the share done of a stage, as one bar a stage, on standard error.

    None where that is no terminal. The bars are gone afterwards.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    # refreshed when told, not by a thread: processes may be forked meanwhile
    with Progress(console=console, transient=True, auto_refresh=False) as bars:
        stages: dict[str, TaskID] = {}

        def tell(stage: str, share: float) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=1.0)
            bars.update(stages[stage], completed=share, refresh=True)

        yield tell
