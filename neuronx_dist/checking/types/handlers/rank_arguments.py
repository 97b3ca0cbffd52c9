"""Numbers that differ by rank, as arguments of torch functions: values, positions, and sizes.

A `RankValue` (comm.ranks) as a value or a position makes a result vary over its axes. Where it decides the
shape of a result, the ranks run different programs, which is a *read*: the check then plays them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from torch import Tensor

from ....call_site import call_site
from ....comm.ranks.rank_numbers import concrete
from ....comm.ranks.rank_values import RankValue, rank_values_in
from ....rules import Rule
from ....rules.spec import Spec
from ....spmd.axes import atoms_of
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import COUNTED, Note, TensorType, note_of, origins_of, type_of
from ....spmd.types import SAME, Dealt, R, Shard, SpmdType, V
from ..messages.explain import shown
from ..piece_order import Picked
from ..session import Session

__all__ = ["Pieces", "counted", "counts", "picked", "rank_values"]

_VALUES = {"tensor", "full", "full_like", "new_full", "scalar_tensor", "as_tensor", "new_tensor", "asarray"}
_POSITIONS = {"narrow", "select", "__getitem__", "getitem", "roll", "index_select"}
_CUTS = {"chunk", "split", "split_with_sizes", "tensor_split", "unbind"}


def rank_values(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankValue]:
    """The RankValues in a call that are values or positions; RankValues that decide a shape are read."""
    numbers = rank_values_in((args, kwargs))
    if not numbers:
        return numbers
    if rule.kind != "op":
        decides = rule.name not in _VALUES
    elif rule.name == "narrow":
        length = args[3] if len(args) > 3 else kwargs.get("length")
        decides = isinstance(length, RankValue)
    elif rule.name in _POSITIONS:
        decides = any(isinstance(width, RankValue) for width in _widths(args[1:]))
    else:
        decides = rule.aliases or rule.name in ("repeat", "repeat_interleave", "expand", "pad", *_CUTS)
    if decides:
        for number in numbers:
            number.read()
    return numbers


def _widths(index: Any) -> list[Any]:
    """Lengths of the slices in an index that have both ends."""
    if isinstance(index, slice):
        start, stop = index.start or 0, index.stop
        return [start] if stop is None else [stop - start]
    if isinstance(index, (tuple, list)):
        return [width for item in index for width in _widths(item)]
    return []


def counts(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call returns 0, 1, 2, ..."""
    return rule.name == "arange" and len(args) == 1 and not kwargs.keys() & {"start", "end", "step", "out"}


def counted(rule: Rule, spec: Spec, tensors: Sequence[Tensor], notes: Sequence[Note]) -> Spec:
    """The spec of `x[arange(len(x))[:, None], i]`, in which dim 0 of x stays, though a tensor indexes it."""
    if rule.name != "__getitem__" or not any(note.extra == COUNTED for note in notes[1:]) or not spec.ins:
        return spec
    ins, fixed = [*spec.ins], dict(spec.fixed)
    dims_of_x = [*(ins[0] or ())]
    looked = [dim for dim, labels in enumerate(dims_of_x) if len(labels) == 1 and spec.looked_up.intersection(labels)]
    if len(looked) != len(tensors) - 1:
        return spec
    for index, dim in enumerate(looked, 1):
        wide = [labels for labels in ins[index] or () if any(spec.sizes[label] != 1 for label in labels)]
        counted_once = notes[index].extra == COUNTED and len(wide) == 1 and len(wide[0]) == 1
        if counted_once and spec.sizes[wide[0][0]] == tensors[0].shape[dim]:
            fixed.pop(dims_of_x[dim][0], None)
            dims_of_x[dim], ins[index] = wide[0], None
    ins[0] = tuple(dims_of_x)
    return spec._replace(ins=tuple(ins), fixed=fixed)


class Pieces(tuple[Tensor, ...]):
    """The pieces into which a function cuts a tensor: `pieces[rank]` is another one on every rank."""

    _pick: Callable[[RankValue], Tensor]

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return self._pick(index) if isinstance(index, RankValue) else super().__getitem__(index)


def picked(mode: Session, rule: Rule, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that takes a part of a tensor by rank, with the type of that part.

    The pieces of a function that cuts a tensor are `Pieces`, so that an index by rank is seen.
    """
    if rule.name in _POSITIONS and isinstance(result, Tensor):
        _slice(mode, rule, result, args, kwargs)
    if rule.name == "add" and isinstance(result, Tensor):
        _moved(mode, result, args)
    if rule.name not in _CUTS or not isinstance(result, (tuple, list)):
        return result
    pieces = Pieces(result)
    numbers = [x for x in args[1:] if isinstance(x, int)]
    dim = kwargs.get("dim", numbers[-1] if len(numbers) > (rule.name in ("chunk", "split")) else 0)

    def pick(index: RankValue) -> Tensor:
        piece: Tensor = tuple.__getitem__(pieces, concrete(index))
        note = note_of(piece)
        if note is None:
            return piece
        in_rank_order = len(index.names) == 1 and index.table.values == tuple(range(len(pieces)))
        is_shard = in_rank_order and rule.name != "unbind"
        part: SpmdType = Shard(dim % piece.dim()) if is_shard else V
        if not in_rank_order and rule.name != "unbind" and len({x.shape for x in pieces}) == 1:
            part = _dealt(mode, index, [*index.table.values], len(pieces), dim % piece.dim())
        _part(mode, piece, note.type, index, part, in_rank_order)
        return piece

    pieces._pick = pick
    return pieces


def _dealt(mode: Session, index: RankValue, pieces: Sequence[int], count: int, dim: int) -> SpmdType:
    """The type of the pieces of `count` that the ranks of one axis take; V where several take the same."""
    if len(set(pieces)) != len(pieces) or len(index.names) != 1 or len(atoms_of(tuple(index.names), mode.mesh)) != 1:
        return V
    return Picked(dim, Dealt(count, tuple((piece % count,) for piece in pieces)))


def _moved(mode: Session, result: Tensor, args: tuple[Any, ...]) -> None:
    """Writes the type of `rank * n + arange(n)`: shards of one range."""
    start = next((x for x in args if isinstance(x, RankValue)), None)
    note = next((note_of(x) for x in args if isinstance(x, Tensor)), None)
    result_note = note_of(result)
    if start is None or note is None or result_note is None or note.extra != COUNTED or mode.level != "G":
        return
    if result.dim() != 1 or len(start.names) != 1 or len(args) != 2:
        return
    if start.table.values != tuple(rank * len(result) for rank in range(start.table.count)):
        return
    type_ = result_note.type
    for atom in atoms_of(tuple(start.names), mode.mesh):
        type_ = type_.with_axis(atom, Shard(0))
    mode.stamp(result, type_, result_note.origins, result_note.extra)


def _part(
    mode: Session, part: Tensor, whole: TensorType, index: RankValue, part_type: SpmdType, in_rank_order: bool
) -> None:
    """Writes the type of a part that each rank takes of a tensor: `part_type` on the rank's axes, if all hold the same.

    `in_rank_order`: the ranks take consecutive parts, in the order of their numbers.
    """
    note = note_of(part)
    if note is None:
        return
    type_ = note.type
    for atom in atoms_of(tuple(index.names), mode.mesh):
        before = whole.get(atom)
        if before is not None and before.letter != "P":
            type_ = type_.with_axis(atom, part_type if before is R and mode.level == "G" else V)
    if not in_rank_order and mode.level == "G":
        mode.assume(f"each rank of {', '.join(index.names)} takes another part of a tensor than that of its number")
    mode.stamp(part, type_, note.origins, note.extra)


def _slice(mode: Session, rule: Rule, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes the type of `x[start:stop]`, `x.narrow(dim, start, length)` or `x[index]` with a RankValue."""
    x = args[0]
    if rule.name in ("narrow", "select"):
        names = ("dim", "start", "length") if rule.name == "narrow" else ("dim", "index")
        named = {**dict(zip(names, args[1:])), **kwargs}
        dim, start = named["dim"] % x.dim(), named.get("start", named.get("index"))
        length = named.get("length", 1)
    elif rule.name == "__getitem__":
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        dim = next((i for i, item in enumerate(items) if rank_values_in(item)), len(items))
        if dim == len(items) or any(item != slice(None) for item in items[:dim]) or rank_values_in(items[dim + 1 :]):
            return
        item = items[dim]
        start, length = item, 1
        if isinstance(item, slice):
            if item.start is None:
                return
            start, stop = item.start, x.shape[dim] if item.stop is None else item.stop
            if item.step not in (None, 1):
                _every(mode, x, result, item, dim)
                return
            length = stop - start
    else:
        return
    whole = type_of(x)
    if whole is None or not isinstance(start, RankValue) or isinstance(length, RankValue):
        return
    if not _is_whole(mode, x, whole, start):
        return
    count = start.table.count
    in_rank_order = (
        start.table.values == tuple(number * length for number in range(count)) and count * length == x.shape[dim]
    )
    part: SpmdType = Shard(dim) if in_rank_order and result.dim() == x.dim() else V
    aligned = length and x.shape[dim] % length == 0 and not any(value % length for value in start.table.values)
    if not in_rank_order and result.dim() == x.dim() and aligned:
        part = _dealt(mode, start, [value // length for value in start.table.values], x.shape[dim] // length, dim)
    _part(mode, result, whole, start, part, in_rank_order)


def _every(mode: Session, x: Tensor, result: Tensor, item: slice, dim: int) -> None:
    """Writes the type of `x[rank::size]`: every rank has one of each `size` consecutive rows."""
    start, step, whole = item.start, item.step, type_of(x)
    if whole is None or item.stop is not None or not isinstance(start, RankValue) or isinstance(step, RankValue):
        return
    if not _is_whole(mode, x, whole, start):
        return
    in_rank_order = start.table.values == tuple(range(int(step))) and x.shape[dim] % step == 0
    _part(mode, result, whole, start, Shard(dim, x.shape[dim] // int(step)) if in_rank_order else V, in_rank_order)


def _is_whole(mode: Session, x: Tensor, type_: TensorType, start: RankValue) -> bool:
    """Returns whether the ranks, each of which takes a part of `x` from its `start` on, all hold the same `x`.

    Raises:
        SpmdTypeError: `x` holds random numbers, which ranks have drawn from different seeds.
    """
    for atom in atoms_of(tuple(start.names), mode.mesh):
        spmd_type = type_.get(atom) or V
        if spmd_type.letter in SAME:
            continue
        origin = origins_of(x).get(atom)
        if spmd_type is V and origin is not None and origin.letter == "V":
            raise SpmdTypeError(
                f"a part of {shown(x, type_)} by rank at {call_site()}",
                f"on {atom} each rank takes its part of different random numbers, so the parts do not make up one "
                "tensor",
                where_from=[f"it is V on {atom} since {origin}"],
                repairs=[f"one seed on all ranks of {atom}"],
                axis=atom,
                rule="parts_of_differing",
            )
        return False
    return True
