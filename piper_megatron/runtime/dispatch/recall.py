"""What dispatchers found out in the first run of a checkpointed function, for its recomputation.

Megatron runs such a function twice, and its layers come in the same order both times. What a
dispatcher notes in the first run it recalls in the second: the counts are known already, and no
rank is asked for them again. Notes live as long as the checkpoint that they belong to.
"""

from collections.abc import Callable, Iterator
from typing import Any


class Remembering:
    """A checkpointed function, with the notes of its first run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._notes: list[tuple[object, Any]] = []
        self._unread: Iterator[tuple[object, Any]] | None = None

    def __call__(self, *args: Any) -> Any:
        """Runs the function; whatever it notes or recalls meanwhile is of this checkpoint."""
        global _running
        outer, _running = _running, self
        try:
            return self._function(*args)
        finally:
            _running = outer
            self._unread = iter(self._notes)

    def note(self, owner: object, known: Any) -> None:
        """Adds a note, in the first run."""
        if self._unread is None:
            self._notes.append((owner, known))

    def recall(self, owner: object) -> Any | None:
        """The owner's next note, if this is not the first run."""
        if self._unread is None:
            return None
        noted_by, known = next(self._unread)
        assert noted_by is owner, "layers come in the order of the first run"
        return known


_running: Remembering | None = None


def note(owner: object, known: Any) -> None:
    """Keeps something for the recomputation, if there will be one."""
    if _running is not None:
        _running.note(owner, known)


def recall(owner: object) -> Any | None:
    """What the owner noted in the first run; None if this is not a recomputation."""
    return None if _running is None else _running.recall(owner)
