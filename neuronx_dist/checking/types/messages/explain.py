"""Errors in the user's words, from violations: the call, the reason, the origin, and repairs (`repairs.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....call_site import call_site
from ....rules import RULES
from ....spmd.errors import SpmdTypeError, Violation
from ....spmd.tensor_type import EQUAL, Note, TensorType, note_of, type_of
from ....spmd.types import DIFFERING, SAME, VARYING, I, P, R, Shard, SpmdType, V
from ..judge import Operand, judge
from ..session import Session
from .provenance import Named, leaf_of, module_path, name_of, name_operands, site
from .repairs import Operation, find_repairs, operator_repairs
from .rewrites import fitting_sizes
from .trials import (
    JudgedCall,
    Repair,
    call_of,
    changes_of,
    contracted,
    edit_of,
    legal,
    misfit,
    on_meta,
    out_of_reach,
    route,
    size_of,
    unreduced,
)

__all__ = [
    "JudgedCall",
    "data_error",
    "explain",
    "explain_shapes",
    "gradient_error",
    "location",
    "missing_type",
    "operator_error",
    "shown",
    "since",
    "write_error",
]


def shown(x: Tensor, type_: TensorType | None, name: str | None = None) -> str:
    """A tensor as text: `weight [64, 16] {tp: S(0)}`."""
    name = name_of(x) if name is None else name
    types = "" if type_ is None else " " + "{" + ", ".join(f"{axis}: {spmd_type}" for axis, spmd_type in type_) + "}"
    return f"{name + ' ' if name else ''}{list(x.shape)}{types}"


def location(mode: Session) -> str:
    """The module that is running, and the user's line."""
    return ", ".join(part for part in (module_path(mode.modules), call_site()) if part)


def since(x: Tensor, name: str, axis: str, note: Note | None = None) -> list[str]:
    """The origin of a tensor's type on an axis, as one line; no line if it is unknown."""
    note = note or note_of(x)
    spmd_type = note.type.get(axis) if note is not None else None
    if note is None or spmd_type is None:
        return []
    origin = (note.origins or {}).get(axis)
    label = name or "it"
    if origin is not None and origin.letter == spmd_type.letter:
        return [f"{label} is {spmd_type} on {axis} since {origin}"]
    if spmd_type.letter not in VARYING or isinstance(x, nn.Parameter):
        return []

    def varies(leaf: Tensor) -> bool:
        leaf_type = type_of(leaf)
        spmd_type = leaf_type.get(axis) if leaf_type is not None else None
        return spmd_type is not None and spmd_type.letter in VARYING

    if spmd_type.letter == "V" and unreduced(x, axis):
        product = "comes from a product of two tensors that vary: if these are pieces of the dim that is summed over"
        return [f"{label} is V on {axis}, and {product}, it is an unreduced sum"]
    leaf = leaf_of(x, varies)
    if leaf is None:
        return []
    leaf_type = type_of(leaf)
    assert leaf_type is not None
    through = f"{shown(leaf, None)} {{{axis}: {leaf_type.get(axis)}}}"
    return [f"{label} is {spmd_type} on {axis} through {through}"]


def explain(mode: Session, violation: Violation, call: JudgedCall) -> SpmdTypeError:
    """The error for a violation."""
    if mode.probing:  # its text is not read
        return SpmdTypeError(call.rule.name, violation.why, axis=violation.axis, rule=violation.rule)
    here = site()
    names = name_operands(call.tensors, here)
    if misfit(call, *on_meta(call)) is not None:
        shape_error = explain_shapes(mode, call)
        if shape_error is not None:
            return shape_error
    if violation.rule == "invariant":  # a violation that does not depend on gradients is more precise
        violation = _beneath(violation, call)
    axis = violation.axis
    types = [operand.type for operand in call.operands]
    listed = _listed(call, names)
    subjects, lines = [], []
    for index in _of_each_type(violation, call):
        if index >= len(call.tensors):
            subjects.append(f"the random numbers that it draws are {types[index].get(axis)}" if call.rule.random
                            else f"a number in it differs by rank, {types[index].get(axis)}")  # fmt: skip
            continue
        label = names[index].label or f"operand {index}"
        subject = f"{label} is {types[index].get(axis)}"
        if subject not in subjects:
            subjects.append(subject)
            lines += since(call.tensors[index], label, axis)
    why = violation.why
    known = call.rule.spec is not None or call.function in RULES
    if not known and call.rule.kind == "op" and violation.rule.startswith("partial"):
        why = f"no rule says that {call.rule.name} is linear, and of a partial sum nothing else may be taken"
    elif violation.rule == "invariant" and contracted(call, axis):
        why = f"{call.rule.name} multiplies and sums what varies: if that is over a sharded dim, the sum is partial, "
        why += "and what is added to it is added once for each rank"
    elif call.affine and call.rule.linear and violation.rule == "partial_nonlinear":
        why = "adding a constant to a partial sum adds it once for each rank"
    subject_text = f" {' and '.join(subjects)}" if subjects and violation.rule != "no_type" else ""
    if violation.rule == "no_type" and why.startswith("it "):
        why = names[violation.operands[0]].label + why[2:]
    return SpmdTypeError(
        f"{call.rule.name}({listed}) at {location(mode)}",
        f"on {axis}{subject_text}: {why}" if subject_text else f"on {axis}: {why}",
        where_from=lines,
        repairs=find_repairs(mode, violation, call, names, here),
        axis=axis,
        rule=violation.rule,
        operands=violation.operands,
        types=types,
    )


_MANY = 6  # operands to list at most (a stack of all norms has more)


def _listed(call: JudgedCall, names: Sequence[Named]) -> str:
    shown_ones = [shown(x, o.type, n.label) for x, o, n in zip(call.tensors, call.operands, names)]
    rest = [f"and {len(shown_ones) - _MANY} more"] if len(shown_ones) > _MANY else []
    return ", ".join([*shown_ones[:_MANY], *rest])


def _of_each_type(violation: Violation, call: JudgedCall) -> Sequence[int]:
    """The operands of a violation; if there are many, the first operand of each type."""
    if len(violation.operands) <= _MANY:
        return violation.operands
    types = {index: call.operands[index].type.get(violation.axis) for index in reversed(violation.operands)}
    return sorted({spmd_type: index for index, spmd_type in types.items()}.values())


def _beneath(violation: Violation, call: JudgedCall) -> Violation:
    """The violation of the call with gradients off, if there is one; else `violation`."""
    axis = violation.axis
    operands = [
        Operand(TensorType.of({axis: R if spmd_type.letter == "I" else spmd_type}), False)
        for spmd_type in (operand.type.get(axis) or R for operand in call.operands)
    ]
    count = max(1, len(call.spec.outs)) if call.spec is not None else 1
    try:
        judge(call.rule, call.spec, operands, call.affine, count)
    except Violation as beneath:
        return beneath
    return violation


def explain_shapes(mode: Session, call: JudgedCall, error: Exception | None = None) -> SpmdTypeError | None:
    """The error for shapes that do not fit, where gathering or slicing an operand makes them fit; else None."""
    here = site()
    names = name_operands(call.tensors, here)
    of_torch = f" ({str(error).splitlines()[0]})" if error is not None else ""
    for axis in sorted({axis for operand in call.operands for axis in operand.type.types}):
        size = size_of(mode, axis)
        repairs: list[tuple[float, Repair]] = [(0, repair) for repair in fitting_sizes(call, axis, size, names, here)]
        for index, (x, name) in enumerate(zip(call.tensors, names)):
            if out_of_reach(x, name, here):
                continue
            for change in changes_of(call, index, axis, size, name, mode.level):
                if change.shape != tuple(x.shape) and legal(call, axis, {index: change}):
                    repairs.append((change.order, Repair(change.code, edit_of(here, name.node, change.code))))
        if repairs:
            repairs.sort(key=lambda pair: pair[0])
            listed = _listed(call, names)
            sharded = [line for x, n in zip(call.tensors, names) for line in since(x, n.label, axis)]
            return SpmdTypeError(
                f"{call.rule.name}({listed}) at {location(mode)}",
                f"on {axis}, the shapes do not fit, and would if all operands were whole, or all were pieces{of_torch}",
                where_from=sharded,
                repairs=[repair for _, repair in repairs[:4]],
                axis=axis,
                rule="shapes",
            )
    return None


def missing_type(mode: Session, x: Tensor, function: str) -> SpmdTypeError:
    """The error for a tensor without a declaration."""
    axes = ", ".join(f'"{axis}": spmd.R' for axis in (mode.atoms(("pp", "dp", "cp", "tp")) or ("tp",)))
    here = site()
    name = name_operands([x], here)[0]
    code = f"spmd.assert_type({name.code}, {{{axes}}})"
    declared = Repair(f"{code} where it is made", edit_of(here, name.node, code))
    return SpmdTypeError(
        f"{function} at {location(mode)} got {shown(x, None, name.label)}, which has no type",
        "it was made outside the check, so whether it is equal on all ranks is unknown",
        repairs=[declared, "make it inside the check"],
        rule="no_type",
    )


_MEANING = {
    "R": ", the same on all ranks",
    "I": ", the same on all ranks",
    "P": ", a sum that is not reduced",
    "V": ", another value on every rank",
}


_COUNT = (
    "torch.tensor(n, dtype=...) with n = len(x) or x.shape[0], if it counts this rank's rows: float() and int() make "
    "a plain number of a local size"
)


def operator_error(
    mode: Session,
    name: str,
    x: Tensor,
    note: Any,
    axis: str,
    src: Any,
    dst: Any,
    why: str,
    rule: str,
    takes: SpmdType | None = None,
) -> SpmdTypeError:
    """The error for a collective on a tensor of a type that it does not take.

    Args:
        src, dst: types stated in the call; None for a plain verb.
        takes: the type that a plain verb needs; None: unknown.
    """
    if mode.probing:
        return SpmdTypeError(name, why, axis=axis, rule=rule)
    here = site()
    named: Named = name_operands([x], here)[0]
    arrow = f", src={src}, dst={dst}" if src is not None else ""
    actual: SpmdType | None = note.type.get(axis)
    if actual is not None:
        takes, gives = _counted(src or takes, x), _counted(dst, x)
        pending = tuple(other for other, type_ in note.type if other != axis and type_.letter == "P")
        origin = (note.origins or {}).get(axis)
        differentiable = x.requires_grad and torch.is_grad_enabled()
        operation = Operation(name, actual, axis, takes, gives, differentiable, pending, origin)
        repairs = operator_repairs(operation, named, here, rule)
        if rule == "reduced_twice" and note.type is EQUAL and x.numel() == 1 and "all_reduce" in name:
            repairs.insert(0, Repair(_COUNT))
    else:
        code = f'spmd.assert_type({named.code}, {{"{axis}": spmd.R}})'
        repairs = [Repair(f"{code} where it is made", edit_of(here, named.node, code))]
    params = mode.undeclared(axis) if actual is not None and actual.letter in SAME and _takes_parts(name, src) else []
    if params:
        names = [f"{name_of(param)} {[*param.shape]}" for param in params[:4]] + ["..."] * (len(params) > 4)
        why = (
            f"{named.label or 'it'} is taken for whole on every rank, since no parameter of the model is declared as a "
            f"shard of {axis}: {', '.join(names)}"
        )
        repairs = _declarations(params[0], axis, mode.mesh)
    elif actual is not None and rule == "source" and not _same_shard(actual, src, x):
        why = f"it is {actual}{_MEANING.get(actual.letter, '')}, not {src}"
    if why.startswith("it is ") and named.label:
        why = named.label + why[2:]
    return SpmdTypeError(
        f"{name}({shown(x, note.type, named.label)}, {axis!r}{arrow}) at {location(mode)}",
        f"on {axis}, {why}",
        where_from=since(x, named.label, axis, note),
        repairs=repairs,
        axis=axis,
        rule=rule,
        src=src,
        dst=dst,
        types=[note.type],
    )


def _takes_parts(name: str, src: Any) -> bool:
    """Returns whether a collective puts together what differs between the ranks."""
    return name.removeprefix("comm.") in ("all_reduce", "reduce_scatter", "all_gather") and src not in (R, I)


def _declarations(param: Tensor, axis: str, mesh: Any) -> list[Repair]:
    """Repairs of a model whose parameters are shards and are not declared, with `param` as the example."""
    size = mesh.size(axis)
    path, _, name = name_of(param).rpartition(".")
    full = (param.shape[0] * size, *param.shape[1:])
    spec = f'spmd.ShardSpec("{axis}", dim=0, num_partitions={size}, full_shape={full})'
    return [
        Repair(
            f'spmd.set_spec({path or "model"}, "{name}", {spec}) where the model is built, if it is divided along dim '
            "0, and likewise for every shard"
        ),
        Repair("ColumnParallelLinear and RowParallelLinear in the place of nn.Linear: they declare their shards"),
    ]


def _counted(spmd_type: Any, x: Tensor) -> Any:
    """`S(-1)` as the same shard with its dim counted from the front; other types unchanged."""
    negative = isinstance(spmd_type, Shard) and spmd_type.dim < 0
    return Shard(spmd_type.dim + x.dim(), spmd_type.stride) if negative else spmd_type


def _same_shard(one: SpmdType, other: Any, x: Tensor) -> bool:
    """Returns whether two types are shards of one dim, so that the dim is not the fault."""
    return isinstance(one, Shard) and isinstance(other, Shard) and (one.dim - other.dim) % max(1, x.dim()) == 0


def gradient_error(
    function: Any, called: str, input_type: SpmdType | None, index: int, grad: Tensor, axis: str, expected: SpmdType
) -> SpmdTypeError:
    """The error for a gradient of a custom function's backward whose type is not the dual of its input's.

    `called`: the line of the call; `index`: number of the input of the gradient.
    """
    names = list(inspect.signature(function.forward).parameters)
    names = names[1:] if names[:1] == ["ctx"] else names
    name = names[index] if index < len(names) else f"input {index}"
    function = function.__name__
    note = note_of(grad)
    assert note is not None
    actual = note.type.get(axis)
    code = f"grad_{name}"
    scatter = f'comm.reduce_scatter({code}, "{axis}", dim={getattr(expected, "dim", 0)})'
    if actual is P and expected.letter in SAME:
        words = "each rank returns its part of it, and the parts are not added up"
        repairs = [f'comm.all_reduce({code}, "{axis}") in {function}.backward',
                   f"{call_of('convert', name, axis, I, R)} before the call, whose backward adds them up"]  # fmt: skip
    elif expected is P and actual is not None and actual.letter in SAME:
        words = "it is added up here, and again where the input is made"
        repairs = [f"drop the reduction over {axis} in {function}.backward",
                   f"{call_of('convert', name, axis, R, I, True)} before the call"]  # fmt: skip
    elif actual is P:
        words = "each rank returns its part of it, and the parts are not added up"
        repairs = [f"{scatter} in {function}.backward"]
    else:
        words = "that is not the gradient of its input"
        gather = f'comm.all_gather({code}, "{axis}", dim={getattr(actual, "dim", 0)})'
        repairs = [f"{scatter} in {function}.backward", f"{gather} in {function}.backward"]
    origin = (note.origins or {}).get(axis)
    lines = []
    if origin is not None and actual is not None and origin.letter == actual.letter:
        lines = [f"{code} is {actual} on {axis} since {origin}"]
    return SpmdTypeError(
        f"{function}.backward, of the call at {called}, returns {shown(grad, note.type, code)}",
        f"on {axis} {name} is {input_type}, so that its gradient is {expected}, not {actual}: {words}",
        where_from=lines,
        repairs=repairs,
        axis=axis,
        rule="backward",
    )


def write_error(
    mode: Session,
    name: str,
    target: Tensor,
    tensors: Sequence[Tensor],
    types: Sequence[TensorType],
    axis: str,
    after: SpmdType | None,
) -> SpmdTypeError:
    """The error for a write in place that would change a type that must not change."""
    here = site()
    names = name_operands(tensors, here)
    at = next((i for i, x in enumerate(tensors) if x is target), None)
    label = names[at].label if at is not None else name_of(target)
    target_type = type_of(target)
    assert target_type is not None
    before = target_type.get(axis)
    repairs: list[Repair | str] = []
    lines = []
    for x, type_, operand in zip(tensors, types, names):
        spmd_type = type_.get(axis)
        if x is target or spmd_type is None or spmd_type.letter not in DIFFERING or before is None:
            continue
        lines += since(x, operand.label, axis)
        path = route(spmd_type, before)
        if spmd_type is V and before.letter in SAME:
            code = f'comm.broadcast({operand.code}, "{axis}", src=0)'
            repairs.append(f"{code}: if the value of the first rank is meant")
        elif path is not None:
            code = call_of(path[0], operand.code, axis, None if spmd_type is P else spmd_type, before, path[1])
            repairs.append(Repair(code, edit_of(here, operand.node, code)))
    repairs.append("write to a new tensor")
    keeps = "a parameter keeps" if isinstance(target, nn.Parameter) else "what has a gradient keeps"
    return SpmdTypeError(
        f"{name}({', '.join(shown(x, t, n.label) for x, t, n in zip(tensors, types, names))}) at {location(mode)}",
        f"on {axis} {label or 'what is written to'} is {before} and would become {after}: {keeps} its type",
        where_from=lines,
        repairs=repairs,
        axis=axis,
        rule="inplace",
    )


def data_error(mode: Session, name: str, target: Tensor, note: Note) -> SpmdTypeError:
    """The error for a write through `.data`."""
    label = name_of(target)
    return SpmdTypeError(
        f"{name} at {location(mode)} writes to {shown(target, note.type, label)}, which came from .data",
        "autograd does not see writes through .data, and neither do types",
        repairs=[f"with torch.no_grad(): write to {label.removesuffix('.data') or 'the tensor itself'}"],
        rule="data",
    )
