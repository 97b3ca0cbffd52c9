"""What to write instead: repairs of a call that the types forbid, found by trying.

For each operand that a violation is about, every operator that takes it elsewhere is tried: the call is judged again
with the type and the shape that the operator would give, and what is then legal is offered. All of these keep the
global value, so that a repair is right wherever the declared types are; the order is by what people most often forgot:
a reduction before everything else, and nothing that would hide that it is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ....spmd.errors import Violation
from ....spmd.types import SAME, P, R, Shard, SpmdType, V
from .provenance import Named, Site
from .rewrites import SPECIAL, declared, local_code, otherwise
from .trials import LAST, Change, Edit, JudgedCall, Repair, call_of, changes_of, edit_of, legal, route, size_of, written

__all__ = ["find_repairs", "operator_repairs"]

MOST = 4  # repairs that a message shows
GATHERED = 17  # the order behind gathers, and before exchanges


def find_repairs(
    mode: Any, violation: Violation, call: JudgedCall, names: Sequence[Named], here: Site | None
) -> list[Repair]:
    """Repairs of a call, best first."""
    axis, rule = violation.axis, violation.rule
    size = size_of(mode, axis)
    special = SPECIAL.get(rule)
    repairs: list[Repair] = list(special(mode, violation, call, names, here, size)) if special is not None else []
    if rule == "no_type":
        return declared(call, axis, violation, names, here)[:MOST]
    tried: list[tuple[float, Repair]] = []
    singles: dict[int, list[Change]] = {}
    for index in _involved(call, violation):
        changes = list(changes_of(call, index, axis, size, names[index], mode.level))
        singles[index] = changes
        for change in changes:
            if legal(call, axis, {index: change}):
                tried.append((change.order, _repeated(call, index, change, names, here)))
    if not tried:
        for one, two in ((a, b) for a in singles for b in singles if a < b):
            for first in singles[one]:
                for second in singles[two]:
                    alike = first.type.letter == second.type.letter and first.order + second.order < 2 * LAST
                    if alike and legal(call, axis, {one: first, two: second}):
                        both = [_as_repair(c, [names[i]], here) for c, i in ((first, one), (second, two))]
                        text = " and ".join(both)
                        tried.append((first.order + second.order, Repair(text, *both[0].edits, *both[1].edits)))
    if not tried and not repairs:  # as it is nothing fits: it is not the only thing that is missing
        for changes in singles.values():
            for change in changes:
                if "all_gather" in change.code or "reduce" in change.code:
                    shape = list(change.shape)
                    tried.append((change.order, Repair(f"{change.code}: gives {shape}, to which the others must fit")))
    tried += [(GATHERED, repair) for repair in local_code(violation, call)]
    tried += [(LAST - 1, repair) for repair in otherwise(mode, violation, call, names)]
    tried.sort(key=lambda pair: pair[0])
    for _, repair in tried:
        if repair not in repairs:
            repairs.append(repair)
    return repairs[:MOST]


def _involved(call: JudgedCall, violation: Violation) -> list[int]:
    """Operands to change: those that it is about, then the others; each tensor once."""
    order = [*violation.operands, *range(len(call.tensors))]
    indices: list[int] = []
    for index in order:
        if index == call.rule.inplace and index not in violation.operands[:1]:
            continue
        if index < len(call.tensors) and not any(call.tensors[index] is call.tensors[i] for i in indices):
            indices.append(index)
    return indices


def _as_repair(change: Change, names: Sequence[Named], here: Site | None) -> Repair:
    code = change.code.partition("): ")[0] + ")" if "): " in change.code else change.code
    return Repair(change.code, *(edit_of(here, name.node, code) for name in names))


def _repeated(call: JudgedCall, index: int, change: Change, names: Sequence[Named], here: Site | None) -> Repair:
    """The repair of an operand that may be there several times (`y * y`): then on a line before."""
    name = names[index]
    if sum(x is call.tensors[index] for x in call.tensors) == 1 or not name.code.isidentifier():
        return _as_repair(change, [name], here)
    statement = here.statement() if here is not None else None
    if here is None or statement is None:
        return Repair(f"{name.code} = {change.code}")
    start = statement.lineno, statement.col_offset
    return Repair(f"{name.code} = {change.code}", Edit(here.file, start, start, f"{name.code} = {change.code}; "))


def operator_repairs(
    name: str, actual: SpmdType, axis: str, dst: SpmdType | None, operand: Named, here: Site | None, rule: str
) -> list[Repair]:
    """Repairs of an operator, or a plain verb, on a tensor that is not what it takes."""
    code, verb = operand.code or "x", name.startswith("comm.")
    node = here.node if here is not None else None
    replaceable = isinstance(node, ast.Call) and operand.node is not None and operand.node in node.args
    replaced = node if replaceable else None
    repairs: list[Repair] = []

    def offer(text: str, words: str = "") -> None:
        repairs.append(Repair(text + words, edit_of(here, replaced, text)))

    base = name.removeprefix("comm.")
    if actual.scale and actual is not P("avg"):
        offer(f'{code} {"/" if actual.scale > 0 else "*"} comm.size("{axis}")')
    if rule == "stride" and isinstance(actual, Shard):
        d, n = actual.dim, actual.stride
        offer(f'torch.cat([spmd.all_gather(part, "{axis}", src=spmd.S({d}), dst={written(dst)}) for part in '
              f"{code}.chunk({n}, {d})], {d})")  # fmt: skip
        return repairs
    if rule == "foreign":
        mask = "((ids < first) | (ids >= first + count))"
        words = ", where this rank holds the positions from first to first + count"
        return [Repair(f"{code}.masked_fill({mask}.unsqueeze(-1), 0) before it{words}")]
    if verb:
        if actual.letter in SAME and base in ("all_reduce", "reduce_scatter"):
            offer(code, ": it is the same on all ranks already, drop this one")
        elif actual.letter == "P" and base != "all_reduce":
            op = "" if actual.reduction == "sum" else f', op="{actual.reduction}"'
            offer(f'comm.all_reduce({code}, "{axis}"{op})')
        elif isinstance(actual, Shard):
            offer(f'comm.all_gather({code}, "{axis}", dim={actual.dim})')
        elif actual.letter == "P" and base == "all_reduce":
            offer(f'comm.all_reduce({code}, "{axis}", op="{actual.reduction}")')
        return repairs
    if dst is None:
        return repairs
    if actual.letter == dst.letter and actual == dst:
        offer(code, f": it is {actual} already, drop this one")
        return repairs
    if base in ("all_reduce", "reduce_scatter") and actual.letter in SAME and dst.letter in SAME:
        offer(code, f": it is the same on all ranks already, drop this one (its gradient is that of {actual})")
    path = route(actual, dst)
    if path is not None:
        operator, expert = path
        src = None if actual is P else actual
        offer(call_of(operator, code, axis, src, dst, expert))
    if actual is P and dst.letter not in SAME:
        offer(call_of("all_reduce", code, axis, None, R))
    if actual is V:
        repairs.append(
            Repair(call_of("reinterpret", code, axis, V, P) + ": if the ranks hold summands; then reduce it")
        )
    if isinstance(actual, Shard) and base in ("all_reduce", "reduce_scatter"):
        repairs.append(Repair(f'spmd.forget({code}, "{axis}"): if the pieces themselves are to be added up'))
    return repairs[:MOST]
