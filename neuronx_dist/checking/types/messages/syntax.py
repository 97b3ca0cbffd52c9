"""Python's source text as a syntax tree.

One thread parses at a time: CPython 3.11's `ast.parse` keeps its recursion depth in the interpreter, and two threads
that parse at once end in "SystemError: AST constructor recursion depth mismatch" (CPython issue 106905).
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

__all__ = ["ancestors", "expression_of", "syntax_tree", "text_of"]

_PARSING = threading.Lock()


@lru_cache(maxsize=64)
def syntax_tree(source: str) -> ast.Module | None:
    """The source as a tree, one object for equal sources; None: it is not Python."""
    try:
        with _PARSING:
            return ast.parse(source)
    except SyntaxError:
        return None


def expression_of(code: str) -> ast.expr | None:
    """The expression as a tree; None: it is not one expression of Python."""
    try:
        with _PARSING:
            return ast.parse(code, mode="eval").body
    except SyntaxError:
        return None


def ancestors(source: str, node: ast.AST | None) -> Iterator[Any]:
    """Yields the nodes of the source's tree around a node, the innermost first."""
    parents = _parents(source)
    while node is not None:
        node = parents.get(node)
        if node is not None:
            yield node


@lru_cache(maxsize=64)
def _parents(source: str) -> dict[ast.AST, ast.AST]:
    tree = syntax_tree(source)
    return {} if tree is None else {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def text_of(source: str, node: Any) -> str:
    """Returns the text of a node, as `ast.get_source_segment`, which splits the source into lines at each call."""
    lines = _lines(source)[node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return b"".join(lines).decode()


@lru_cache(maxsize=64)
def _lines(source: str) -> list[bytes]:
    return source.encode().splitlines(keepends=True)
