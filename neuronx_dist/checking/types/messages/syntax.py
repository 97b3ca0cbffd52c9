"""Python's source text as a syntax tree.

One thread parses at a time: CPython 3.11's `ast.parse` keeps its recursion depth in the interpreter, and two threads
that parse at once end in "SystemError: AST constructor recursion depth mismatch" (CPython issue 106905).
"""

from __future__ import annotations

import ast
import threading
from functools import lru_cache

__all__ = ["expression_of", "syntax_tree"]

_PARSING = threading.Lock()


@lru_cache(maxsize=16)
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
