"""Streams and events on a device that finishes every operation before the next one starts."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from piper_megatron.runtime.cpu.stand_in import always, torch_hook

SUMMARY = "streams and events are stand-ins: every operation is finished when the next one starts"


class Stream(AbstractContextManager):
    """Stands in for `torch.cuda.Stream`."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __exit__(self, *_exception: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority."""
        return 0, 0

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def synchronize(self) -> None:
        """Waits for nothing."""

    def wait_stream(self, _stream: Any) -> None:
        """Waits for nothing."""

    def wait_event(self, _event: Any) -> None:
        """Waits for nothing."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """The event, marked with the present time."""
        event = event or Event()
        event.record()
        return event


class ExternalStream(Stream):
    """Stands in for `torch.cuda.ExternalStream`."""


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: Any = None) -> None:
        """Marks the event with the present time."""
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def wait(self, _stream: Any = None) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to another."""
        return (end._recorded_s - self._recorded_s) * 1e3


def _enter_stream(_original: Any) -> Callable:
    return lambda *_args, **_kwargs: nullcontext()


_THE_STREAM = Stream()

HOOKS = (
    torch_hook("torch.cuda:Stream", lambda _original: Stream),
    torch_hook("torch.cuda:ExternalStream", lambda _original: ExternalStream),
    torch_hook("torch.cuda:Event", lambda _original: Event),
    torch_hook("torch.cuda:current_stream", always(_THE_STREAM)),
    torch_hook("torch.cuda:default_stream", always(_THE_STREAM)),
    torch_hook("torch.cuda:set_stream", always(None)),
    torch_hook("torch.cuda:stream", _enter_stream),
    torch_hook("torch:Tensor.record_stream", always(None)),
    torch_hook("torch.cuda.nvtx:range_push", always(0)),
    torch_hook("torch.cuda.nvtx:range_pop", always(0)),
)
