"""The positions of a table that a mask keeps on each rank, from comparisons with the rank's bounds.

`local = ids - first` are positions less a shift, `(ids < first) | (local >= count)` a mask: on each rank a set of
positions, which is a tuple of intervals [from, to). Other positions and masks are not known (None), and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....comm.ranks.rank_values import RankValue
from ....rules import Rule
from ....spmd.tensor_type import Note, Offset

__all__ = ["PerRank", "Set", "complement", "misses", "shift_of", "where_true"]

PerRank = tuple[int, ...]
Set = tuple[tuple[float, float], ...]  # intervals in order

_EVERY = float("inf")
_COMPARISONS: dict[str, Callable[[float], Set]] = {
    "lt": lambda c: ((-_EVERY, c),),
    "le": lambda c: ((-_EVERY, c + 1),),
    "gt": lambda c: ((c + 1, _EVERY),),
    "ge": lambda c: ((c, _EVERY),),
}
_NAMES = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
_UNIONS = ("or", "bitwise_or", "logical_or", "ior")
_SECTIONS = ("and", "bitwise_and", "logical_and", "iand")
_COMPLEMENTS = ("invert", "bitwise_not", "logical_not")
_KEEPING = frozenset(
    "masked_fill where index_put setitem clamp clamp_min clamp_max clip remainder mod fmod clone contiguous to long "
    "int float double half bfloat16 bool type type_as detach".split()
)


def _name(rule: Rule) -> str:
    name = rule.name.strip("_")
    return _NAMES.get(name, name)


def _number(value: Any, count: int | None) -> PerRank | None:
    """The value of a number on each rank of the axis; None if it differs over other axes, or is no number."""
    if isinstance(value, RankValue):
        return value.table.values if len(value.names) == 1 and count in (None, value.table.count) else None
    return (value,) * count if isinstance(value, int) and not isinstance(value, bool) and count else None


def shift_of(rule: Rule, args: tuple[Any, ...], notes: Sequence[Note]) -> PerRank | None:
    """The shift on each rank: positions of the full table minus the numbers of the result."""
    shifts = [note.extra.shift for note in notes if isinstance(note.extra, Offset) and note.extra.shift is not None]
    name = _name(rule)
    if name in ("sub", "subtract", "isub", "add", "iadd") and len(notes) == 1 and len(args) == 2:
        shift = shifts[0] if shifts else None
        number = _number(args[1], len(shift) if shift is not None else None)
        if number is None or (shift is None and isinstance(notes[0].extra, Offset)):
            return None
        sign = -1 if "add" in name else 1
        return tuple(a + sign * b for a, b in zip(shift or (0,) * len(number), number))
    if len(shifts) != 1:
        return None
    masks = [note for note in notes if isinstance(note.extra, Offset) and note.extra.is_mask]
    keeps_shift = rule.aliases or name in _KEEPING or (name in ("mul", "multiply", "imul") and len(masks) == 1)
    return shifts[0] if keeps_shift else None


def where_true(rule: Rule, args: tuple[Any, ...], notes: Sequence[Note]) -> tuple[Set, ...] | None:
    """The positions at which a mask is True, on each rank."""
    name = _name(rule)
    known = [note.extra.true for note in notes if isinstance(note.extra, Offset) and note.extra.true is not None]
    if name in _COMPARISONS and len(notes) == 1 and len(args) == 2 and isinstance(args[0], Tensor):
        offset = notes[0].extra
        shift = offset.shift if isinstance(offset, Offset) else None
        bound = _number(args[1], len(shift) if shift is not None else None)
        if bound is None or (isinstance(offset, Offset) and shift is None):
            return None
        return tuple(_COMPARISONS[name](a + b) for a, b in zip(bound, shift or (0,) * len(bound)))
    if len(known) == len(notes) == 2 and name in _UNIONS:
        return tuple(complement(_section(complement(a), complement(b))) for a, b in zip(*known))
    if len(known) == len(notes) == 2 and name in _SECTIONS:
        return tuple(_section(a, b) for a, b in zip(*known))
    if len(known) != 1 or len(notes) != 1:
        return None
    if name in _COMPLEMENTS:
        return tuple(map(complement, known[0]))
    return known[0] if rule.aliases or name in _KEEPING else None


def complement(positions: Set) -> Set:
    borders = [-_EVERY, *(border for interval in positions for border in interval), _EVERY]
    return tuple((a, b) for a, b in zip(borders[::2], borders[1::2]) if a < b)


def _section(one: Set, other: Set) -> Set:
    return tuple((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


def misses(masks: Sequence[Set], first: PerRank, count: int) -> str:
    """The difference between the positions that a mask keeps and those that ranks hold, in words; "" if none.

    A rank holds `count` positions from its `first`. Positions at the end of the table that no rank keeps are padding.
    """
    whole: Set = ((0, max(first) + count),)
    ends = []
    for rank, (positions, start) in enumerate(zip(masks, first)):
        inside = _section(positions, whole)
        ranges = " and ".join(f"{a} to {b - 1}" for a, b in inside) or "none"
        wrong = f"on rank {rank} it keeps positions {ranges}, and the rank holds {start} to {start + count - 1}"
        if inside and (len(inside) > 1 or inside[0][0] != start or inside[0][1] > start + count):
            return wrong
        ends.append((start, inside[0][1] if inside else start, wrong))
    ends.sort()
    for (_, end, wrong), (start, next_end, _) in zip(ends, ends[1:]):
        if end < start and next_end > start:
            return wrong
    return ""
