"""This rank's rows put among rows that were gathered without a gradient, as contrastive losses do.

The result is equal on all ranks, and its gradient reaches each rank's rows alone: that of `all_gather(S, I)`, if the
rows replace the gathered copy of themselves. Gathered rows are followed for this by their memory (`GatheredRows`, on
the note), through copies, pieces and slices. Elsewhere no type of the parts says what the result is, and the operator
is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .... import comm
from ....comm.context import AxisLike
from ....rules import Rule
from ....rules.names import CATS
from ....spmd.errors import Violation
from ....spmd.tensor_type import Extra, Note, note_of, version
from ....spmd.types import SAME, I, Shard, V
from ....torch_internals.tensors import base_of_view, has_storage
from ..judge import Operand
from ..session import Session
from .inplace import note_write

__all__ = ["among_gathered", "check_own_rows", "gathered_rows", "note_whole", "placed", "rows_note"]

_COPIES = {"clone", "contiguous", "detach"}


class GatheredRows(Extra):
    """A contiguous tensor of the ranks' pieces, gathered along dim 0 without a gradient, or a view of it.

    Attributes:
        axis, atom: axis of the gather, as it was passed, and its name in types.
        memory, first, written: storage of the gathered tensor, weakly referenced, the offset of its first element, and
            its version.
        source, layout, version: storage of this rank's piece; its offset, shape and strides; its version then.
    """

    __slots__ = ("atom", "axis", "first", "layout", "memory", "source", "version", "written")

    def __init__(self, axis: AxisLike, atom: str, x: Tensor, result: Tensor) -> None:
        self.axis, self.atom = axis, atom
        self.source, self.layout, self.version = ref(x.untyped_storage()), _layout(x), version(x)
        self._is_in(result)

    def _is_in(self, gathered: Tensor) -> None:
        self.memory, self.first = ref(gathered.untyped_storage()), gathered.storage_offset()
        self.written = version(gathered)

    def in_memory_of(self, copy: Tensor) -> GatheredRows:
        """Returns the same rows, of a copy."""
        rows = object.__new__(GatheredRows)
        for name in self.__slots__:
            setattr(rows, name, getattr(self, name))
        rows._is_in(copy)
        return rows

    def is_source(self, x: Tensor) -> bool:
        """Returns whether `x` holds the values that this rank gave to the gather."""
        here = has_storage(x) and x.untyped_storage() is self.source()
        return here and _layout(x) == self.layout and version(x) == self.version

    def start(self, x: Tensor) -> int | None:
        """Returns the position of the first row of `x` among all rows; None: it is elsewhere."""
        shape = self.layout[1]
        width = shape[1:].numel()
        is_here = x.untyped_storage() is self.memory() and version(x) == self.written
        is_rows = is_here and x.shape[1:] == shape[1:] and x.is_contiguous()
        return (x.storage_offset() - self.first) // width if width and is_rows else None


def _layout(x: Tensor) -> Any:
    return x.storage_offset(), x.shape, x.stride()


def gathered_rows(x: Tensor, note: Note, axis: AxisLike, axes: Sequence[str], result: Tensor) -> GatheredRows | None:
    """`Note.extra` of the result of a gather of the shard `x`; None: it has a gradient, or no rows are put into it."""
    if len(axes) != 1 or note.type.get(axes[0]) != Shard(0) or result.requires_grad or not x.is_floating_point():
        return None
    if not (torch.is_grad_enabled() or x.requires_grad) or not (has_storage(x) and result.is_contiguous()):
        return None  # without gradients no loss is computed: weights and statistics are gathered
    return GatheredRows(axis, axes[0], x, result)


def rows_note(rule: Rule, notes: Sequence[Note], result: Any) -> GatheredRows | None:
    """`Note.extra` of a call's result: gathered rows of copies and views of gathered rows."""
    rows = notes[0].extra if notes else None
    if not isinstance(rows, GatheredRows):
        return None
    if rule.aliases and rule.name not in _COPIES:
        return rows
    return rows.in_memory_of(result) if rule.name in _COPIES and result.is_contiguous() else None


def placed(
    rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor], notes: Sequence[Note]
) -> GatheredRows | None:
    """The gathered rows among, or over, which a call puts this rank's rows at the place of the copy of themselves."""
    rows = next((note.extra for note in notes if isinstance(note.extra, GatheredRows)), None)
    if rows is None or kwargs not in ({}, {"dim": 0}) or sum(map(rows.is_source, tensors)) != 1:
        return None
    count, size = rows.layout[1][0], comm.size(rows.axis)
    if rule.name in CATS:
        ends = [0, *accumulate(x.shape[0] for x in tensors)]
        begin = next(start for start, x in zip(ends, tensors) if rows.is_source(x))
        others = [(start, x, note) for start, x, note in zip(ends, tensors, notes) if not rows.is_source(x)]
        fits = all(note.extra is rows and (not len(x) or rows.start(x) == start) for start, x, note in others)
        found = fits and ends[-1] == count * size and args[1:] in ((), (0,)) and begin == _start(rows)
    elif rule.name == "index_put" and args[3:] in ((), (False,)):
        index = args[2][0] if isinstance(args[2], tuple) and len(args[2]) == 1 else args[2]
        whole = notes[0].extra is rows and rows.start(tensors[0]) == 0 and len(tensors[0]) == count * size
        bounds = ((index.start or 0), index.stop, index.step or 1) if isinstance(index, slice) else ()
        found = whole and bounds == (_start(rows), _start(rows) + count, 1)
    else:  # a slice by rank is S, in the order of the ranks; any other one is at one place on all ranks
        is_slice = notes[0].extra is rows and version(tensors[0]) == rows.written
        by_rank = is_slice and notes[0].type.get(rows.atom) == Shard(0)
        found = rule.name == "copy_" and by_rank and tensors[0].shape == tensors[1].shape == rows.layout[1]
    return rows if found else None


def note_whole(mode: Session, part: Tensor, rows: GatheredRows, origins: Any) -> None:
    """Records the type of the gathered tensor, of which `part` was overwritten with this rank's rows."""
    whole = base_of_view(part)
    if whole is not None and (note := note_of(whole)) is not None:
        note_write(mode, whole, note.type.with_axis(rows.atom, I), origins)


def among_gathered(tensors: Sequence[Tensor]) -> bool:
    """Returns whether one of the tensors is this rank's shard, and others are rows of the gathered shards."""
    extras = [note.extra for x in tensors if (note := note_of(x)) is not None]
    rows = next((extra for extra in extras if isinstance(extra, GatheredRows)), None)
    return rows is not None and any(map(rows.is_source, tensors))


def _start(rows: GatheredRows) -> int:
    """Position of this rank's rows; reading the rank, the check plays the ranks one by one."""
    return int(comm.rank(rows.axis)) * rows.layout[1][0]


def check_own_rows(rule: Rule, tensors: Sequence[Tensor], operands: Sequence[Operand]) -> None:
    """Checks that no shard that receives a gradient is put among, or over, pieces of a tensor that all ranks have.

    Raises:
        Violation: one is.
    """
    if rule.name in CATS:
        others = [(operand.type, index) for index, operand in enumerate(operands) if not operand.differentiable]
    elif rule.name == "copy_" and (base := base_of_view(tensors[0])) is not None:
        note = note_of(base)
        others = [(note.type, 0)] if note is not None else []
    elif rule.name == "index_put":
        others = [(operands[0].type, 0)]
    else:
        return
    for index, operand in enumerate(operands):
        for axis, spmd_type in operand.type if operand.differentiable else ():
            for type_, other in others if isinstance(spmd_type, Shard) else ():
                held = type_.get(axis)
                if held is not None and (held.base is V or (held.letter in SAME and rule.name not in CATS)):
                    why = (
                        "this rank's rows among rows of a tensor that all ranks have: every rank computes with all of "
                        "them, and its gradient reaches its own"
                    )
                    raise Violation("own_rows", axis, why, [index, other])
