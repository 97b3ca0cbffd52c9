"""Loops over parameters of which some are sharded: what repairs the line for one of them is wrong for another.

So a repair of what such a loop computes of its parameter asks for the layout of that one:

    total = total + (spmd.all_reduce(p.sum(), "tp", dst=spmd.I) if spmd.spec_of(p).axis == "tp" else p.sum())

and what the loop accumulates in is left alone: at the next turn it has another type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ....spmd.axes import DATA_ATOMS
from ....spmd.tensor_type import Origin, origins_of
from ....spmd.types import SAME, I, P, R, Shard, SpmdType
from .provenance import Named, Site, value_of
from .syntax import syntax_tree
from .trials import JudgedCall, Repair, call_of, edit_of, written

__all__ = ["ParameterLoop", "changes_with_the_turn", "loop_repairs", "parameter_loop"]

_LOOPS = (ast.For, ast.GeneratorExp, ast.ListComp)


class ParameterLoop(NamedTuple):
    """A loop, or a comprehension, over parameters.

    Attributes:
        parameter: the name that it gives to each.
        assigned: names that its body assigns.
    """

    parameter: str
    assigned: frozenset[str]

    def chosen(self, code: str, otherwise: str, axis: str) -> str:
        """`code` for parameters that are sharded over the axis, else `otherwise`; in parentheses."""
        return f'({code} if spmd.spec_of({self.parameter}).axis == "{axis}" else {otherwise})'

    def varies(self, node: ast.AST | None) -> bool:
        """Whether an expression is another one for each parameter."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if node is not None else set()
        return self.parameter in names or bool(names & self.assigned)

    def general(self, code: str, node: ast.AST | None, spmd_type: SpmdType | None) -> str:
        """`code` with the sharded dim of the parameter at hand, where it is about the parameter itself."""
        if not isinstance(spmd_type, Shard) or not isinstance(node, ast.Name) or node.id != self.parameter:
            return code
        return code.replace(f"src={written(spmd_type)}", f"src=spmd.S(spmd.spec_of({self.parameter}).dim)")


def parameter_loop(here: Site | None, axis: str, node: ast.AST | None = None) -> ParameterLoop | None:
    """The innermost loop over parameters around the expression here, or around another `node` of its function.

    None on an axis of the data, over which layers do not shard: all parameters are alike there.
    """
    if axis in DATA_ATOMS:
        return None
    node = node or (here.node if here is not None else None)
    tree = syntax_tree(here.source) if here is not None else None
    if here is None or node is None or tree is None:
        return None
    around = [each for each in ast.walk(tree) if isinstance(each, _LOOPS) and node in ast.walk(each)]
    for loop in reversed(around):  # the innermost comes last
        parameter = _parameter_of(loop, here)
        if parameter:
            names = (name for name in ast.walk(loop) if isinstance(name, ast.Name))
            assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            return ParameterLoop(parameter, frozenset(assigned - {parameter}))
    return None


def changes_with_the_turn(here: Site | None, node: ast.AST | None) -> bool:
    """Whether an expression is about what a loop around it goes over: another layer, say, at the next turn."""
    tree = syntax_tree(here.source) if here is not None else None
    if here is None or node is None or tree is None:
        return False
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    for loop in (each for each in ast.walk(tree) if isinstance(each, _LOOPS) and node in ast.walk(each)):
        target = loop.target if isinstance(loop, ast.For) else loop.generators[0].target
        if names & {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}:
            return True
    return False


def _parameter_of(loop: Any, here: Site) -> str:
    """The name that a loop gives to parameters; "" if it goes over something else."""
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
    if here is None or P not in types or not whole:
        return
    dst = R if whole[0] is R else I
    for term in _terms(axis, call, names, here):
        loop = parameter_loop(here, axis, term)
        if loop is None:
            continue
        text = here.text(term)
        code = loop.chosen(call_of("all_reduce", text, axis, None, dst), text, axis)
        words = ": the loop goes over parameters that are sharded, whose terms are partial sums, and ones that are not"
        yield Repair(code + words, edit_of(here, term, code))
        if ".grad" in text:
            yield Repair("nxd.clip_grad_norm(parameters, max_norm), which counts every element of the model once")
        return


def _terms(axis: str, call: JudgedCall, names: Sequence[Named], here: Site) -> Iterator[ast.AST]:
    """The expressions that may be what a loop computes of each parameter."""
    node = here.node
    statement = here.statement()
    if isinstance(node, ast.Call):  # sum(f(p) for p in ...), torch.stack([f(p) for p in ...])
        yield from (argument.elt for argument in node.args if isinstance(argument, (ast.GeneratorExp, ast.ListComp)))
    else:  # total = total + f(p), total += f(p)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        accumulated = {target.id for target in targets if isinstance(target, ast.Name)}
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [getattr(node, "value", None)]
        own = [part for part in parts if part is not None and getattr(part, "id", "") not in accumulated]
        if accumulated and len(own) == 1:
            yield own[0]
    for x, operand, name in zip(call.tensors, call.operands, names):  # what was appended to a list, where it was made
        origin = origins_of(x).get(axis) if operand.type.get(axis) is P and name.node is None else None
        if origin is not None:
            yield from _expressions_at(origin, here)


def _expressions_at(origin: Origin, here: Site) -> Iterator[ast.AST]:
    """The one expression of the user's function in which a type began, by the name of the function it called."""
    file, _, line = origin.where.rpartition(":")
    function = origin.what.rpartition(" in ")[2]
    tree = syntax_tree(here.source) if file == here.file else None
    calls = [
        node
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.Call) and str(node.lineno) == line and getattr(node.func, "attr", "") == function
    ]
    yield from calls[:1] if len(calls) == 1 else ()
