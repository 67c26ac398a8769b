"""Words of a shell script: variables, quotes, expansions, arithmetic and tests; nothing is run.

What has no value here, as `$(hostname)` or a variable of the user's environment, stays in the words
as a mark, so that only a word that matters needs one.
"""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from piper_megatron.workload.shell_arithmetic import Incalculable, calculated

if TYPE_CHECKING:
    from tree_sitter import Node

type Value = str | list[str]

_MARK = re.compile("\ue000(\\d+)\ue001")
_NAME = re.compile(r"(?P<length>#?)(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?")
_EXPANSIONS = {
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
    "string",
    "raw_string",
    "ansi_c_string",
    "translated_string",
}
_COMPARISONS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Unresolved:
    """A part of a word that has no value without running the script.

    Attributes:
        text: as the script writes it.
        why: the reason, as the end of a sentence.
    """

    text: str
    why: str


@dataclass
class Variables:
    """What is known of a shell's state.

    Attributes:
        values: of variables and arrays.
        positional: `$1`, `$2`, ...
        marks: what stands behind the marks in words.
        place: of the script, for messages.
    """

    values: dict[str, Value] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    marks: list[Unresolved] = field(default_factory=list)
    place: str = "the command"

    def mark(self, text: str, why: str) -> str:
        """A stand-in for something without a value."""
        self.marks.append(Unresolved(text, why))
        return f"\ue000{len(self.marks) - 1}\ue001"

    def unresolved(self, word: str) -> list[Unresolved]:
        """What has no value in a word."""
        return [self.marks[int(number)] for number in _MARK.findall(word)]

    def shown(self, word: str) -> str:
        """A word as the script writes it."""
        return _MARK.sub(lambda mark: self.marks[int(mark[1])].text, word)


def is_known(word: str) -> bool:
    """Whether all parts of a word have a value."""
    return not _MARK.search(word)


class Expander:
    """Expands the words of a syntax tree (tree-sitter-bash)."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        # a test takes what the script does not set for empty, as a shell would
        self._unset_is_empty = False

    # --- words ---

    def fields(self, node: "Node", quoted: bool = False) -> list[str]:
        """The words that one word becomes."""
        kind = node.type
        if kind == "concatenation":
            return _glued(self.fields(part, quoted) for part in node.children)
        if kind in ("string", "translated_string"):
            return self._quoted(node)
        if kind == "raw_string":
            return [_text(node)[1:-1]]
        if kind == "ansi_c_string":
            return [_text(node)[2:-1].replace(r"\n", "\n").replace(r"\t", "\t")]
        if kind in ("simple_expansion", "expansion"):
            return self._variable(node, quoted)
        if kind == "arithmetic_expansion":
            return [self._arithmetic_text(node)]
        if kind in ("command_substitution", "process_substitution"):
            return [self._mark(node, "its output is not known without running it")]
        if kind in ("command_name", "array"):
            return [word for part in node.named_children for word in self.fields(part, quoted)]
        if kind == "comment":
            return []
        if kind == "string_content":
            return [_unescaped(node.text or b"")]
        return [re.sub(r"\\(.)", lambda m: m[1].strip("\n"), _text(node), flags=re.DOTALL)]

    def text(self, node: "Node") -> str:
        """A word in which nothing is split, as the right side of an assignment."""
        return " ".join(self.fields(node, quoted=True))

    def here_document(self, node: "Node") -> str:
        """The text of a here-document."""
        return self._mixed(node, node.start_byte, node.end_byte)[0]

    def _quoted(self, node: "Node") -> list[str]:
        opening = len(_text(node).partition('"')[0]) + 1
        inside = node.named_children
        if len(inside) == 1 and _text(node)[opening:-1] == _text(inside[0]):
            return self.fields(inside[0], quoted=True)  # "$@" without parameters is no word
        return self._mixed(node, node.start_byte + opening, node.end_byte - 1)

    def _mixed(self, node: "Node", start: int, end: int) -> list[str]:
        """A stretch of the script inside quotes: text as it stands, and expansions."""
        source, offset = node.text or b"", node.start_byte
        parts: list[list[str]] = [[""]]
        at = start
        for part in _expansions(node):
            if start <= part.start_byte and part.end_byte <= end:
                parts.append([_unescaped(source[at - offset : part.start_byte - offset])])
                parts.append(self.fields(part, quoted=True))
                at = part.end_byte
        parts.append([_unescaped(source[at - offset : end - offset])])
        return _glued(parts)

    # --- variables ---

    def _variable(self, node: "Node", quoted: bool) -> list[str]:
        body = _text(node)[1:].removeprefix("{").removesuffix("}")
        match = _NAME.match(body)
        if match is None or body.startswith("!"):
            return [self._mark(node, "it is not understood")]
        rest = body[match.end() :]
        if match["length"] and match["name"] and not rest:
            return [self._length(node, match)]
        value = self._value(match["name"], match["index"])
        if rest:
            value = self._operated(node, value, rest, match["name"], match.end())
        elif value is None:
            value = self._unset(node, match["name"])
        if isinstance(value, str):
            return [value] if quoted else value.split()
        if quoted:
            return [" ".join(value)] if "*" in (match["index"], match["name"]) else list(value)
        return [word for element in value for word in element.split()]

    def _value(self, name: str, index: str | None) -> Value | None:
        """Of a variable, an element, or all of an array; None where it is not set."""
        positional = self.variables.positional
        if name in ("@", "*"):
            return positional
        if name == "#":
            return str(len(positional))
        if name == "0":
            return self.variables.place
        if name.isdigit():
            return positional[int(name) - 1] if int(name) <= len(positional) else None
        value = self.variables.values.get(name)
        if index is None:
            return value[0] if isinstance(value, list) and value else value or value
        elements = [value] if isinstance(value, str) else value or []
        if index in ("@", "*"):
            return elements if value is not None else None
        if re.fullmatch(r"-?\d+", index) and -len(elements) <= int(index) < len(elements):
            return elements[int(index)]
        return None

    def _unset(self, node: "Node", name: str) -> str:
        if self._unset_is_empty:
            return ""
        return self._mark(node, "it is not set" if name != "?" else "it is not known")

    def _length(self, node: "Node", match: re.Match) -> str:
        value = self._value(match["name"], match["index"])
        if value is None:
            return "0"
        known = all(map(is_known, value if isinstance(value, list) else [value]))
        return str(len(value)) if known else self._mark(node, "it is not known")

    def _operated(
        self, node: "Node", value: Value | None, rest: str, name: str, consumed: int
    ) -> Value:
        """`${name:-default}` and its relatives."""
        operator = next(
            op for op in (":-", ":=", ":+", ":?", "##", "%%", "//", rest[0]) if rest.startswith(op)
        )
        start = node.start_byte + 2 + consumed + len(operator)
        operand = " ".join(self._mixed(node, start, node.end_byte - 1))
        empty = value is None or (operator.startswith(":") and value in ("", []))
        match operator[-1]:
            case "-" | "=" if operator in ("-", ":-", "=", ":="):
                if empty and operator.endswith("="):
                    self.variables.values[name] = operand
                return operand if empty or value is None else value
            case "+":
                return "" if empty else operand
            case "?":
                return self._mark(node, "it is not set") if empty or value is None else value
        if value is None:
            return self._unset(node, name)
        if not isinstance(value, str) or not is_known(value + operand):
            return self._mark(node, "it is not known")
        return self._edited(node, value, operator, operand)

    def _edited(self, node: "Node", value: str, operator: str, operand: str) -> str:
        """A value with a prefix, suffix or part taken away."""
        lengths = range(len(value) + 1)
        if operator in ("#", "##"):
            ends = [n for n in lengths if fnmatch.fnmatchcase(value[:n], operand)]
            return value[ends[-1 if operator == "##" else 0] :] if ends else value
        if operator in ("%", "%%"):
            starts = [n for n in lengths if fnmatch.fnmatchcase(value[n:], operand)]
            return value[: starts[0 if operator == "%%" else -1]] if starts else value
        if operator in ("/", "//") and not set("*?[") & set(operand):
            old, _, new = operand.partition("/")
            return value.replace(old, new, 1 if operator == "/" else -1)
        if operator == ":" and (part := re.fullmatch(r" *(-?\d+)(?::(\d+))?", operand)):
            return value[int(part[1]) :][: int(part[2]) if part[2] else None]
        if operator + operand in (",,", "^^"):
            return value.lower() if operator == "," else value.upper()
        return self._mark(node, "it is not understood")

    def _mark(self, node: "Node", why: str) -> str:
        line = node.start_point.row + 1
        shown = re.sub(r"\s+", " ", self.variables.shown(_text(node)))
        return self.variables.mark(shown, f"{why} ({self.variables.place}, line {line})")

    # --- arithmetic ---

    def number(self, node: "Node") -> int | None:
        """Value of `$(( ... ))` or `(( ... ))`; None where it is not known. Assigns as it goes."""
        opening = 3 if _text(node).startswith("$") else 2
        texts = self._mixed(node, node.start_byte + opening, node.end_byte - 2)
        return self.calculated(" ".join(texts))

    def calculated(self, expression: str) -> int | None:
        """Value of an arithmetic expression whose `$name` are expanded."""

        def value_of(name: str) -> str | None:
            value = self._value(name, None)
            return value if isinstance(value, str) else None

        try:
            return calculated(expression, value_of, self.variables.values.__setitem__)
        except Incalculable:
            return None

    def _arithmetic_text(self, node: "Node") -> str:
        value = self.number(node)
        return self._mark(node, "it cannot be calculated") if value is None else str(value)

    # --- tests ---

    def truth(self, node: "Node") -> bool | None:
        """Outcome of `[ ... ]` or `[[ ... ]]`; None where it is not known."""
        self._unset_is_empty, before = True, self._unset_is_empty
        try:
            return self._truth(node)
        finally:
            self._unset_is_empty = before

    def _truth(self, node: "Node") -> bool | None:
        kind = node.type
        if kind == "test_command":
            if _text(node.children[0]) == "((":
                value = self.number(node)
                return None if value is None else bool(value)
            return self._truth(node.named_children[0]) if node.named_children else False
        if kind == "parenthesized_expression":
            return self._truth(node.named_children[0])
        if kind == "unary_expression":
            return self._unary_truth(_text(node.children[0]), node.children[-1])
        if kind == "binary_expression":
            left, operation, right = node.children[0], node.children[1], node.children[-1]
            return self._binary_truth(left, _text(operation), right)
        text = self.text(node)
        return bool(text) if is_known(text) else None

    def _unary_truth(self, operator: str, operand: "Node") -> bool | None:
        if operator == "!":
            outcome = self._truth(operand)
            return None if outcome is None else not outcome
        text = self.text(operand)
        if operator in ("-n", "-z") and is_known(text):
            return bool(text) == (operator == "-n")
        if operator == "-v":
            return text in self.variables.values
        return None

    def _binary_truth(self, left: "Node", operator: str, right: "Node") -> bool | None:
        if operator in ("&&", "-a", "||", "-o"):
            decisive = operator in ("||", "-o")
            outcomes = [self._truth(left), self._truth(right)]
            if decisive in outcomes:
                return decisive
            return None if None in outcomes else not decisive
        a, b = self.text(left), self.text(right)
        if not is_known(a + b):
            return None
        if operator in ("=", "==", "!="):
            equal = fnmatch.fnmatchcase(a, b) if "string" not in right.type else a == b
            return equal == (operator != "!=")
        x, y = _whole(a or "0"), _whole(b or "0")
        if operator in _COMPARISONS and x is not None and y is not None:
            return bool(_COMPARISONS[operator](x, y))
        return None


def _text(node: "Node") -> str:
    return (node.text or b"").decode(errors="replace")


def _expansions(node: "Node") -> "Iterator[Node]":
    """The outermost expansions and quoted parts inside a node."""
    for part in node.named_children:
        if part.type in _EXPANSIONS:
            yield part
        else:
            yield from _expansions(part)


def _unescaped(source: bytes) -> str:
    """Text between double quotes."""
    return re.sub(r'\\([$`"\\\n])', lambda m: m[1].strip("\n"), source.decode(errors="replace"))


def _glued(parts: "Iterator[list[str]] | list[list[str]]") -> list[str]:
    """Fields side by side: the last of one part and the first of the next are one word."""
    glued: list[str] = []
    for part in parts:
        joined = glued and part
        glued = [*glued[:-1], glued[-1] + part[0], *part[1:]] if joined else glued or part
    return glued


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r" *[+-]?\d+ *", text) else None
