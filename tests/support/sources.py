"""Files of Python as syntax trees, parsed once for all tests of a process that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["nodes_of", "tree_of"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of the file, as `ast.walk` yields them."""
    return list(ast.walk(tree_of(path)))
