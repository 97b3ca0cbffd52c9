"""Types of the plain verbs of `comm`: the handlers that the checker calls for them.

Verbs state no types: the type of the tensor decides (a partial sum is reduced, shards are gathered), and a call without
meaning is an error: the sum of equal values, the gather of a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .... import comm
from ....comm import Handle
from ....spmd.axes import atoms_of
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, Segments, TensorType, note_of
from ....spmd.types import SAME, UNIFORM, ZERO, I, P, R, Shard, SpmdType, V, scaled
from ....spmd.watching import HANDLERS
from ....torch_internals.tensors import DisableTorchFunction
from ..messages.explain import operator_error
from ..piece_order import Jumbled, gathered
from ..session import Session
from .inplace import note_write
from .lost_gradients import lost_gradients, refuse_gradient
from .one_rank import claim_stage
from .operators import check_masked, cut, joined
from .own_rows import gathered_rows
from .vmapped import refuse_inside

__all__ = ["verb_type"]


def _verb(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    listed, axis = isinstance(args[0], (list, tuple)), args[1]
    xs: Sequence[Tensor] = args[0] if listed else args[:1]
    name = func.__name__
    notes = [mode.note(x, name) for x in xs]
    refuse_inside(f"comm.{name}", notes)
    mode.operators += 1
    communicator = comm.communicator(axis)
    axes = atoms_of(communicator, mode.mesh) if communicator.size != 1 else ()
    if axes:
        mode.collectives += 1
    known = [(x, note) for x, note in zip(xs, notes) if note is not None]
    if len(known) < len(notes):  # a backward pass through native code
        with mode.pause():
            return func(*args, **kwargs)
    if name == "permute":
        pairs = args[2] if len(args) > 2 else kwargs["pairs"]
        mode.permuted.append((communicator.axis, frozenset((src, dst) for src, dst in pairs)))
    types: list[tuple[TensorType, Any, Any]] = []
    for x, note in known:
        if isinstance(note.extra, Segments):
            type_, extra = _packed(mode, name, x, note, axes, kwargs)
        else:
            type_, extra = verb_type(mode, name, x, note.type, note, axes, kwargs, communicator.size), None
        origins = {atom: origin for atom, origin in (note.origins or {}).items() if atom not in axes}
        types.append((type_, origins or None, extra))
    lost = lost_gradients(mode, name, known, [type_ for type_, _, _ in types], axes, kwargs)
    with mode.pause():
        result = func(*args, **kwargs)

    def finish(result: Any) -> Any:
        with DisableTorchFunction():  # a wait is no call that the mode sees
            for y, (type_, origins, extra), x, error in zip(result if listed else [result], types, xs, lost):
                if error is not None:
                    refuse_gradient(mode, x, y, error)
                if name == "all_gather" and (note := note_of(x)) is not None:
                    extra = extra or gathered_rows(x, note, axis, axes, y)
                note_write(mode, y, type_, origins, extra)
        return result

    if isinstance(result, Handle):
        result.then(finish)
        return result
    return finish(result)


def verb_type(
    mode: Session,
    name: str,
    x: Tensor,
    type_: TensorType,
    note: Note,
    axes: Sequence[str],
    kwargs: Mapping[str, Any],
    count: int,
) -> TensorType:
    """The type that a plain collective among `count` ranks gives a tensor."""
    types = _on_its_axes(mode, name, x, type_, note, axes, kwargs)
    if type_.shaped and axes and name in ("all_gather", "reduce_scatter", "all_to_all"):
        _beside(name, x, type_, types, axes, kwargs, count)
        if getattr(type_.rest, "along", None):
            return TensorType.of(types, R)
    return TensorType.of(types, type_.rest)


def _on_its_axes(
    mode: Session,
    name: str,
    x: Tensor,
    type_: TensorType,
    note: Note,
    axes: Sequence[str],
    kwargs: Mapping[str, Any],
) -> dict[str, SpmdType]:
    """The types of a tensor after a plain collective, which changes those on its axes."""
    types = dict(type_.types)
    for atom in axes:
        actual = type_.get(atom)
        if actual is None:
            why = f"it has no type on {atom}"
            raise operator_error(mode, f"comm.{name}", x, note, atom, None, None, why, "no_type")
        if name in ("all_reduce", "reduce_scatter") and actual.letter in SAME and actual.scale < 0:
            actual = scaled(P, actual.scale + 1)  # a share on every rank: together they are the whole
        if name in ("all_reduce", "reduce_scatter"):
            claim_stage(mode, f"comm.{name}", actual)
        result = _VERBS[name](_VerbOperand(mode, name, x, note, atom, actual.base, kwargs))
        summed = name in ("all_reduce", "reduce_scatter")
        moved = name in ("permute", "exchange")  # what is received is scaled as what is sent
        types[atom] = scaled(result, actual.scale if summed or moved or actual.base is not V else 0)
    return types


def _packed(
    mode: Session, name: str, x: Tensor, note: Note, axes: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[TensorType, Segments]:
    """The `Segments` after a plain collective on a buffer, each part judged alone."""
    segments: Segments = note.extra
    reduction = {key: value for key, value in kwargs.items() if key == "op"}
    parts = []
    for size, type_, origins in segments.parts:
        part = note._replace(type=type_, origins=origins, extra=None)
        changed = _on_its_axes(mode, name, x, type_, part, axes, reduction)
        if name in ("all_gather", "reduce_scatter"):  # rows of all ranks, one after the other; or some of them
            whole = R if name == "all_gather" else V
            changed.update({axis: scaled(whole, changed[axis].scale) for axis in axes})
        left = {axis: origin for axis, origin in (origins or {}).items() if axis not in axes}
        parts.append((size, TensorType.of(changed, type_.rest), left or None))
    return note.type, Segments(segments.dim, tuple(parts))


def _beside(
    name: str,
    x: Tensor,
    type_: TensorType,
    types: dict[str, SpmdType],
    axes: Sequence[str],
    kwargs: Mapping[str, Any],
    count: int,
) -> None:
    """Retypes shards on other axes that use the dim which a plain collective concatenates or splits."""
    dim = kwargs.get("dim", 0) % max(1, x.dim())
    into = kwargs.get("split_dim", 0) % max(1, x.dim()) if name == "all_to_all" else dim
    if name == "all_to_all":
        dim = kwargs.get("concat_dim", 0) % x.dim()
    if name != "reduce_scatter":
        copies = any(not isinstance(type_.get(axis), Shard) for axis in axes)
        joined(types, axes, dim, count, copies)
    if name != "all_gather":
        piece = cut(types, axes, into, count)
        if any(isinstance(types[axis], Shard) for axis in axes):
            types.update(dict.fromkeys(axes, piece))


class _VerbOperand(NamedTuple):
    """An operand of a verb: a tensor, and its type on one axis."""

    mode: Session
    verb: str
    x: Tensor
    note: Note
    atom: str
    type: SpmdType
    kwargs: Mapping[str, Any]

    def dim(self, option: str = "dim") -> int:
        return self.kwargs.get(option, 0) % max(1, self.x.dim())

    def error(self, why: str, rule: str) -> SpmdTypeError:
        takes = Shard(self.dim()) if self.verb == "all_gather" else P if "reduce" in self.verb else None
        name = f"comm.{self.verb}"
        return operator_error(self.mode, name, self.x, self.note, self.atom, None, None, why, rule, takes)


def _reduce(operand: _VerbOperand) -> SpmdType:
    op, spmd_type, atom = operand.kwargs.get("op", "sum"), operand.type, operand.atom
    if spmd_type.letter == "P":
        if spmd_type.reduction == op:
            return R
        raise operand.error(f"a partial {spmd_type.reduction} is reduced by {op}", "wrong_reduction")
    if op in ("max", "min"):
        if isinstance(spmd_type, Shard):
            why = f"its pieces along dim {spmd_type.dim} are compared with one another: {op} over that dim first"
            raise operand.error(why, "wrong_reduction")
        return R
    if spmd_type is V:
        check_masked(operand.mode, f"comm.{operand.verb}", operand.x, operand.note, atom, None, None)
        operand.mode.assume(f"comm.{operand.verb}: the values that vary over {atom} are summands")
        return R
    if spmd_type is ZERO or spmd_type is UNIFORM:  # ones are summed to count
        return R
    if isinstance(spmd_type, Shard):
        why = f"its pieces along dim {spmd_type.dim} are added up: all_gather is what puts them together"
        raise operand.error(why, "sum_of_shards")
    why = f"it is the same on all ranks of {atom} already: the sum multiplies it by their number"
    raise operand.error(why, "reduced_twice")


def _gather(operand: _VerbOperand) -> SpmdType:
    dim, spmd_type = operand.dim(), operand.type
    if spmd_type.letter == "P":
        raise operand.error("it is a partial sum: a gather puts summands side by side", "gather_of_sum")
    result = gathered(spmd_type, R)
    if isinstance(spmd_type, Shard) and (spmd_type.dim != dim or spmd_type.stride != 1 or result is None):
        raise operand.error(f"it is {spmd_type}, and dim {dim} is gathered", "gather_dim")
    if operand.mode.level == "G" and (spmd_type is R or spmd_type is I or isinstance(spmd_type, Jumbled)):
        why = f"it is the same on all ranks of {operand.atom}: the result holds it once for each of them"
        raise operand.error(why, "gathered_twice")
    return result or R


def _scatter(operand: _VerbOperand) -> SpmdType:
    _reduce(operand._replace(verb="all_reduce"))
    return Shard(operand.dim()) if operand.mode.level == "G" else V


def _exchange(operand: _VerbOperand) -> SpmdType:
    split, concat, spmd_type = operand.dim("split_dim"), operand.dim("concat_dim"), operand.type
    _pieces(operand)
    sharded = isinstance(spmd_type, Shard) and spmd_type == Shard(concat) and split != concat
    return Shard(split) if sharded else V


def _broadcast(operand: _VerbOperand) -> SpmdType:
    if operand.type.letter == "P":
        raise operand.error("it is a partial sum: one summand is not the sum", "gather_of_sum")
    return operand.type if isinstance(operand.type, Jumbled) else R


def _permute(operand: _VerbOperand) -> SpmdType:
    return V


def _pieces(operand: _VerbOperand) -> SpmdType:
    if operand.type.letter == "P":
        raise operand.error("it is a partial sum: pieces of summands are not pieces of the sum", "gather_of_sum")
    return V


_VERBS: dict[str, Callable[[_VerbOperand], SpmdType]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "broadcast": _broadcast,
    "permute": _permute,
    "exchange": _pieces,
}
HANDLERS.update(dict.fromkeys([getattr(comm, _name) for _name in _VERBS if _name != "exchange"], _verb))


def _exchange_verb(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles `exchange` as `_verb` does: received tensors have the types of the sent ones, but vary over the axis."""
    sends, recvs, axis = args

    def exchange(xs: Sequence[Tensor], axis: Any, **options: Any) -> Any:
        return func(xs, recvs, axis, **options)

    return _verb(mode, exchange, (sends, axis), kwargs)


HANDLERS[comm.exchange] = _exchange_verb


def _send(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.operators += 1
    mode.collectives += 1
    if mode.sent is not None:
        mode.sent(args[0], args[1], kwargs["dst"], kwargs.get("tag", 0))
    with mode.pause():
        return func(*args, **kwargs)


def _recv(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.operators += 1
    mode.collectives += 1
    with mode.pause():
        result = func(*args, **kwargs)
    if mode.received is None:
        return result
    type_of_message = mode.received(args[0], args[1], kwargs["src"], kwargs.get("tag", 0))

    def finish(_: Any) -> None:
        type_ = type_of_message()
        if type_ is not None:
            mode.stamp(args[0], type_)

    if isinstance(result, Handle):
        result.then(finish)
    else:
        finish(result)
    return result


HANDLERS[comm.send] = _send
HANDLERS[comm.recv] = _recv
