"""Read the sources of the package as programs run them."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a source, except those in ``if TYPE_CHECKING``, which never run."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not _is_for_checkers(child):
            yield from running(child)


def named_in_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in ``if TYPE_CHECKING``: imports for annotations."""
    for block in filter(_is_for_checkers, ast.walk(tree)):
        yield from ast.walk(block)
