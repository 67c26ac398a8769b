"""What the parser of one Megatron release makes of commands: `python tests/megatron_parser.py`.

Commands come in on stdin as JSON, a list of lists of words; the answers go out as JSON, each
`{"values": ...}` or `{"refused": message}`. PYTHONPATH says which release answers.
"""

import argparse
import contextlib
import enum
import json
import os
import sys
from typing import Any


class _Refused(Exception):
    pass


def main() -> None:
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        from megatron.training import arguments

        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        arguments.add_megatron_arguments = lambda _: parser
        parser.error = _refuse
        answers = [_answer(arguments.parse_args, command) for command in commands]
    json.dump(answers, sys.stdout)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _answer(parse_args: Any, command: list[str]) -> dict[str, Any]:
    sys.argv = ["pretrain.py", *command]
    try:
        values = {dest: _plain(value) for dest, value in vars(parse_args()).items()}
    except SystemExit:
        return {"refused": "help"}
    except Exception as error:  # its converters fail in many ways
        return {"refused": str(error)}
    for dest in ("rank", "world_size", "_is_global_batch_size_explicitly_specified"):
        values.pop(dest, None)
    return {"values": values}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
