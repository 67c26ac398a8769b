"""The syntax tree of a shell script, by tree-sitter's grammar of bash."""

import re
from typing import TYPE_CHECKING

from piper_megatron.errors import WorkloadError
from piper_megatron.workload.shell_words import Variables

if TYPE_CHECKING:
    from tree_sitter import Node


def parsed(text: str, variables: Variables) -> "Node":
    """The tree of a script.

    Raises:
        WorkloadError: it is no shell script.
    """
    # only scripts pay for the import
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    text = re.sub(r"\\\s*\Z", "\n", text)  # a last line that would go on
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    if root.has_error:
        wrong = _first_error(root)
        line, shown = wrong.start_point.row + 1, variables.shown(source(wrong)).split("\n")[0]
        raise WorkloadError(
            f"{variables.place}, line {line}: not understood as a shell script near '{shown[:60]}'"
        )
    return root


def source(node: "Node") -> str:
    """A node as the script writes it."""
    return (node.text or b"").decode(errors="replace")


def named(nodes: list["Node"]) -> list["Node"]:
    """Nodes without punctuation."""
    return [node for node in nodes if node.is_named]


def ends_its_line(assignment: "Node", name: "Node") -> bool:
    """Whether an assignment is a statement of its own; the grammar may join it to the next line."""
    command = assignment.parent
    assert command is not None
    start = command.start_byte
    between = (command.text or b"")[assignment.end_byte - start : name.start_byte - start]
    return b"\n" in between.replace(b"\\\n", b"")


def clause_condition(clause: "Node") -> list["Node"]:
    """What stands between `elif` and `then`; nothing for `else`."""
    if clause.type == "else_clause":
        return []
    then = next(index for index, child in enumerate(clause.children) if child.type == "then")
    return named(clause.children[1:then])


def case_patterns(item: "Node") -> list["Node"]:
    """Patterns of one branch of `case`."""
    return named(item.children_by_field_name("value"))


def here_documents(redirected: "Node") -> list["Node"]:
    """Texts of the here-documents of a command."""
    return [
        text
        for redirect in redirected.children_by_field_name("redirect")
        for text in redirect.named_children
        if text.type == "heredoc_body"
    ]


def _first_error(node: "Node") -> "Node":
    while not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error or child.is_missing)
    return node
