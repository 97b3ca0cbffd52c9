"""Whether the text of an emitted class is that of another, but for sizes and for more repetitions of equal lines.

Of repeated lines (the layers of a model) the other has the first and the last repetition. Those that are left out are
each equal to the one after them, but for the names that are made there and the weights that are read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator

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
        difference = _difference(list(_statements(other)), list(_statements(method)), integers)
        if difference:
            return f"{prefix}{name}, {difference}"
    return ""


def _difference(whole: list[ast.stmt], small: list[ast.stmt], integers: Collection[tuple[int, int]]) -> str:
    """The first statement of `whole` that is not that of `small`; "": but for repetitions there is none."""
    same = (_Same(integers)(one, two) for one, two in zip(whole, small))
    start = next((number for number, each in enumerate(same) if not each), min(len(whole), len(small)))
    more = len(whole) - len(small)
    where = f"line {whole[start].lineno}: {ast.unparse(whole[start])}" if start < len(whole) else "its end"
    if more <= 0:
        return "" if more == 0 and start == len(small) else where
    assigned = _assigned(whole)
    period = next((each for each in range(1, more + 1) if more % each == 0 and _repeats(whole, start, more, each)), 0)
    if not period:
        return where

    def as_first(one: str, two: str) -> bool:
        """A name of the last repetition that is left out stands for that of the first one, which is not."""
        number = assigned.get(one, -1)
        return start + more - period <= number < start + more and assigned.get(two) == number - more

    for one, two in zip(whole[start + more :], small[start:]):
        if not _Same(integers, as_first)(one, two):
            return f"line {one.lineno}: {ast.unparse(one)}"
    return ""


def _repeats(whole: list[ast.stmt], start: int, more: int, period: int) -> bool:
    """Whether each of `more` statements is the one `period` later, but for names made as much later, and weights."""
    assigned = _assigned(whole)
    weights: dict[str, str] = {}

    def later(one: str, two: str) -> bool:
        return assigned.get(two, -1) - assigned.get(one, -1) == period

    def shared(name: str) -> bool:
        return assigned.get(name, -1) < start

    if start + more + period > len(whole):
        return False
    same = _Same((), later, shared, weights)
    if not all(same(whole[number], whole[number + period]) for number in range(start, start + more)):
        return False
    own = {one for one, two in weights.items() if one != two}
    elsewhere = _weights([*whole[:start], *whole[start + more :]])
    return len(set(weights.values())) == len(weights) and own.isdisjoint(elsewhere)


def _weights(statements: list[ast.stmt]) -> set[str]:
    """What is read of the module."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {ast.unparse(node) for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript))}


def _assigned(statements: list[ast.stmt]) -> dict[str, int]:
    """In which statement each name is assigned first."""
    assigned: dict[str, int] = {}
    for number, statement in enumerate(statements):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assigned.setdefault(node.id, number)
    return assigned


def _methods(source: str) -> dict[str, ast.FunctionDef]:
    tree = syntax_tree(source)
    assert tree is not None  # it was imported
    (emitted,) = (each for each in tree.body if isinstance(each, ast.ClassDef))
    return {each.name: each for each in emitted.body if isinstance(each, ast.FunctionDef)}


def _statements(method: ast.FunctionDef) -> Iterator[ast.stmt]:
    """What a method computes: the check of its arguments and deletions are left out."""
    for statement in method.body:
        if not isinstance(statement, ast.Delete) and not ast.unparse(statement).startswith("self.check_arguments("):
            yield statement


class _Same:
    """Compares trees.

    Args:
        integers: pairs that stand for one another.
        renamed: whether one name stands for another.
        shared: whether a name stands for itself.
        weights: which weight (`self.`) stands for which, as far as it is known; None: each for itself.
    """

    def __init__(
        self,
        integers: Collection[tuple[int, int]],
        renamed: Callable[[str, str], bool] = lambda one, two: False,
        shared: Callable[[str], bool] = lambda name: True,
        weights: dict[str, str] | None = None,
    ) -> None:
        self.integers, self.renamed, self.shared, self.weights = integers, renamed, shared, weights

    def __call__(self, one: object, two: object) -> bool:
        if type(one) is not type(two):
            return False
        if isinstance(one, ast.Name) and isinstance(two, ast.Name):
            return (one.id == two.id and self.shared(one.id)) or self.renamed(one.id, two.id)
        if isinstance(one, (ast.Attribute, ast.Subscript)) and isinstance(two, (ast.Attribute, ast.Subscript)):
            texts = ast.unparse(one), ast.unparse(two)
            if self.weights is not None and texts[0].startswith("self.") and texts[1].startswith("self."):
                return self.weights.setdefault(*texts) == texts[1]
        if isinstance(one, ast.AST) and isinstance(two, ast.AST):
            return all(self(getattr(one, field, None), getattr(two, field, None)) for field in one._fields)
        if isinstance(one, list) and isinstance(two, list):
            one, two = ([each for each in x if not isinstance(each, ast.Delete)] for x in (one, two))
            return len(one) == len(two) and all(self(x, y) for x, y in zip(one, two))
        return one == two or (type(one) is int and (one, two) in self.integers)
