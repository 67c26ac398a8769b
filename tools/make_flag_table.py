"""Writes `piper_megatron/workload/flags.json`: every option that Megatron's parsers know.

Needs the environment with Megatron and the other releases beside it (`make .wheels/0.17.1/ready`):

    .venv/bin/python tools/make_flag_table.py

Each release is asked in a process of its own. Options that releases share are one row; a row is
in the order in which the newest release that has it declares it.
"""

import argparse
import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "piper_megatron" / "workload" / "flags.json"
INSTALLED = "0.19.2"
OTHERS = ("0.18.2", "0.17.1")
KINDS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "BooleanOptionalAction": "boolean",
}
# functions of megatron/training/arguments.py -> converters of piper_megatron/workload/flags.py
CONVERTERS = {
    "moe_freq_type": "pattern",
    "la_freq_type": "pattern",
    "no_rope_freq_type": "pattern",
    "tuple_type": "tuple",
}
PLAIN_TYPES = {int: "int", float: "float", str: "str", bool: "bool"}


def main() -> None:
    """Asks every release and writes the table."""
    rows: dict[str, dict[str, Any]] = {}
    for version in (INSTALLED, *OTHERS):
        for row in _ask(version):
            rows.setdefault(json.dumps(row), {**row, "versions": []})["versions"].append(version)
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    TABLE.write_text(f"[\n{lines}\n]\n")
    print(f"{TABLE.relative_to(ROOT)}: {len(rows)} rows")


def _ask(version: str) -> list[dict[str, Any]]:
    path = "" if version == INSTALLED else str(ROOT / ".wheels" / version)
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--ask", version],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def _answer(version: str) -> None:
    """Prints the options of the Megatron that this process imports."""
    import megatron.core
    from megatron.training.arguments import add_megatron_arguments

    installed = megatron.core.__version__.partition("+")[0]
    assert installed == version, f"Megatron-Core {installed} answers for {version}"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    defaults = vars(parser.parse_args([]))
    print(json.dumps([_row(a, defaults[a.dest]) for a in parser._actions if a.dest != "help"]))


def _row(action: argparse.Action, default: Any) -> dict[str, Any]:
    """What the table says of an option; `None` where nothing is said."""
    kind = KINDS[type(action).__name__]
    assert not action.required, action
    row: dict[str, Any] = {"options": list(action.option_strings), "dest": action.dest}
    row["kind"] = kind
    if kind == "store":
        type_name, choices = _type_and_choices(action)
        row |= {"type": type_name, "nargs": action.nargs, "choices": choices}
    row["default"] = default.name if isinstance(default, enum.Enum) else default
    return {name: value for name, value in row.items() if value is not None}


def _type_and_choices(action: argparse.Action) -> tuple[str, list[Any] | None]:
    choices = None if action.choices is None else list(action.choices)
    if action.type is None:
        return "str", choices
    if action.type in PLAIN_TYPES:
        return PLAIN_TYPES[action.type], choices
    if choices and isinstance(choices[0], enum.Enum):
        return "str", [member.name for member in choices]
    if "cuda_graph" in action.dest:
        return "str", _accepted_cuda_graph_words(action.type)
    return CONVERTERS[action.type.__name__], choices


def _accepted_cuda_graph_words(convert: Callable[[str], Any]) -> list[str]:
    from megatron.core.transformer import enums

    members = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    accepted = []
    for word in dict.fromkeys(
        [*members.__members__, "full", "full_iteration", "full_iteration_inference"]
    ):
        try:
            convert(word)
        except KeyError:
            continue
        accepted.append(word)
    return accepted


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        _answer(sys.argv[2])
    else:
        main()
