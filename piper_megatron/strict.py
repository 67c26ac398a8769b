"""YAML files read into strict models; whatever is wrong with them becomes one line."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from piper_megatron.errors import PiperError, TopologyError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def closest(word: str, legal: Iterable[str]) -> str | None:
    """The legal word that comes close to a mistyped one."""
    return next(iter(difflib.get_close_matches(word, list(legal), n=1)), None)


def nearest(word: str, legal: Iterable[str]) -> str:
    """The end of an error message: the legal word that comes close, or else all of them."""
    legal = list(legal)
    close = closest(word, legal)
    return f"did you mean '{close}'?" if close else f"legal are {', '.join(legal) or 'none'}"


class StrictModel(BaseModel):
    """Frozen; a key that it does not know is an error that names the nearest one it does."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_key(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key '{key}'; {nearest(str(key), cls.model_fields)}")
        return data


def read_yaml(path: Path, error_class: type[PiperError] = TopologyError) -> Any:
    """What a YAML file holds; an empty mapping for an empty file.

    Raises:
        PiperError: of the given class; one line that names the file.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise error_class(f"cannot read {path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "syntax error"
        raise error_class(f"{path}{line}: not valid YAML: {problem}") from None
    return {} if data is None else data


def read_model[Model: StrictModel](
    path: Path, model: type[Model], error_class: type[PiperError] = TopologyError
) -> Model:
    """Reads one YAML file.

    Raises:
        PiperError: of the given class; one line that names the file, the key and what is wrong.
    """
    try:
        return model.model_validate(read_yaml(path, error_class))
    except ValidationError as error:
        raise error_class(f"{path}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's complaints as one line: the key, and what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    if isinstance(given, str | int | float) and problem["type"] != "value_error":
        what += f", got {given!r}"
    return f"{where}: {what}" if where else what
