"""Models by name: Megatron's arguments for the shape of well-known ones, and nothing else."""

import shlex
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import StrictModel, nearest, read_model

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class Preset(StrictModel):
    """A model.

    Attributes:
        name: also the name of its file.
        description: one line.
        source: who publishes the sizes, and what of them is assumed.
        arguments: Megatron's, as they are typed on a command line.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    description: Text
    source: Text
    arguments: Text


def _folder() -> Path:
    return Path(str(resources.files("piper_megatron.workload") / "presets"))


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        WorkloadError: there is none of that name.
    """
    if name not in preset_names():
        raise WorkloadError(f"unknown model '{name}'; {nearest(name, preset_names())}")
    return read_model(_folder() / f"{name}.yaml", Preset, WorkloadError)


def preset_arguments(name: str) -> list[str]:
    """Megatron's arguments for a model, as tokens of a command line.

    Raises:
        WorkloadError: there is no preset of that name.
    """
    return shlex.split(load_preset(name).arguments)
