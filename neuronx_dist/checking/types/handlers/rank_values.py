"""Numbers that differ by rank, in the arguments of torch functions: values, positions, and what decides shapes.

A `RankValue` (comm/rank_values.py) as a value or a position makes a result vary over its axes. Where it decides the
shape of a result, the ranks run different programs, which is a *read*: the check then plays them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from torch import Tensor

from ....comm.rank_values import RankValue, concrete, rank_values_in
from ....spmd.axes import atoms_of
from ....spmd.tensor_type import COUNTED, Note, note_of
from ....spmd.types import R, Shard, SpmdType, V
from ..rules import Rule
from ..rules.spec import Spec
from ..session import Session

__all__ = ["Pieces", "counted", "counts", "picked", "rank_values"]

_VALUES = {"tensor", "full", "full_like", "new_full", "scalar_tensor", "as_tensor", "new_tensor", "asarray"}
_POSITIONS = {"narrow", "select", "__getitem__", "getitem", "roll", "index_select"}
_CUTS = {"chunk", "split", "split_with_sizes", "tensor_split", "unbind"}


def rank_values(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankValue]:
    """The RankValues in a call that are values or positions; those that decide a shape are read."""
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
    """Lengths of the slices in an index, where both ends are given."""
    if isinstance(index, slice):
        start, stop = index.start or 0, index.stop
        return [start] if stop is None else [stop - start]
    if isinstance(index, (tuple, list)):
        return [width for item in index for width in _widths(item)]
    return []


def counts(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes 0, 1, 2, ..."""
    return rule.name == "arange" and len(args) == 1 and not kwargs.keys() & {"start", "end", "step", "out"}


def counted(rule: Rule, spec: Spec, tensors: Sequence[Tensor], notes: Sequence[Note]) -> Spec:
    """Gives `x[arange(len(x))[:, None], i]` a spec in which dim 0 of x stays, though a tensor indexes it."""
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
    """The pieces that a function cuts a tensor into: `pieces[rank]` is another one on every rank."""

    _pick: Callable[[RankValue], Tensor]

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return self._pick(index) if isinstance(index, RankValue) else super().__getitem__(index)


def picked(mode: Session, rule: Rule, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that cuts a tensor, such that picking a piece by rank is seen."""
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
        atoms = atoms_of(tuple(index.names), mode.mesh) if mode.mesh is not None else ()
        own = len(index.names) == 1 and index.table.values == tuple(range(len(pieces))) and rule.name != "unbind"
        type_ = note.type
        for atom in atoms:
            before = type_.get(atom)
            spmd_type: SpmdType = Shard(dim % piece.dim()) if own and before is R and mode.level == "G" else V
            if before is None or before.letter != "P":
                type_ = type_.with_axis(atom, spmd_type)
        mode.stamp(piece, type_, note.origins, note.extra)
        return piece

    pieces._pick = pick
    return pieces
