"""Whether the text of an emitted class is that of another, but for sizes."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import zip_longest

from ..checking.types.messages.syntax import syntax_tree

__all__ = ["text_difference"]


def text_difference(source: str, small: str, training: bool, integers: Collection[tuple[int, int]]) -> str:
    """Where the methods of `source` that run a program are not those of `small`; "": they are.

    Args:
        training: of which mode the program in `small` is; `source` may have another one for the other mode.
        integers: those that may differ, with what they are in `small`.
    """
    whole, own = _methods(source), _methods(small)
    mode = "train_" if training else "eval_"
    prefix = mode if f"{mode}forward" in whole else ""
    for name, method in own.items():
        other = whole.get(prefix + name)
        if other is None:
            return f"it has no {prefix}{name}"
        for one, two in zip_longest(_statements(other), _statements(method)):
            if one is None or two is None or not _same(one, two, integers):
                line = ast.unparse(one) if one is not None else f"nothing in the place of {ast.unparse(two)}"
                return f"{prefix}{name}, line {getattr(one, 'lineno', 'last')}: {line}"
    return ""


def _methods(source: str) -> dict[str, ast.FunctionDef]:
    tree = syntax_tree(source)
    assert tree is not None  # it was imported
    (made,) = (each for each in tree.body if isinstance(each, ast.ClassDef))
    return {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}


def _statements(method: ast.FunctionDef) -> Iterator[ast.stmt]:
    """What a method does, behind the check of its arguments."""
    for statement in method.body:
        if not ast.unparse(statement).startswith("self.check_arguments("):
            yield statement


def _same(a: object, b: object, integers: Collection[tuple[int, int]]) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, ast.AST) and isinstance(b, ast.AST):
        return all(_same(getattr(a, field, None), getattr(b, field, None), integers) for field in a._fields)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, integers) for x, y in zip(a, b))
    return a == b or (type(a) is int and (a, b) in integers)
