"""Loops over parameters, some of which are sharded: a repair for one parameter is wrong for another.

So the repair of a term that such a loop computes depends on the layout of the parameter:

    total = total + (spmd.all_reduce(p.sum(), "tp", dst=spmd.I) if spmd.spec_of(p).axis == "tp" else p.sum())

and the variable in which the loop accumulates is not changed: in the next iteration it has another type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ....spmd.axes import DATA_ATOMS
from ....spmd.types import PARTIAL_NORM, SAME, I, P, R, Shard, SpmdType
from .provenance import Named, Site, value_of
from .syntax import ancestors
from .trials import JudgedCall, Repair, call_of, edit_of, written

__all__ = ["ParameterLoop", "changes_with_the_turn", "loop_repairs", "parameter_loop"]

_LOOPS = (ast.For, ast.GeneratorExp, ast.ListComp)


class ParameterLoop(NamedTuple):
    """A loop, or a comprehension, over parameters.

    Attributes:
        parameter: name of the loop variable.
        assigned: names that the body assigns.
    """

    parameter: str
    assigned: frozenset[str]

    def chosen(self, code: str, otherwise: str, axis: str) -> str:
        """`code` for parameters that are sharded over the axis, else `otherwise`; in parentheses."""
        return f'({code} if spmd.spec_of({self.parameter}).axis == "{axis}" else {otherwise})'

    def varies(self, node: ast.AST | None) -> bool:
        """Returns whether the value of an expression depends on the parameter."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if node is not None else set()
        return self.parameter in names or bool(names & self.assigned)

    def general(self, code: str, node: ast.AST | None, spmd_type: SpmdType | None) -> str:
        """`code` with the sharded dim of the loop's parameter in place of a number, where `node` is the parameter."""
        if not isinstance(spmd_type, Shard) or not isinstance(node, ast.Name) or node.id != self.parameter:
            return code
        return code.replace(f"src={written(spmd_type)}", f"src=spmd.S(spmd.spec_of({self.parameter}).dim)")


def parameter_loop(here: Site | None, axis: str, node: ast.AST | None = None) -> ParameterLoop | None:
    """The innermost loop over parameters around this expression, or around another `node` of its function.

    None for an axis of the data, over which no layer is sharded.
    """
    if axis in DATA_ATOMS:
        return None
    node = node or (here.node if here is not None else None)
    if here is None or node is None:
        return None
    for loop in _loops_around(here, node):
        parameter = _parameter_of(loop, here)
        if parameter:
            names = (name for name in ast.walk(loop) if isinstance(name, ast.Name))
            assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            return ParameterLoop(parameter, frozenset(assigned - {parameter}))
    return None


def changes_with_the_turn(here: Site | None, node: ast.AST | None) -> bool:
    """Returns whether an expression uses the variable of an enclosing loop, so that it changes per iteration."""
    if here is None or node is None:
        return False
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    for loop in _loops_around(here, node):
        target = loop.target if isinstance(loop, ast.For) else loop.generators[0].target
        if names & {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}:
            return True
    return False


def _loops_around(here: Site, node: ast.AST) -> Iterator[Any]:
    """Yields the loops and comprehensions around a node, the innermost first."""
    return (outer for outer in (node, *ancestors(here.source, node)) if isinstance(outer, _LOOPS))


def _parameter_of(loop: Any, here: Site) -> str:
    """The variable of a loop over parameters; "" for other loops."""
    generator = loop if isinstance(loop, ast.For) else loop.generators[0]
    names = [name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name)]
    for name in names:
        if isinstance(here.frame.f_locals.get(name), nn.Parameter):
            return name
    iterated = generator.iter
    items = [value_of(item, here.frame) for item in iterated.elts] if isinstance(iterated, (ast.Tuple, ast.List)) else (
        value_of(iterated, here.frame)
    )  # fmt: skip
    of_parameters = isinstance(items, (list, tuple)) and any(isinstance(item, nn.Parameter) for item in items)
    return names[-1] if names and (of_parameters or "parameters(" in here.text(iterated)) else ""


def loop_repairs(axis: str, call: JudgedCall, names: Sequence[Named], here: Site | None) -> Iterator[Repair]:
    """Repairs of a call on partial sums and whole values that a loop over parameters made."""
    types = [operand.type.get(axis) for operand in call.operands[: len(call.tensors)]]
    whole = [spmd_type for spmd_type in types if spmd_type is not None and spmd_type.letter in SAME]
    of_norms = PARTIAL_NORM in types
    if here is None or not (of_norms or P in types) or not whole:
        return
    dst = R if whole[0] is R else I
    for term in _terms(here):
        loop = parameter_loop(here, axis, term)
        if loop is None:
            continue
        text = here.text(term)
        summed = call_of("all_reduce", f"{text}.square()" if of_norms else text, axis, None, dst)
        code = loop.chosen(f"{summed}.sqrt()" if of_norms else summed, text, axis)
        words = ": the loop goes over parameters that are sharded, whose terms are partial sums, and ones that are not"
        yield Repair(code + words, edit_of(here, term, code))
        if ".grad" in text:
            yield Repair("nxd.clip_grad_norm(parameters, max_norm), which counts every element of the model once")
        return


def _terms(here: Site) -> Iterator[ast.AST]:
    """The expressions that may be the term that a loop computes for a parameter."""
    node = here.node
    statement = here.statement()
    if isinstance(node, ast.Call):  # sum(f(p) for p in ...), torch.stack([f(p) for p in ...])
        yield from (argument.elt for argument in node.args if isinstance(argument, (ast.GeneratorExp, ast.ListComp)))
    else:  # total = total + f(p), total += f(p)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        accumulated = {target.id for target in targets if isinstance(target, ast.Name)}
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [getattr(node, "value", None)]
        terms = [part for part in parts if part is not None and getattr(part, "id", "") not in accumulated]
        if accumulated and len(terms) == 1:
            yield terms[0]
