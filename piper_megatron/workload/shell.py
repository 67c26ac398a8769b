"""Which commands a shell script would start, with which words; nothing is executed.

Statements are followed as a shell would follow them where variables of the script decide. Where
something else does (whether a file exists, the output of a command), every branch is followed, and
what the branches leave different has no value. What the script and the caller do not set is unset.
"""

import contextlib
import fnmatch
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from piper_megatron.errors import WorkloadError
from piper_megatron.workload.launcher import SCRIPT_SUFFIXES, Ranks, ranks_of_options
from piper_megatron.workload.shell_syntax import (
    case_patterns,
    clause_condition,
    ends_its_line,
    here_documents,
    named,
    parsed,
    source,
)
from piper_megatron.workload.shell_words import Expander, Value, Variables, is_known

if TYPE_CHECKING:
    from tree_sitter import Node

_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_SHELLS = ("bash", "sh", "zsh", "ksh", "dash", "sbatch")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_DEEPEST = 20  # functions in functions, scripts in scripts
_MOST_TURNS = 1000  # of a loop
_MOST_STATEMENTS = 50_000
_LONGEST_VALUE = 1_000_000  # characters


@dataclass(frozen=True)
class Started:
    """A command that the script starts.

    Attributes:
        words: its words; `Variables.unresolved` says what has no value in them.
        place: script and line.
        ranks: sizes that the surrounding batch job says.
    """

    words: tuple[str, ...]
    place: str
    ranks: Ranks


class _Exit(Exception):
    """The script ends here."""


class _Return(_Exit):
    """The function or the sourced script ends here."""


class Shell:
    """The state of a script on its way."""

    def __init__(self) -> None:
        self.variables = Variables()
        self.started: list[Started] = []
        self._expander = Expander(self.variables)
        self._functions: dict[str, Node] = {}
        self._locals: list[dict[str, Value | None]] = []
        self._ranks = Ranks()
        self._before: tuple[str, ...] = ()  # words that start the shell itself
        self._depth = 0
        self._statements_left = _MOST_STATEMENTS
        self._uncertain = 0
        self._folder = Path()

    # --- what is run ---

    def run_file(self, path: Path, arguments: Sequence[str] = ()) -> None:
        """Follows a script.

        Raises:
            WorkloadError: the file cannot be read or is no shell script.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise WorkloadError(f"cannot read {path}: {reason}") from None
        folder, self._folder = self._folder, path.parent
        self.run_text(text, str(path), arguments)
        self._folder = folder

    def run_text(self, text: str, place: str, arguments: Sequence[str] | None = None) -> None:
        """Follows the text of a script; `arguments` are its positional parameters."""
        variables, ranks = self.variables, self._ranks
        place, variables.place = variables.place, place
        positional = variables.positional
        if arguments is not None:
            variables.positional = list(arguments)
        self._batch_options(text)
        with self._deeper(), contextlib.suppress(_Exit):
            self._statements(parsed(text, variables))
        variables.place, variables.positional, self._ranks = place, positional, ranks

    def run_words(self, words: Sequence[str], line: int = 1) -> None:
        """Follows one command, whose words are expanded already."""
        for index, word in enumerate(words):
            assignment = _ASSIGNMENT.fullmatch(word)
            if assignment and all(map(_is_environment, words[:index])):
                self.variables.values[assignment[1]] = assignment[2]
                continue
            behind_shell = _is_behind_shell(words, index)
            script = self._script(word, behind_shell)
            typed = self._depth == 0 and any(PurePath(w).name in _SHELLS for w in words[:index])
            if typed and not script and PurePath(word).suffix in SCRIPT_SUFFIXES:
                script = Path(word)  # and the error says that it is not there
            if script or (behind_shell and re.fullmatch("-[a-z]*c", word)):
                before, self._before = self._before, (*self._before, *words[:index])
                if script:
                    self.run_file(script, words[index + 1 :])
                else:
                    self.run_text(" ".join(words[index + 1 : index + 2]), self.variables.place)
                self._before = before
                return
        self._record(words, line)

    def _script(self, word: str, behind_shell: bool) -> Path | None:
        """The shell script that a word starts."""
        is_named_so = PurePath(word).suffix in SCRIPT_SUFFIXES
        return self._found(word) if is_named_so or behind_shell else None

    def _found(self, name: str) -> Path | None:
        """A file beside the caller or beside the script."""
        places = (Path(name), self._folder / name)
        return next((path for path in places if is_known(name) and path.is_file()), None)

    def _record(self, words: Sequence[str], line: int) -> None:
        if words:
            place = f"{self.variables.place}, line {line}"
            self.started.append(Started((*self._before, *words), place, self._ranks))

    def _batch_options(self, text: str) -> None:
        """Sizes in `#SBATCH` lines, also as the variables that Slurm sets from them."""
        options = re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE)
        if not options:
            return
        self._ranks = ranks = ranks_of_options(
            [word for line in options for word in shlex.split(line, comments=True)]
        )
        tasks = ranks.tasks or (
            ranks.nodes * ranks.tasks_per_node if ranks.nodes and ranks.tasks_per_node else None
        )
        for name, number in (
            ("SLURM_NNODES", ranks.nodes),
            ("SLURM_JOB_NUM_NODES", ranks.nodes),
            ("SLURM_NTASKS", tasks),
            ("SLURM_NPROCS", tasks),
            ("SLURM_NTASKS_PER_NODE", ranks.tasks_per_node),
            ("SLURM_GPUS_PER_NODE", ranks.gpus_per_node),
            ("SLURM_GPUS_ON_NODE", ranks.gpus_per_node),
        ):
            if number is not None:
                self.variables.values.setdefault(name, str(number))

    @contextlib.contextmanager
    def _deeper(self) -> Iterator[None]:
        if self._depth == _DEEPEST:
            raise WorkloadError(f"{self.variables.place}: scripts or functions call each other")
        self._depth += 1
        yield
        self._depth -= 1

    # --- statements; each returns whether it succeeds, None where that is not known ---

    def _statements(self, node: "Node") -> bool | None:
        outcome: bool | None = True
        for child in node.named_children:
            outcome = self._statement(child)
        return outcome

    def _statement(self, node: "Node") -> bool | None:
        self._statements_left -= 1
        if self._statements_left < 0:
            raise WorkloadError(f"{self.variables.place}: does not come to an end")
        handler = _HANDLERS.get(node.type)
        return handler(self, node) if handler else None

    def _isolated(self, node: "Node") -> bool | None:
        """Statements whose assignments end with them."""
        values = _copied(self.variables.values)
        outcome = self._statements(node)
        self.variables.values = values
        return None if node.type == "pipeline" else outcome

    def _assignments(self, node: "Node") -> bool | None:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
        return True

    def _assign(self, node: "Node") -> bool | None:
        target, value_node = node.named_children[0], node.child_by_field_name("value")
        name, values = source(target), self.variables.values
        value: Value = ""
        if value_node is not None and value_node.type == "array":
            value = [w for part in value_node.named_children for w in self._expander.fields(part)]
        elif value_node is not None:
            value = self._expander.text(value_node)
        if target.type == "subscript":
            self._assign_element(target, value)
            return True
        before = values.get(name)
        if any(child.type == "+=" for child in node.children) and before is not None:
            value = _appended(before, value)
        values[name] = self._bounded(value)
        return True

    def _bounded(self, value: Value) -> Value:
        if sum(map(len, value)) > _LONGEST_VALUE:
            raise WorkloadError(f"{self.variables.place}: a variable grows without end")
        return value

    def _assign_element(self, target: "Node", value: Value) -> None:
        name, index = source(target.named_children[0]), source(target.named_children[-1])
        array = self.variables.values.setdefault(name, [])
        if isinstance(array, list) and index.isdigit() and int(index) <= len(array):
            array[int(index) : int(index) + 1] = [value] if isinstance(value, str) else value
        else:
            text = f"{name}[{index}]"
            self.variables.values[name] = [self.variables.mark(text, "it is not understood")]

    def _declare(self, node: "Node") -> bool | None:
        local = source(node.children[0]) == "local" and self._locals
        for child in node.named_children:
            if local and child.type in ("variable_assignment", "variable_name", "word"):
                name = source(child).partition("=")[0]
                self._locals[-1].setdefault(name, self.variables.values.get(name))
        return self._assignments(node)

    def _command(self, node: "Node") -> bool | None:
        name_node = node.child_by_field_name("name")
        prefix = [c for c in node.named_children if c.type == "variable_assignment"]
        if name_node is None or (prefix and ends_its_line(prefix[-1], name_node)):
            self._assignments(node)
        words = self._words(node)
        return self._builtin(words, node.start_point.row + 1) if words else True

    def _words(self, command: "Node") -> list[str]:
        """Words of a command without assignments before it."""
        parts = command.children_by_field_name("name") + command.children_by_field_name("argument")
        return [word for part in parts for word in self._expander.fields(part)]

    def _builtin(self, words: list[str], line: int) -> bool | None:
        name, values = words[0], self.variables.values
        if name in self._functions:
            return self._call(name, words[1:])
        if name in ("source", "."):
            path = self._found(words[1]) if len(words) > 1 else None
            if path and path.name != "activate":
                self.run_file(path, words[2:] or self.variables.positional)
        elif name == "eval":
            self.run_text(" ".join(words[1:]), self.variables.place)
        elif name in _DECLARATIONS:
            for word in words[1:]:
                if assignment := _ASSIGNMENT.fullmatch(word):
                    values[assignment[1]] = assignment[2]
        elif name == "let":
            for word in words[1:]:
                self._expander.calculated(word)
        elif name == "unset":
            for word in words[1:]:
                values.pop(word, None)
        elif name == "set" and words[1:2] == ["--"]:
            self.variables.positional = words[2:]
        elif name == "shift":
            del self.variables.positional[: int(words[1]) if words[1:] else 1]
        elif name in ("exit", "return"):
            # a failure is a check of something that is not there, like a file of the user's
            if not self._uncertain and words[1:] in ([], ["0"]):
                raise _Exit if name == "exit" else _Return
        elif name == "getopts":
            return None if self.variables.positional else False
        elif name in ("true", ":"):
            return True
        elif name == "false":
            return False
        else:
            self.run_words(words, line)
        return None

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        variables, body = self.variables, self._functions[name].child_by_field_name("body")
        positional, variables.positional = variables.positional, list(arguments)
        self._locals.append({})
        if body is not None:
            with self._deeper(), contextlib.suppress(_Return):
                self._statement(body)
        for local, value in self._locals.pop().items():
            if value is None:
                variables.values.pop(local, None)
            else:
                variables.values[local] = value
        variables.positional = positional
        return None

    def _define(self, node: "Node") -> bool | None:
        self._functions[source(node.named_children[0])] = node
        return True

    def _list(self, node: "Node") -> bool | None:
        left, operator, right = node.children[0], node.children[1].type, node.children[2]
        outcome = self._statement(left)
        go_on = operator == "&&"
        if outcome is None:
            self._each([lambda: self._statement(right), lambda: None])
            return None
        return self._statement(right) if outcome == go_on else outcome

    def _not(self, node: "Node") -> bool | None:
        outcome = self._statements(node)
        return None if outcome is None else not outcome

    def _test(self, node: "Node") -> bool | None:
        return self._expander.truth(node)

    def _compound(self, node: "Node") -> bool | None:
        if node.children[0].type == "((":
            value = self._expander.number(node)
            return None if value is None else bool(value)
        return self._statements(node)

    def _if(self, node: "Node") -> bool | None:
        conditions = node.children_by_field_name("condition")
        body = [
            child
            for child in node.named_children
            if child not in conditions and child.type not in ("elif_clause", "else_clause")
        ]
        clauses = [c for c in node.named_children if c.type in ("elif_clause", "else_clause")]
        self._choose([named(conditions), *map(clause_condition, clauses)], [body, *clauses])
        return None

    def _choose(self, conditions: list[list["Node"]], bodies: list) -> None:
        """The first branch whose condition holds; all that may, where that is not known."""
        outcome: bool | None = True
        for condition in conditions[0]:
            outcome = self._statement(condition)
        rest = conditions[1:], bodies[1:]
        take = lambda: self._branch(bodies[0], conditions[0])  # noqa: E731
        leave = lambda: self._choose(*rest) if rest[0] else None  # noqa: E731
        if outcome is None:
            self._each([take, leave])
        elif outcome:
            take()
        else:
            leave()

    def _branch(self, body: "Node | list[Node]", condition: list["Node"]) -> None:
        nodes = body if isinstance(body, list) else body.named_children
        for node in nodes:
            if node not in condition:
                self._statement(node)

    def _case(self, node: "Node") -> bool | None:
        subject = self._expander.text(node.children_by_field_name("value")[0])
        items = [child for child in node.named_children if child.type == "case_item"]
        if not is_known(subject):
            self._each(
                [lambda i=i: self._branch(i, case_patterns(i)) for i in items] + [lambda: None]
            )
            return None
        for item in items:
            patterns = [self._expander.text(pattern) for pattern in case_patterns(item)]
            if any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns):
                self._branch(item, case_patterns(item))
                break
        return None

    def _for(self, node: "Node") -> bool | None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        words = [
            word
            for value in node.children_by_field_name("value")
            for word in self._expander.fields(value)
        ]
        assert variable is not None
        assert body is not None
        for word in words[:_MOST_TURNS]:
            self.variables.values[source(variable)] = word
            self._statement(body)
        return None

    def _while(self, node: "Node") -> bool | None:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        until = node.children[0].type == "until"
        for _ in range(_MOST_TURNS):
            outcome = self._statement(condition) if condition is not None else None
            if outcome is None and body is not None:
                self._each([lambda: self._statement(body), lambda: None])
            if outcome is None or outcome == until or body is None:
                break
            self._statement(body)
        return None

    def _maybe_body(self, node: "Node") -> bool | None:
        body = node.child_by_field_name("body")
        if body is not None:
            self._each([lambda: self._statement(body), lambda: None])
        return None

    def _redirected(self, node: "Node") -> bool | None:
        """A command with redirections; a shell may be told what to do in a here-document."""
        body, texts = node.child_by_field_name("body"), here_documents(node)
        words = self._words(body) if texts and body and body.type == "command" else []
        if words and PurePath(words[0]).name in _SHELLS:
            before, self._before = self._before, (*self._before, *words)
            for text in texts:
                self.run_text(self._expander.here_document(text), self.variables.place)
            self._before = before
            return None
        return self._statement(body) if body is not None else True

    # --- branches of which only the running script knows which one is taken ---

    def _each(self, branches: Sequence[Callable[[], object]]) -> None:
        variables = self.variables
        before = variables.values
        ends: list[dict[str, Value]] = []
        self._uncertain += 1
        for branch in branches:
            variables.values = _copied(before)
            branch()
            ends.append(variables.values)
        self._uncertain -= 1
        variables.values = {
            name: self._merged(name, [end.get(name) for end in ends])
            for name in {name: None for end in ends for name in end}
        }

    def _merged(self, name: str, values: list[Value | None]) -> Value:
        first = values[0]
        if first is not None and all(value == first for value in values):
            return first
        mark = self.variables.mark(
            f"${name}", f"what it is depends on the machine ({self.variables.place})"
        )
        if any(isinstance(value, str) or value is None for value in values):
            return mark
        common = []
        for elements in zip(*(value or [] for value in values), strict=False):
            if len(set(elements)) > 1:
                break
            common.append(elements[0])
        return [*common, mark]


_HANDLERS: dict[str, Callable[[Shell, "Node"], bool | None]] = {
    "program": Shell._statements,
    "do_group": Shell._statements,
    "subshell": Shell._isolated,
    "pipeline": Shell._isolated,
    "compound_statement": Shell._compound,
    "variable_assignment": Shell._assign,
    "variable_assignments": Shell._assignments,
    "declaration_command": Shell._declare,
    "command": Shell._command,
    "function_definition": Shell._define,
    "list": Shell._list,
    "negated_command": Shell._not,
    "test_command": Shell._test,
    "if_statement": Shell._if,
    "case_statement": Shell._case,
    "for_statement": Shell._for,
    "c_style_for_statement": Shell._maybe_body,
    "while_statement": Shell._while,
    "redirected_statement": Shell._redirected,
}


def _copied(values: dict[str, Value]) -> dict[str, Value]:
    return {name: list(v) if isinstance(v, list) else v for name, v in values.items()}


def _appended(before: Value, value: Value) -> Value:
    if isinstance(before, list):
        return [*before, *([value] if isinstance(value, str) else value)]
    return before + value if isinstance(value, str) else [before, *value]


def _is_environment(word: str) -> bool:
    return word == "env" or bool(_ASSIGNMENT.fullmatch(word))


def _is_behind_shell(words: Sequence[str], index: int) -> bool:
    """Whether the words before are `bash` and options of it."""
    while index > 0 and words[index - 1].startswith("-"):
        index -= 1
    return index > 0 and PurePath(words[index - 1]).name in _SHELLS
