"""How long a call takes: warm-up, turns, medians over turns and ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Seconds of a call: median, quartiles, and how many turns they are of."""

    seconds: float
    low: float
    high: float
    turns: int


@dataclass(frozen=True)
class Clock:
    """Times calls on all ranks at once.

    Attributes:
        device: on which they work.
        turn_s: that a turn lasts at least.
        turns: that are timed.
        longest_s: a call that takes longer is timed by its warm-up alone.
    """

    device: torch.device
    turn_s: float
    turns: int
    longest_s: float

    def alone(self, call: Call) -> Timed:
        """A call that needs no other rank, while all ranks are busy with it.

        The mean over the ranks of their medians: ranks that share cores or memory get what is left
        to each.
        """
        call()
        first_s = self._once(call)
        self._barrier()
        turns = 1 if first_s > self.longest_s else self.turns
        seconds = [self._turn_alone(call) for _ in range(turns)]
        ranks = self._gathered(seconds)  # [ranks, turns at most]
        median = float(np.mean([np.median(each) for each in ranks]))
        low, high = np.quantile(np.concatenate(ranks), (0.25, 0.75))
        return Timed(median, min(float(low), median), max(float(high), median), turns)

    def together(self, call: Call) -> Timed:
        """A call that all ranks make together; a turn is as long as that of the slowest rank."""
        call()
        self._barrier()
        first_s = self._slowest(self._once(call))
        if first_s > self.longest_s:
            return Timed(first_s, first_s, first_s, 1)
        calls = max(1, round(self.turn_s / first_s))
        seconds = []
        for _ in range(self.turns):
            self._barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            self._finish()
            seconds.append(self._slowest((time.perf_counter() - began) / calls))
        low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        return Timed(float(median), float(low), float(high), self.turns)

    def _turn_alone(self, call: Call) -> float:
        """Calls until the time is up, not so and so many: no rank may end early and leave cores."""
        self._finish()
        began = time.perf_counter()
        for calls in count(1):
            call()
            if self.device.type == "cpu" or calls % 16 == 0:
                self._finish()
                if (spent := time.perf_counter() - began) >= self.turn_s:
                    return spent / calls
        raise AssertionError

    def _once(self, call: Call) -> float:
        self._finish()
        began = time.perf_counter()
        call()
        self._finish()
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def _slowest(self, seconds: float) -> float:
        if not dist.is_initialized():
            return seconds
        slowest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _gathered(self, seconds: list[float]) -> list[list[float]]:
        if not dist.is_initialized():
            return [seconds]
        ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, seconds)
        return ranks
