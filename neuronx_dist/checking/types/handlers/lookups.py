"""Lookups in a table of which each rank holds a piece: foreign rows must be masked before the sum over ranks.

    local = ids - first                          offset positions: equal numbers, less this rank's own first position
    outside = (ids < first) | (ids >= end)       the same, as a mask
    out = table[local.masked_fill(outside, 0)]   foreign rows: right where this rank holds the position, else anything
    out = out.masked_fill(outside[..., None], 0) masked: summands

Types do not tell the third from the fourth, both vary: `Offset` and `Foreign` on the note of a tensor do. They pass
from operands to results. A sum over the ranks of a `Foreign` tensor is refused, and so is a mask that is known to keep
other positions than the rank holds (`rank_ranges.py`). It is assumed that the mask belongs to the same `ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....call_site import call_site
from ....comm.ranks.rank_values import rank_values_in
from ....rules import Rule
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Foreign, Note, Offset, TensorType
from ....spmd.types import DIFFERING, Shard, V
from ..judge import LOOKUPS, Judgement
from ..messages.explain import shown
from ..session import Session
from .rank_ranges import PerRank, complement, misses, shift_of, where_true

__all__ = ["assumed_masked", "lookup_note"]

_LOOKUPS = frozenset((*LOOKUPS, "embedding", "take"))
_BY_MASK = frozenset(("masked_fill", "where", "index_put", "getitem", "setitem", "masked_select"))
_PRODUCTS = frozenset(("mul", "multiply", "rmul", "imul"))


def _carrying(notes: Sequence[Note], kind: type[Offset] | type[Foreign]) -> frozenset[str]:
    """The axes over which some operand is `Offset`, or `Foreign`."""
    axes: frozenset[str] = frozenset()
    for note in notes:
        if isinstance(note.extra, kind):
            axes |= note.extra.axes
    return axes


def _of(note: Note, kind: type[Offset] | type[Foreign], axis: str) -> bool:
    return isinstance(note.extra, kind) and axis in note.extra.axes


def assumed_masked(rule: Rule, notes: Sequence[Note], judgement: Judgement) -> Judgement:
    """The judgement of a call, with another assumption if it looks up offset positions."""
    tables = _tables(rule, notes)
    if not tables or not judgement.assumed:
        return judgement
    over = ", ".join(sorted(tables))
    text = f"{rule.name}: that what it looks up for positions of other ranks over {over} is masked"
    return judgement._replace(assumed=(text,))


def _tables(rule: Rule, notes: Sequence[Note]) -> frozenset[str]:
    """The axes over which a call looks up offset positions in a shard."""
    if rule.name not in _LOOKUPS:
        return frozenset()
    return frozenset(
        axis for axis in _carrying(notes, Offset) if any(isinstance(note.type.get(axis), Shard) for note in notes)
    )


def lookup_note(
    mode: Session,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    notes: Sequence[Note],
    result: Any,
    type_: TensorType,
) -> Offset | Foreign | None:
    """`Note.extra` for lookups, of a call's result of type `type_`."""
    axes: set[str] = set()
    if mode.symbolic:
        axes = {atom for value in rank_values_in((args, kwargs)) for atom in mode.atoms(tuple(value.names))}
    offset, foreign = _carrying(notes, Offset), _carrying(notes, Foreign)
    if not (axes or offset or foreign):
        return None
    tables = _tables(rule, notes)
    masked = {axis for axis in foreign if _masks(rule, tensors, notes, axis)}
    if masked:
        _check_mask(mode, rule, tensors, notes)
    left = {axis for axis in (foreign - masked) | tables if type_.get(axis) is V}
    if left:
        known = next((note.extra for note in notes if isinstance(note.extra, Foreign)), None)
        first, count = (known.first, known.count) if known is not None else _rows(tensors, notes, tables)
        return Foreign(frozenset(left), first, count)
    is_mask = isinstance(result, Tensor) and (result.dtype is torch.bool or _made_of_masks(notes))
    if not isinstance(result, Tensor) or (result.dtype.is_floating_point and not is_mask):
        return None  # it is a position or a mask no more
    shifted = {
        axis
        for axis in offset | axes
        if type_.get(axis) is V
        and all(_of(note, Offset, axis) or (note.type.get(axis) or V).letter not in DIFFERING for note in notes)
    }
    if not shifted:
        return None
    if len(shifted) > 1:
        return Offset(frozenset(shifted), is_mask)
    true = where_true(rule, args, notes) if is_mask else None
    return Offset(frozenset(shifted), is_mask, None if is_mask else shift_of(rule, args, notes), true)


def _rows(tensors: Sequence[Tensor], notes: Sequence[Note], tables: frozenset[str]) -> tuple[PerRank | None, int]:
    """The position on each rank of the first row of its piece, and the number of rows."""
    shift = next((note.extra.shift for note in notes if isinstance(note.extra, Offset)), None)
    for x, note in zip(tensors, notes):
        for axis in tables:
            shard = note.type.get(axis)
            if isinstance(shard, Shard) and len(tables) == 1:
                return shift, x.shape[shard.dim]
    return None, 0


def _made_of_masks(notes: Sequence[Note]) -> bool:
    offsets = [note.extra for note in notes if isinstance(note.extra, Offset)]
    return bool(offsets) and all(offset.is_mask for offset in offsets)


def _masks(rule: Rule, tensors: Sequence[Tensor], notes: Sequence[Note], axis: str) -> bool:
    """Returns whether this call multiplies or selects by a mask that varies over the axis."""
    name = rule.name.strip("_")
    if name in _PRODUCTS:
        return any(_of(note, Offset, axis) for note in notes)
    return name in _BY_MASK and any(
        x.dtype is torch.bool and note.type.get(axis) is V for x, note in zip(tensors, notes)
    )


def _check_mask(mode: Session, rule: Rule, tensors: Sequence[Tensor], notes: Sequence[Note]) -> None:
    """Checks that a mask keeps the positions that each rank holds, if both are known.

    Raises:
        SpmdTypeError: the mask keeps other positions.
    """
    rows = [(index, note.extra) for index, note in enumerate(notes) if isinstance(note.extra, Foreign)]
    masks = [note.extra for note in notes if isinstance(note.extra, Offset)]
    if len(rows) != 1 or len(masks) != 1 or rows[0][1].first is None or masks[0].true is None:
        return
    (index, foreign), positions, name = rows[0], masks[0].true, rule.name.strip("_")
    if name in ("masked_fill", "index_put", "setitem") or (name == "where" and index == len(notes) - 1 and index > 1):
        positions = tuple(map(complement, positions))
    wrong = misses(positions, foreign.first, foreign.count)
    if wrong:
        raise SpmdTypeError(
            f"{rule.name}({shown(tensors[index], notes[index].type)}) at {call_site()}",
            f"the mask does not match the positions that each rank holds: {wrong}",
            repairs=["(ids >= first) & (ids < first + count), with first = rank * count, is what a rank holds"],
            axis=min(foreign.axes),
            rule="mask",
        )
