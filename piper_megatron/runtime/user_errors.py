"""How a process of a job ends when the user's input is wrong: one line and exit code 2."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_megatron.errors import USAGE_ERROR, PiperError
from piper_megatron.switches import switched_on

# set by a launcher of ours, which prints what the first of its workers to fail wrote there
ERROR_FILE = "PIPER_ERROR_FILE"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a `PiperError` into one line and exit code 2, unless `PIPER_DEBUG` is set."""
    try:
        yield
    except PiperError as error:
        if switched_on("PIPER_DEBUG"):
            raise
        _report(error)
        sys.exit(USAGE_ERROR)


def _report(error: PiperError) -> None:
    path = os.environ.get(ERROR_FILE)
    if path is None:
        where = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"piper-megatron: error: {error}{where}", file=sys.stderr, flush=True)
        return
    draft = Path(f"{path}.{os.getpid()}")
    draft.write_text(json.dumps(str(error)))
    draft.replace(path)


def reported_error() -> str | None:
    """What a worker of this launcher reported, if any did."""
    path = Path(os.environ[ERROR_FILE])
    return json.loads(path.read_text()) if path.exists() else None
