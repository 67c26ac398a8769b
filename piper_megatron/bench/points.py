"""What is measured, and the file of finished points by which a measurement is resumed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, ValidationError

from piper_megatron.errors import PiperError
from piper_megatron.strict import StrictModel, first_problem

Kind = Literal["product", "attention", "memory", "host", "copy", "link", "dispatch"]


class Point(StrictModel):
    """One measurement.

    Attributes:
        kind: the part of a machine that it tells of.
        what: operation.
        dtype: of its operands, where that matters.
        level: network level, for links.
        size: by name, such as rows, bytes, members.
    """

    kind: Kind
    what: str
    dtype: str = ""
    level: str = ""
    size: dict[str, int]

    @property
    def key(self) -> str:
        """Equal for equal points."""
        return json.dumps(self.model_dump(), sort_keys=True)

    @property
    def family(self) -> tuple[str, ...]:
        """Points of one operation, which differ in size only."""
        return self.kind, self.what, self.dtype, self.level


class Measured(StrictModel):
    """What came of a point.

    Attributes:
        point: what was measured.
        seconds: of one call, the median over the turns.
        low, high: quartiles.
        turns: that were timed.
    """

    point: Point
    seconds: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    turns: PositiveInt

    @property
    def spread(self) -> float:
        """Half of the quartiles' distance over the median."""
        return (self.high - self.low) / 2 / self.seconds


class PointFile:
    """Finished points, one JSON object a line; the first line says where they were measured."""

    def __init__(self, path: Path, machine: str) -> None:
        """Args:
            path: of the file; what is there is kept.
            machine: on which this process measures, in words.

        Raises:
            PiperError: the file is of another machine, or no such file.
        """
        self._path = path
        self.measured: dict[str, Measured] = {}
        if path.exists():
            self._read(machine)
        else:
            self._append({"machine": machine})

    def add(self, measured: Measured) -> None:
        """Keeps a point."""
        self.measured[measured.point.key] = measured
        self._append(measured.model_dump())

    def of(self, points: Iterable[Point]) -> tuple[Measured, ...]:
        """Those of the points that are finished."""
        return tuple(self.measured[p.key] for p in points if p.key in self.measured)

    def _read(self, machine: str) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        try:
            there = json.loads(lines[0])["machine"]
            # a run that was killed may have left half a line at the end
            whole = lines[1:] if self._ends_a_line() else lines[1:-1]
            points = [Measured.model_validate_json(line) for line in whole]
        except ValidationError as error:
            raise PiperError(f"{self._path}: {first_problem(error)}; remove the file") from None
        except (IndexError, KeyError, TypeError, ValueError):
            raise PiperError(
                f"{self._path} does not hold measured points; remove it or choose another --out"
            ) from None
        if there != machine:
            raise PiperError(
                f"{self._path} was measured on {there}, and this is {machine}; remove it or choose "
                "another --out"
            )
        self.measured = {each.point.key: each for each in points}
        if not self._ends_a_line():
            self._path.write_text("".join(f"{line}\n" for line in (lines[0], *whole)))

    def _ends_a_line(self) -> bool:
        return self._path.read_bytes().endswith(b"\n")

    def _append(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(record), file=file)
