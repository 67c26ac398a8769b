"""Measured runs, as `README.md` beside this file describes them."""

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from piper_megatron.errors import PiperError
from piper_megatron.strict import StrictModel, first_problem

_INFERRED = re.compile(r"inferred=(\d+)")


class Measured(StrictModel):
    """What was published of a run; GiB = 2^30 bytes."""

    peak_gib_by_stage: dict[Literal["0", "last"], PositiveFloat] | None = None
    peak_gib: PositiveFloat | None = None
    peak_rank: str | None = None
    resident_gib: PositiveFloat | None = None
    reserved_gib: PositiveFloat | None = None
    step_s: PositiveFloat | None = None
    tflops_per_gpu: PositiveFloat | None = None
    tokens_per_s_per_gpu: PositiveFloat | None = None
    mfu_pct: PositiveFloat | None = Field(default=None, le=100)

    @model_validator(mode="after")
    def _says_something(self) -> "Measured":
        if not any(value for name, value in self if name != "peak_rank"):
            raise ValueError("nothing was measured")
        return self


class Run(StrictModel):
    """One training run that somebody measured."""

    id: str = Field(min_length=1)
    family: str = Field(min_length=1)
    platform: str = Field(min_length=1)
    gpus: PositiveInt | None
    gpus_note: str = ""
    megatron_args: tuple[str, ...] = Field(min_length=1)
    measured: Measured
    routing: Literal["forced-balance", "natural", "capacity-1", "unknown"]
    stack: dict[str, Any]
    metric_notes: str
    confidence: Literal["high", "medium", "low"]
    source: str = Field(min_length=1)

    @property
    def ranks(self) -> int | None:
        """Ranks that ran, published or inferred; None where neither is known."""
        inferred = _INFERRED.search(self.gpus_note)
        return self.gpus or (int(inferred[1]) if inferred else None)

    @property
    def stack_description(self) -> str:
        """The software in one line, which a platform's rules for stacks search in."""
        said = {key: value for key, value in self.stack.items() if isinstance(value, str)}
        return "; ".join(f"{key} {value}" for key, value in said.items())


def read_runs(path: Path | None = None) -> list[Run]:
    """The runs of a file, by default those of the package.

    Args:
        path: one JSON object a line.

    Raises:
        PiperError: the file cannot be read, or a line is wrong: one line with its number, the key
            and what is wrong with it.
    """
    if path is None:
        path = Path(str(resources.files("piper_megatron.validation") / "measured_runs.jsonl"))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise PiperError(f"cannot read {path}: {reason}") from None
    runs = [
        _run(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not runs:
        raise PiperError(f"{path}: holds no run")
    _refuse_twins(runs, path)
    return runs


def _run(line: str, where: str) -> Run:
    try:
        return Run.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise PiperError(f"{where}: not valid JSON: {error.msg}") from None
    except ValidationError as error:
        raise PiperError(f"{where}: {first_problem(error)}") from None


def _refuse_twins(runs: Iterable[Run], path: Path) -> None:
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise PiperError(f"{path}: id '{run.id}' is given twice")
        seen.add(run.id)
