"""Megatron's options, without Megatron: a table made from its own parsers, and a parser on it.

`tools/make_flag_table.py` writes the table. A parser holds only the options that a command uses, so
that reading one takes milliseconds.
"""

import argparse
import ast
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import nearest

NEWEST = "0.19.2"
_LONGEST_LIST = 100_000


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a release.

    Attributes:
        options: its spellings.
        dest: where its value goes.
        kind: `store`, `store_true`, `store_false` or `boolean` (with a `--no-` spelling).
        type: of a stored value, a key of `CONVERTERS`.
        nargs: as argparse takes it.
        choices: the legal values.
        default: of `dest` when no option sets it; a tuple for a list.
    """

    options: tuple[str, ...]
    dest: str
    kind: str
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None


@functools.cache
def supported_versions() -> tuple[str, ...]:
    """Releases of Megatron-Core in the table, newest first."""
    versions = {version for row in _rows() for version in row["versions"]}
    return tuple(sorted(versions, key=lambda v: [int(n) for n in v.split(".")], reverse=True))


@functools.cache
def options(version: str = NEWEST) -> dict[str, Option]:
    """Every spelling that a release knows -> its option.

    Raises:
        WorkloadError: the table does not have the release.
    """
    if version not in supported_versions():
        legal = nearest(version, supported_versions())
        raise WorkloadError(f"no table of Megatron-Core {version}'s options; {legal}")
    return {
        spelling: option
        for option in map(_option, (row for row in _rows() if version in row["versions"]))
        for spelling in option.options
    }


@functools.cache
def spelling_of(dest: str) -> str:
    """How the newest release that has it spells the option of a destination."""
    for version in supported_versions():
        for spelling, option in options(version).items():
            if option.dest == dest:
                return spelling
    return "--" + dest.replace("_", "-")


def defaults(version: str = NEWEST) -> dict[str, Any]:
    """Every destination of a release -> its value in an empty command."""
    return {option.dest: _copied(option.default) for option in options(version).values()}


def parse(
    tokens: Sequence[str], version: str = NEWEST, more: Sequence[Option] = ()
) -> tuple[argparse.Namespace, frozenset[str], tuple[str, ...]]:
    """Reads Megatron's arguments as the release's own parser does.

    Args:
        tokens: words of a command behind the script's name.
        version: of Megatron-Core.
        more: options beside Megatron's.

    Returns:
        The values, the destinations that the command sets, and the tokens not understood.

    Raises:
        WorkloadError: an option's value is missing, of the wrong kind or not a legal choice.
    """
    known = options(version) | {spelling: o for o in more for spelling in o.options}
    words = (token.partition("=")[0] for token in tokens)
    used = {known[word].options: known[word] for word in words if word in known}
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for option in used.values():
        parser.add_argument(*_spellings(option), dest=option.dest, **_action(option))
    found, unknown = parser.parse_known_args(list(tokens))
    values = defaults(version) | {option.dest: option.default for option in more} | vars(found)
    return argparse.Namespace(**values), frozenset(vars(found)), tuple(unknown)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WorkloadError(message.removeprefix("argument "))


@functools.cache
def _rows() -> list[dict[str, Any]]:
    return json.loads(
        resources.files("piper_megatron.workload").joinpath("flags.json").read_bytes()
    )


def _option(row: dict[str, Any]) -> Option:
    fields = {name: value for name, value in row.items() if name != "versions"}
    for name, value in fields.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return Option(**fields)


def _copied(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _spellings(option: Option) -> list[str]:
    """Those that `add_argument` is to be told; it finds the `--no-` ones of a boolean itself."""
    if option.kind != "boolean":
        return list(option.options)
    return [name for name in option.options if f"--no-{name[2:]}" in option.options]


def _action(option: Option) -> dict[str, Any]:
    """Keyword arguments of `add_argument`."""
    if option.kind == "boolean":
        return {"action": argparse.BooleanOptionalAction}
    if option.kind != "store":
        return {"action": option.kind}
    return {"nargs": option.nargs, "type": functools.partial(_convert, option)}


def _convert(option: Option, text: str) -> Any:
    convert, wanted = CONVERTERS[option.type]
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes {wanted}, got '{text}'") from None
    if option.choices is not None and value not in option.choices:
        legal = nearest(str(value), map(str, option.choices))
        raise argparse.ArgumentTypeError(f"'{text}' is not legal; {legal}")
    return value


def _pattern(text: str) -> Any:
    """A whole number, or a list written as sums and products of lists.

    megatron/training/arguments.py:moe_freq_type and _eval_pattern (0.19.2), which evaluates it.
    """
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]()+*]", text):
        raise ValueError(text)
    try:
        return _list_value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(text) from None


def _list_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_list_value(element) for element in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_list_value(element) for element in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list_value(node.left) + _list_value(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _list_value(node.left), _list_value(node.right)
        for items, times in ((left, right), (right, left)):
            if isinstance(items, list | tuple) and len(items) * times > _LONGEST_LIST:
                raise ValueError(node)
        return left * right
    raise ValueError(node)


def _tuple(text: str) -> tuple[int, ...]:
    """Whole numbers with commas, in parentheses or not (arguments.py:tuple_type, 0.19.2)."""
    return tuple(int(number) for number in text.strip("()").split(","))


# how a value is read, and what it should have been
CONVERTERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a word"),
    "bool": (bool, "a word"),
    "pattern": (_pattern, "a whole number or a list such as ([0]*3+[1]*57)"),
    "tuple": (_tuple, "whole numbers such as 127,0"),
}
