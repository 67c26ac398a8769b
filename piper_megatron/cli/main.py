"""`piper-megatron`: finds the commands in this package and turns errors into one line.

A command is a module here with NAME and HELP (others are helpers), and either
    add_arguments(parser) and run(args) -> exit code, or
    run_raw(argv) -> exit code, when it parses what follows its name by itself.
All of them are loaded for `--help`: what is slow to import belongs inside their functions.
"""

import argparse
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from piper_megatron import __version__, cli
from piper_megatron.errors import USAGE_ERROR, PiperError
from piper_megatron.switches import switched_on

PROGRAM = "piper-megatron"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; 2 for errors that the user can mend.

    With `--json` such an error is a JSON object on stdout, {"error": text}.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except PiperError as error:
        if switched_on("PIPER_DEBUG"):
            raise
        if "--json" in itertools.takewhile(lambda token: token != "--", argv):
            print(json.dumps({"error": str(error)}))
        else:
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # the reader, `head` for one, has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str]) -> int:
    commands = _commands()
    parser = _parser(commands)
    at = next((i for i, token in enumerate(argv) if not token.startswith("-")), len(argv))
    command = commands.get(argv[at]) if at < len(argv) else None
    raw = hasattr(command, "run_raw")
    args = parser.parse_args(argv[: at + 1] if raw else argv)
    if args.debug:
        os.environ["PIPER_DEBUG"] = "1"
    if raw:
        return commands[args.command].run_raw(list(argv[at + 1 :]))
    return commands[args.command].run(args)


def _commands() -> dict[str, ModuleType]:
    modules = [
        import_module(f"{cli.__name__}.{info.name}")
        for info in pkgutil.iter_modules(cli.__path__)
        if info.name != "main"
    ]
    return {module.NAME: module for module in modules if hasattr(module, "NAME")}


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot read as every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        raise PiperError(f"{message}; see {self.prog} --help")


def _parser(commands: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    parser = _Parser(PROGRAM, description="Pipeline-by-expert-parallel grids for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    _add_debug(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name, help=command.HELP, description=command.__doc__, allow_abbrev=False
        )
        if not hasattr(command, "run_raw"):
            command.add_arguments(subparser)
            _add_debug(subparser, default=argparse.SUPPRESS)
    return parser


def _add_debug(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--debug",
        action="store_true",
        default=default,
        help="show the traceback of an error (PIPER_DEBUG=1)",
    )


if __name__ == "__main__":
    sys.exit(main())
