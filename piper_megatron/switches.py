"""Switches that a user sets as environment variables."""

import os


def switched_on(variable: str) -> bool:
    """Whether a variable such as `PIPER_DISABLE` is set to something but 0."""
    return os.environ.get(variable, "0") not in ("", "0")
