"""A platform as the text of its YAML file, in the key order of the library's files."""

import re
from typing import Any

import yaml

from piper_megatron.platform.platform import Platform
from piper_megatron.strict import StrictModel

WIDTH = 92  # PyYAML breaks a line behind the word that crosses it
_FIRST = ("name", "ranks", "nodes", "segment")
_LAST = ("evidence", "source", "transfer")


def platform_yaml(platform: Platform) -> str:
    """The YAML text that `load_platform` reads as an equal platform.

    Values that are the format's defaults are left out; an accelerator is written in full, without
    reference to the library.
    """
    return yaml.dump(
        _plain(platform),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=WIDTH,
    )


class _Line(dict[Any, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Indents lists, folds long texts, and writes lists of plain values on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _plain(value: Any) -> Any:
    """Dictionaries, lists and scalars of a part of a platform."""
    if isinstance(value, StrictModel):
        fields = type(value).model_fields
        keys = sorted(fields, key=_place)  # a stable sort: else in the model's order
        parts = {key: getattr(value, key) for key in keys}
        return {
            key: _plain(v)
            for key, v in parts.items()
            if v != fields[key].get_default(call_default_factory=True)
        }
    if isinstance(value, dict):
        plain = {key: _plain(v) for key, v in value.items()}
        nested = any(isinstance(v, dict | list) for v in plain.values())
        return plain if nested else _Line(plain)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _place(key: str) -> int:
    if key in _FIRST:
        return _FIRST.index(key) - len(_FIRST)
    return _LAST.index(key) + 1 if key in _LAST else 0


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    folded = len(text) > WIDTH // 2 and "\n" not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">" if folded else None)


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    nested = any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=not nested)


def _line(dumper: yaml.SafeDumper, mapping: _Line) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping, flow_style=True)


def _block(dumper: yaml.SafeDumper, mapping: dict[Any, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping, flow_style=False)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)
_Dumper.add_representer(dict, _block)
_Dumper.add_representer(_Line, _line)
