"""Trials of changes of a call's operands: candidates, and whether the call is legal with them.

A candidate is an operator on one operand: its code, and the type and the shape of its result. The call is judged again
with these; nothing is communicated, and shapes are tried on the meta device.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .... import comm
from ....rules import Rule
from ....rules.spec import Spec
from ....spmd.errors import Violation
from ....spmd.rows import ROWS
from ....spmd.tensor_type import TensorType, type_of
from ....spmd.types import DIFFERING, PARTIAL_NORM, SAME, VARYING, I, P, R, Shard, SpmdType, V, scaled
from ....torch_internals.tensors import DisableTorchFunction
from ..judge import Operand, judge
from .provenance import Named, Site, contracts
from .syntax import expression_of

__all__ = [
    "JudgedCall",
    "Change",
    "Edit",
    "Repair",
    "atom_of",
    "blocks_gathered",
    "call_of",
    "changes_of",
    "contracted",
    "edit_of",
    "legal",
    "misfit",
    "on_meta",
    "out_of_reach",
    "route",
    "size_of",
    "unreduced",
    "written",
]

LAST = 40  # an order behind all repairs that keep the global value


class Edit(NamedTuple):
    """A change of the source: the text between two positions (lines from 1, columns in bytes) becomes `text`."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    text: str


class Repair(str):
    """A repair as text, with the change of the source (`edits`) where it is known."""

    edits: tuple[Edit, ...]

    def __new__(cls, text: str, *edits: Edit | None) -> Repair:
        self = super().__new__(cls, text)
        self.edits = tuple(edit for edit in edits if edit is not None)
        return self


class JudgedCall(NamedTuple):
    """A call with a violation; `operands` are those of the judgement, including random numbers drawn."""

    rule: Rule
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    operands: Sequence[Operand]
    spec: Spec | None
    affine: bool = False


class Change(NamedTuple):
    """A way to give an operand another type."""

    code: str
    type: SpmdType
    shape: tuple[int, ...]
    order: float  # place in the list of repairs
    words: str = ""  # appended to the repair: the case in which it is meant


def written(spmd_type: SpmdType | None) -> str:
    """A type as code: `spmd.S(1)`."""
    return f"spmd.{spmd_type}"


def call_of(
    operator: str, name: str, axis: str, src: SpmdType | None, dst: SpmdType | None, expert: bool = False
) -> str:
    """A call of an operator as code."""
    types = f", src={written(src)}" if src is not None else ""
    types += f", dst={written(dst)}" if dst is not None else ""
    return f'spmd.{operator}({name}, "{axis}"{types}{", expert_mode=True" if expert else ""})'


def out_of_reach(x: Tensor, name: Named, here: Site | None) -> bool:
    """Returns whether an operand is a parameter of a layer in the code of that layer, which users do not change."""
    return isinstance(x, nn.Parameter) and name.node is None and here is not None and here.called is not None


def size_of(mode: Any, axis: str) -> int | None:
    """Number of ranks on an axis; None: unknown."""
    try:
        return int(mode.mesh.size(axis)) if mode.mesh is not None else int(comm.size(axis))
    except (ValueError, RuntimeError, KeyError):
        return None


def _companions(call: JudgedCall, index: int, axis: str) -> tuple[set[Shard], bool, tuple[SpmdType, SpmdType]]:
    """Facts about the other operands of a call, for choosing the repair of one operand.

    Returns:
        Their shards; whether one of them is an unreduced sum; I and R, the more likely first, for a value that is the
        same on all ranks.
    """
    x = call.tensors[index]
    others = [
        (operand.type.get(axis), operand.differentiable)
        for i, operand in enumerate(call.operands)
        if i != index and not (i < len(call.tensors) and call.tensors[i] is x)
    ]
    invariant = any(k is not None and k.letter == "I" and receives for k, receives in others)
    replicated = any(k is not None and k.letter == "R" and receives for k, receives in others)
    shards = {k for k, _ in others if isinstance(k, Shard)}
    varying = bool(shards) or any(k is V for k, _ in others)
    pending = any(k is not None and k.base is P for k, _ in others) or contracted(call, axis) or any(
        operand.type.get(axis) is V and unreduced(tensor, axis) for operand, tensor in zip(call.operands, call.tensors)
    )  # fmt: skip
    # Beside operands that are I and others that are R or vary, or beside none, a value is likely to end in the loss,
    # which is I.
    return shards, pending, (R, I) if (replicated or varying) and not invariant else (I, R)


def changes_of(call: JudgedCall, index: int, axis: str, size: int | None, name: Named, level: str) -> Iterator[Change]:
    """Candidate repairs of an operand, each with its `order` (small: likely)."""
    x, spmd_type = call.tensors[index], call.operands[index].type.get(axis)
    if spmd_type is None or spmd_type.letter == "0":
        return
    shards, pending, (first, second) = _companions(call, index, axis)
    same = tuple(x.shape)

    def write(operator: str, src: SpmdType | None, dst: SpmdType | None, expert: bool = False) -> str:
        return call_of(operator, name.code, axis, src, dst, expert)

    if spmd_type.base is PARTIAL_NORM:
        for rank, dst in enumerate((first, second) if not spmd_type.scale else (), 1):
            summed = call_of("all_reduce", f"{atom_of(name.code)}.square()", axis, None, dst)
            yield Change(f"{summed}.sqrt()", dst, same, rank)
        return
    dims = range(x.dim())
    others = [operand.type.get(axis) for operand in call.operands]
    mixed = spmd_type.base is P and any(k is not None and k.base is P and k is not spmd_type for k in others)
    if mixed or (spmd_type.scale and spmd_type.base is not P):
        sign, factor = ("/", -1) if spmd_type.scale > 0 else ("*", 1)
        code = f'({atom_of(name.code)} {sign} comm.size("{axis}"))'
        yield Change(code, scaled(spmd_type, factor), same, 26 if mixed else 1)
    if spmd_type.scale and x.dim():  # a mean in the middle of a model, of which every rank makes its own use
        first, second = R, I
    if (spmd_type.base is P and spmd_type.scale in (0, 1)) or (spmd_type is V and unreduced(x, axis)):
        src = spmd_type if spmd_type.scale else None
        yield Change(write("all_reduce", src, first), first, same, 1)
        yield Change(write("all_reduce", src, second), second, same, 2)
        likely = [d for d in dims if Shard(d) in shards] or list(dims)[-2:-1]  # else along the sequence
        for dim in likely:
            if size and same[dim] % size == 0:
                order = 0.5 if Shard(dim) in shards else 3 + dim / 100
                yield Change(write("reduce_scatter", src, Shard(dim)), Shard(dim), _resized(same, dim, 1, size), order)
    elif spmd_type.scale:
        return
    elif spmd_type.letter == "P":
        text = f'comm.all_reduce({name.code}, "{axis}", op="{spmd_type.reduction}")'
        yield Change(text, R, same, 1)
    elif spmd_type.letter == "I":
        if not pending:
            yield Change(write("convert", I, R), R, same, 10)
        for dim in dims if shards else ():
            if size and same[dim] % size == 0:
                yield Change(write("convert", I, Shard(dim)), Shard(dim), _resized(same, dim, 1, size), 21 + dim / 100)
    elif spmd_type.letter == "R":
        for dim in dims if shards else ():
            if size and same[dim] % size == 0:
                yield Change(write("convert", R, Shard(dim)), Shard(dim), _resized(same, dim, 1, size), 21 + dim / 100)
        if pending:
            yield Change(write("convert", R, P), P, same, 24)
    elif isinstance(spmd_type, Shard):
        contiguous = spmd_type.stride == 1
        if spmd_type.order is None and spmd_type.extent in (None, same[spmd_type.dim]) and size:
            shape = _resized(same, spmd_type.dim, size, 1)
            order = 14 if isinstance(x, nn.Parameter) else 12
            for n, dst in enumerate((first, second)):
                blocks = blocks_gathered(name, axis, spmd_type, dst)
                yield Change(write("all_gather", spmd_type, dst) if contiguous else blocks, dst, shape, order + n)
            for dim in dims if contiguous else ():
                if dim != spmd_type.dim and same[dim] % size == 0:
                    exchanged = _resized(shape, dim, 1, size)
                    yield Change(write("all_to_all", spmd_type, Shard(dim)), Shard(dim), exchanged, 18 + dim / 100)
        text = f'spmd.forget({name.code}, "{axis}")'
        yield Change(text, V, same, LAST, ": if each rank's piece is meant by itself")
    elif spmd_type is V:
        for dim in dims:
            text = f'spmd.assert_type({name.code}, {{"{axis}": {written(Shard(dim))}}})'
            if level == "G":
                yield Change(text, Shard(dim), same, 30 + dim / 100, f": if the ranks hold the pieces of dim {dim}")
        yield Change(write("reinterpret", V, P), P, same, 32, ": if the ranks hold summands")


def blocks_gathered(name: Named, axis: str, shard: Shard, dst: SpmdType | None) -> str:
    """Code that gathers a dim of several blocks, each sharded separately."""
    part = call_of("all_gather", "part", axis, Shard(shard.dim), dst)
    return f"torch.cat([{part} for part in {name.code}.chunk({shard.stride}, {shard.dim})], {shard.dim})"


def atom_of(code: str) -> str:
    """An expression, in parentheses if an operand needs them."""
    body = expression_of(code or "x")
    if body is None:
        return code
    alone = isinstance(body, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return code or "x" if alone else f"({code})"


def _resized(shape: Sequence[int], dim: int, times: int, over: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * times // over, *shape[dim + 1 :])


def contracted(call: JudgedCall, axis: str) -> bool:
    """Returns whether the call sums over a dim of two operands that vary, so that its result may be a partial sum."""
    if call.spec is None:
        return False
    varying = [
        {label for dim in dims or () for label in dim}
        for dims, operand in zip(call.spec.ins, call.operands)
        if (operand.type.get(axis) or R).letter in VARYING
    ]
    return any(sum(label in labels for labels in varying) > 1 for label in call.spec.reduced)


def unreduced(x: Tensor, axis: str) -> bool:
    """Returns whether a tensor that varies is an unreduced sum over pieces, as far as the autograd graph shows."""

    def varies(leaf: Tensor) -> bool:
        leaf_type = type_of(leaf)
        spmd_type = leaf_type.get(axis) if leaf_type is not None else None
        return spmd_type is not None and spmd_type.letter in VARYING

    type_ = type_of(x)
    spmd_type = type_.get(axis) if type_ is not None else None
    return spmd_type is not None and (spmd_type.base is P or (spmd_type is V and contracts(x, varies)))


def legal(call: JudgedCall, axis: str, changes: Mapping[int, Change], result: bool = False) -> Any:
    """Returns whether the call is legal on this axis with operands changed; with `result` the types of its results."""
    changed = {id(call.tensors[index]): change for index, change in changes.items()}
    spec = call.spec
    with DisableTorchFunction():
        if any(tuple(x.shape) != changed[id(x)].shape for x in call.tensors if id(x) in changed):
            new = {id(x): x.new_empty(changed[id(x)].shape if id(x) in changed else x.shape, device="meta")
                   for x in call.tensors}  # fmt: skip
            args, kwargs = _with(call.args, new), _with(dict(call.kwargs), new)
            if misfit(call, args, kwargs) is not None:
                return False
            spec = call.rule.spec(*args, **kwargs) if call.rule.spec is not None else None
    operands = []
    for index, operand in enumerate(call.operands):
        x = call.tensors[index] if index < len(call.tensors) else None
        spmd_type = changed[id(x)].type if id(x) in changed else operand.type.get(axis) or R
        operands.append(Operand(TensorType.of({axis: spmd_type}), operand.differentiable))
    if call.rule.kind == "scalar":
        return all(operand.type.types[axis].letter not in DIFFERING for operand in operands)
    count = max(1, len(spec.outs)) if spec is not None else 1
    try:
        types = judge(call.rule, spec, operands, call.affine, count).types
    except Violation:
        return False
    return [type_.get(axis) for type_ in types] if result else True


def misfit(call: JudgedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that torch raises for these arguments, on the meta device; None if they fit.

    Functions of the user's code are not run.
    """
    torch_own = (getattr(call.function, "__module__", None) or "torch").startswith("torch")
    try:
        with DisableTorchFunction(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if call.rule.spec is not None:
                call.rule.spec(*args, **kwargs)
            if torch_own:
                call.function(*args, **kwargs)
    except NotImplementedError:  # cannot run without values
        return None
    except Exception as error:
        return error
    return None


def on_meta(call: JudgedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, on the meta device."""
    with DisableTorchFunction():
        new = {id(x): x.new_empty(x.shape, device="meta") for x in call.tensors}
    return _with(call.args, new), _with(dict(call.kwargs), new)


def _with(value: Any, new: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if isinstance(value, (tuple, list)):
        return type(value)(_with(item, new) for item in value)
    if isinstance(value, dict):
        return {key: _with(item, new) for key, item in value.items()}
    return value


def edit_of(here: Site | None, node: ast.AST | None, text: str) -> Edit | None:
    """The edit that replaces an expression by `text`; None if its place is unknown, or not in the user's code."""
    if here is None or not here.editable or not isinstance(node, (ast.expr, ast.stmt)):
        return None
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return None
    end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return Edit(here.file, (node.lineno, node.col_offset), end, text)


def route(src: SpmdType, dst: SpmdType) -> tuple[str, bool] | None:
    """The operator that takes `src` to `dst` and keeps the global value, and whether it needs expert_mode."""
    a, b = src.letter, dst.letter
    if src.scale and src is not P("avg"):
        return None
    if a == b and not isinstance(src, Shard):
        return None
    if any(
        isinstance(t, Shard) and (t.stride > 1 or t.order is not None) for t in (src, dst)
    ):  # operators know one block
        return None
    operator = {"P": "all_reduce" if b in SAME else "reduce_scatter", "V": "all_gather", "S": "all_gather"}.get(
        a, "convert"
    )
    if a in VARYING and b in VARYING:
        operator = "all_to_all"
    row = ROWS.get((operator, a, b))
    return None if row is None or a + b in ("VS", "SV") else (operator, row.expert)
