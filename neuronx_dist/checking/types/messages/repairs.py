"""Repairs of a call that the types forbid, found by trying.

For each operand of a violation, every operator that changes its type is tried: the call is judged again with the
resulting type and shape, and operators that make the call legal are suggested. They do not change the global value, so
that a repair is right if the declared types are right. The most frequent mistakes come first: a reduction before all
others, and no repair that would hide a missing one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....call_site import line_of
from ....spmd.errors import Violation
from ....spmd.tensor_type import Origin
from ....spmd.types import SAME, I, P, R, Shard, SpmdType, V
from ..piece_order import Jumbled, ordered
from .loops import ParameterLoop, changes_with_the_turn, loop_repairs, parameter_loop
from .provenance import Named, Site, value_of
from .rewrites import SPECIAL, clipping, declared, local_code, origin_repair, otherwise, seeds
from .trials import (
    LAST,
    Change,
    Edit,
    JudgedCall,
    Repair,
    atom_of,
    blocks_gathered,
    call_of,
    changes_of,
    edit_of,
    legal,
    out_of_reach,
    route,
    size_of,
)

__all__ = ["Operation", "find_repairs", "operator_repairs"]

MOST = 4  # repairs that a message shows
GATHERED = 17  # the order behind gathers, and before exchanges


class _Expression(NamedTuple):
    """The call to be repaired, in the user's source.

    `loop`: the loop over parameters around the call; its repairs must be right for each parameter.
    """

    call: JudgedCall
    axis: str
    names: Sequence[Named]
    here: Site | None
    loop: ParameterLoop | None

    def accumulates(self, index: int) -> bool:
        """Returns whether a loop accumulates in an operand, which then has another type in the next iteration."""
        node = self.names[index].node
        return self.loop is not None and isinstance(node, ast.Name) and node.id in self.loop.assigned

    def repair(self, index: int, change: Change) -> Repair:
        """The repair for a change of an operand; a change of the meaning has no edit."""
        name, code = self.names[index], change.code
        repeated = sum(x is self.call.tensors[index] for x in self.call.tensors) > 1 and name.code.isidentifier()
        statement = self.here.statement() if self.here is not None and repeated else None
        if self.loop is not None and self.loop.varies(name.node):
            code = self.loop.general(code, name.node, self.call.operands[index].type.get(self.axis))
            code = self.loop.chosen(code, name.code, self.axis)
        if repeated:  # `y * y`: on a line before
            code = f"{name.code} = {code}"
        if change.order >= LAST:
            return Repair(code + change.words)
        if statement is not None and self.here is not None:
            start = statement.lineno, statement.col_offset
            edit = Edit(self.here.file, start, start, f"{code}; ") if self.here.editable else None
            return Repair(code + change.words, edit)
        return Repair(code + change.words, edit_of(self.here, name.node, code) if not repeated else None)


def find_repairs(
    mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named], here: Site | None
) -> list[Repair]:
    """Repairs of a call, best first."""
    axis, rule = violation.axis, violation.rule
    size = size_of(mode, axis)
    if clipped := clipping(here):
        return clipped
    if reseeded := seeds(call, axis):
        return reseeded
    if rule == "no_type":
        return declared(call, axis, violation, names, here)[:MOST]
    if rule == "jumbled":
        index = violation.operands[0]
        spmd_type = call.operands[index].type.get(axis)
        text = ordered(names[index].code, spmd_type) if isinstance(spmd_type, Jumbled) else ""
        return [Repair(text, edit_of(here, names[index].node, text))] if text else []
    special, expression = SPECIAL.get(rule), _Expression(call, axis, names, here, parameter_loop(here, axis))
    repairs = list(loop_repairs(axis, call, names, here))
    looped = bool(repairs)
    if special is not None and not looped:
        repairs += special(mode, violation, call, names, here, size)
    tried: list[tuple[float, Repair]] = []
    singles: dict[int, list[Change]] = {}
    for index in _involved(call, violation, names, here):
        changes = list(changes_of(call, index, axis, size, names[index], mode.level))
        singles[index] = [] if expression.accumulates(index) else changes
        for change in singles[index]:
            if legal(call, axis, {index: change}):
                tried.append((change.order, expression.repair(index, change)))
    if not looped and all(order >= LAST for order, _ in tried):
        for one, two in ((a, b) for a in singles for b in singles if a < b):
            for first in singles[one]:
                for second in singles[two]:
                    same_letter = first.type.letter == second.type.letter and first.order + second.order < 2 * LAST
                    if same_letter and legal(call, axis, {one: first, two: second}):
                        both = expression.repair(one, first), expression.repair(two, second)
                        edits = [*both[0].edits, *both[1].edits] if both[0].edits and both[1].edits else []
                        order = first.order + second.order
                        order -= 4 * (first.type is second.type is I)  # nothing is left beside them that varies
                        tried.append((order, Repair(" and ".join(both), *edits)))
    if not tried and not repairs:  # no single change is legal: something else is missing too
        for index, changes in singles.items():
            for change in changes:
                if change.shape != tuple(call.tensors[index].shape) and "_gather" in change.code:
                    shape = list(change.shape)
                    tried.append((change.order, Repair(f"{change.code}: gives {shape}, to which the others must fit")))
                elif change.shape == tuple(call.tensors[index].shape) and "comm.size" in change.code:
                    tried.append((change.order, expression.repair(index, change)))
    tried += [(GATHERED, repair) for repair in local_code(violation, call, names)]
    tried += [(LAST - 1, repair) for repair in otherwise(mode, violation, call, names)]
    tried.sort(key=lambda pair: pair[0])
    for _, repair in tried:
        if not any(known.startswith(repair) for known in repairs):
            repairs.append(repair)
    return repairs[:MOST]


def _involved(call: JudgedCall, violation: Violation, names: Sequence[Named], here: Site | None) -> list[int]:
    """Indices of operands to change: those of the violation, then the others; each tensor once."""
    order = [*violation.operands, *range(len(call.tensors))]
    indices: list[int] = []
    for index in order:
        if index == call.rule.inplace and index not in violation.operands[:1]:
            continue
        if index < len(call.tensors) and out_of_reach(call.tensors[index], names[index], here):
            continue
        if index < len(call.tensors) and not any(call.tensors[index] is call.tensors[i] for i in indices):
            indices.append(index)
    return indices


class Operation(NamedTuple):
    """An operator of `spmd`, or a plain verb of `comm`, on a tensor of a type that it does not take.

    Attributes:
        name: "all_reduce", "comm.all_gather".
        actual: type of the tensor on the axis.
        takes, gives: types of the operand and of the result; None: the verb states none.
        differentiable: whether the tensor receives a gradient, which plain verbs do not pass back.
        pending: other axes on which the tensor is a partial sum.
        origin: where its type on the axis began; None: unknown.
    """

    name: str
    actual: SpmdType
    axis: str
    takes: SpmdType | None
    gives: SpmdType | None
    differentiable: bool
    pending: tuple[str, ...] = ()
    origin: Origin | None = None


def operator_repairs(operation: Operation, operand: Named, here: Site | None, rule: str) -> list[Repair]:
    """Repairs of an operator or a plain verb: another operator, or another argument."""
    code, actual, axis = operand.code, operation.actual, operation.axis
    node, loop = here.node if here is not None else None, parameter_loop(here, axis)
    direct = isinstance(node, ast.Call) and operand.node is not None and operand.node in node.args
    inside = here is not None and here.called is not None and operation.name.startswith("comm.")
    repairs: list[Repair] = []

    def offer(text: str, words: str = "") -> None:
        whole_call, text, words = _dropped(here, node, axis, text, words) if text == code else (node, text, words)
        if whole_call is None:
            repairs.append(Repair(text + words))
            return
        if loop is not None and loop.varies(operand.node) and here is not None:
            whole = actual.letter in SAME
            text = loop.general(text, operand.node, actual)
            text = loop.chosen(here.text(node), text, axis) if whole else loop.chosen(text, code, axis)
            words = f": it is {actual} for this parameter, and another type for others"
        elif text == code and changes_with_the_turn(here, operand.node):
            # Another turn may need it: without it that turn would be refused, and the repairs would alternate.
            repairs.append(Repair(f"{text}{words}, if it is in every iteration; otherwise make the types equal first"))
            return
        replaced = operand.node if inside else whole_call if direct else None
        repairs.append(Repair(text + words, edit_of(here, replaced, text)))

    base = operation.name.removeprefix("comm.")
    if actual.scale and actual is not P("avg"):
        offer(f'{atom_of(code)} {"/" if actual.scale > 0 else "*"} comm.size("{axis}")')
    if (
        here is not None
        and inside
        and actual.letter in SAME
        and "reduce_gradients" in here.text(getattr(node, "func", None))
    ):
        return [Repair(f"one of both reductions: this gradient is reduced over {axis} before {here.text(node)}")]
    if inside:  # a layer's verb: the repair is a change of the layer's argument
        path = route(actual, operation.takes) if operation.takes is not None else None
        if path is not None:
            src = None if actual is P else actual
            offer(call_of(path[0], code, axis, src, operation.takes, path[1]), ": that is what it takes")
        elif isinstance(actual, Shard) and actual.stride > 1 and operation.takes is not None:
            whole = blocks_gathered(operand, axis, actual, I)
            offer(call_of("convert", whole, axis, I, operation.takes), ": that is what it takes")
        return repairs
    if rule == "stride" and isinstance(actual, Shard):
        offer(blocks_gathered(operand, axis, actual, operation.gives))
        return repairs
    if rule == "dealt" and isinstance(actual, Shard):
        text = call_of("all_gather", code, axis, Shard(actual.dim), R)
        return [Repair(f"{text}, and its pieces put in order, instead of it")]
    if rule == "foreign":
        mask = "((ids < first) | (ids >= first + count))"
        words = ", where this rank holds the positions from first to first + count"
        return [Repair(f"{code}.masked_fill({mask}.unsqueeze(-1), 0) before it{words}")]
    if base == "convert" and here is not None and here.called is not None and operation.gives == actual:
        function = isinstance(node, ast.Call) and inspect.isfunction(value_of(node.func, here.frame))
        if not function:  # a layer that takes its part of its argument
            made_r = operation.origin if actual is R and operation.takes is I else None
            if made_r is not None and (repair := origin_repair(made_r, I)) is not None:
                return [repair]
            return [Repair("input_is_parallel=True on the layer, whose input is already its part")]
    if base != operation.name:
        if base in ("all_reduce", "reduce_scatter") and actual.letter not in "PV" and operation.pending:
            group = ", ".join(f'"{other}"' for other in operation.pending)
            group = group if len(operation.pending) == 1 else f"({group})"
            edit = edit_of(here, node.args[1], group) if isinstance(node, ast.Call) and len(node.args) > 1 else None
            it = f"over {' and '.join(operation.pending)} it is not reduced yet, over {axis} it is {actual}"
            return [Repair(f"comm.{base}({code}, {group}): {it}", edit)]
        if isinstance(actual, Shard) and loop is not None and base == "all_reduce" and code.endswith(".grad"):
            text = loop.chosen(code, here.text(node) if here is not None else code, axis)
            words = f": the gradient of a shard is complete on {axis}"
            return [Repair(text + words, edit_of(here, node if direct else None, text))]
        _of_verb(operation, base, code, offer)
        return repairs
    dst = operation.gives
    if dst is None:
        return repairs
    if actual == dst:
        offer(code, f": it is {actual} already, drop this one")
        return repairs
    path = route(actual, dst)
    if path is not None:
        operator, expert = path
        src = None if actual is P else actual
        offer(call_of(operator, code, axis, src, dst, expert))
    if base in ("all_reduce", "reduce_scatter") and actual.letter in SAME and dst.letter in SAME:
        offer(code, f": it is the same on all ranks already, drop this one (its gradient is that of {actual})")
    if actual is P and dst.letter not in SAME:
        offer(call_of("all_reduce", code, axis, None, R))
    if actual is P and base == "all_to_all" and isinstance(operation.takes, Shard):
        text = f'spmd.local_map(function, out_types={{"{axis}": spmd.{operation.takes}}})'
        repairs.append(Repair(f"{text} around what makes it, if each rank sends what it makes of its own rows"))
    if actual is V:
        repairs.append(
            Repair(call_of("reinterpret", code, axis, V, P) + ": if the ranks hold summands; then reduce it")
        )
    if isinstance(actual, Shard) and base in ("all_reduce", "reduce_scatter"):
        repairs.append(Repair(f'spmd.forget({code}, "{axis}"): if the pieces themselves are to be added up'))
    return repairs[:MOST]


def _dropped(here: Site | None, node: ast.AST | None, axis: str, code: str, words: str) -> tuple[Any, str, str]:
    """Returns what a dropped reduction leaves: the expression that goes, its text, and the words of the repair.

    The division by the size of the axis goes with the sum. No expression (None), where the line is that of a function
    that other calls need: the call is to be dropped.
    """
    if here is None or node is None:
        return node, code, words
    caller = here.frame.f_back
    function = here.frame.f_code
    arguments = function.co_varnames[: function.co_argcount]
    if code in arguments and caller is not None and here.calls_of(function.co_name) > 1:
        return None, code, f"{words}: leave out the call of {function.co_name} at {line_of(caller)}"
    mean = here.enclosing_division()
    if mean is not None and "size(" in here.text(mean.right):
        return mean, code, f"{words}, with the division"
    return node, code, words


def _of_verb(operation: Operation, verb: str, code: str, offer: Callable[..., None]) -> None:
    """Repairs of a plain verb: verbs, or operators with a derivative where a gradient is computed."""
    actual, axis = operation.actual, operation.axis
    if actual.letter in SAME:
        offer(code, ": it is the same on all ranks already, drop this one")
    elif actual is P and operation.differentiable:
        offer(call_of("all_reduce", code, axis, None, R))
    elif actual.letter == "P":
        op = "" if actual.reduction == "sum" else f', op="{actual.reduction}"'
        offer(f'comm.all_reduce({code}, "{axis}"{op})')
    elif isinstance(actual, Shard) and operation.differentiable:
        offer(call_of("all_gather", code, axis, actual, R))
    elif isinstance(actual, Shard):
        offer(f'comm.all_gather({code}, "{axis}", dim={actual.dim})')
