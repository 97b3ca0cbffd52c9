"""The type of a tensor: one of R, I, V, P, S(i) per mesh axis; and how it is written on tensors.

Types are interned: two that are equal are one object, so that the checker compares and caches them by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .types import UNIFORM, ZERO, I, R, Shard, SpmdType, V, dual

__all__ = [
    "COUNTED",
    "EQUAL",
    "FRESH",
    "Foreign",
    "NAME",
    "NOTE",
    "READONLY",
    "UNIFORM_TYPE",
    "UNTYPED",
    "ZERO_TYPE",
    "Note",
    "Offset",
    "Origin",
    "Segments",
    "Stacked",
    "TensorType",
    "note_of",
    "origins_of",
    "tensors_in",
    "type_of",
    "version",
    "without_shards",
    "write",
]


class TensorType:
    """Axis -> type, and `rest`: the type on axes that are not named (None: not known).

    Attributes:
        types: by axis.
        rest: what it is on every other axis; R for what the program makes of constants alone.
        sharded: whether any of them is S.
        shaped: what becomes of it depends on shapes: it is sharded, or a constant.
        graded: what becomes of it depends on whether it receives a gradient: it is I, or a constant.
    """

    __slots__ = ("types", "rest", "sharded", "shaped", "graded", "dual", "__weakref__")

    types: dict[str, SpmdType]
    rest: SpmdType | None
    sharded: bool
    shaped: bool
    graded: bool
    dual: TensorType | None

    _interned: dict[Any, TensorType] = {}

    @classmethod
    def of(cls, types: Mapping[str, SpmdType], rest: SpmdType | None = None) -> TensorType:
        named = {axis: spmd_type for axis, spmd_type in types.items() if spmd_type is not rest}
        key = (frozenset(named.items()), rest)
        type_ = cls._interned.get(key)
        if type_ is None:
            type_ = object.__new__(cls)
            type_.types = dict(sorted(named.items()))
            type_.rest = rest
            type_.sharded = any(isinstance(spmd_type, Shard) for spmd_type in named.values())
            everything = (*named.values(), rest)
            constant = any(spmd_type is ZERO or spmd_type is UNIFORM for spmd_type in everything)
            type_.shaped = (
                type_.sharded or constant or any(getattr(spmd_type, "along", None) for spmd_type in everything)
            )
            type_.graded = constant or any(spmd_type is I for spmd_type in (*named.values(), rest))
            type_.dual = None
            type_ = cls._interned.setdefault(key, type_)  # another thread may have been faster
        return type_

    def get(self, axis: str) -> SpmdType | None:
        return self.types.get(axis, self.rest)

    def with_axis(self, axis: str, spmd_type: SpmdType | None) -> TensorType:
        """The same but on `axis` (None: not known there)."""
        types = {name: old for name, old in self.types.items() if name != axis}
        if spmd_type is not None:
            types[axis] = spmd_type
        return TensorType.of(types, self.rest)

    def of_gradient(self) -> TensorType:
        """The type of the gradient."""
        if self.dual is None:
            self.dual = TensorType.of({axis: dual(spmd_type) for axis, spmd_type in self.types.items()}, self.rest)
        return self.dual

    def __iter__(self) -> Iterator[tuple[str, SpmdType]]:
        return iter(self.types.items())

    def __repr__(self) -> str:
        named = [f"{axis}: {spmd_type}" for axis, spmd_type in self.types.items()]
        return "{" + ", ".join([*named, *([f"others: {self.rest}"] if self.rest is not None else [])]) + "}"

    def __deepcopy__(self, memo: Any) -> TensorType:
        return self

    def __reduce__(self) -> Any:
        """Saved tensors have no types: a file must be read, also with `weights_only=True` by anybody."""
        return OrderedDict, ()


UNTYPED = TensorType.of({})
EQUAL = TensorType.of({}, R)  # equal on all ranks of all axes
ZERO_TYPE = TensorType.of({}, ZERO)
UNIFORM_TYPE = TensorType.of({}, UNIFORM)


class Origin:
    """Where a tensor got its type on some axis: for messages.

    Attributes:
        what: in words: "contraction over a sharded dim in linear".
        where: `file:line` of the user's code.
        module: path of the module whose forward that was in, or "".
        letter: of the type that began; it says nothing of a tensor with another type there.
    """

    __slots__ = ("letter", "module", "what", "where")

    def __init__(self, what: str, where: str, module: str = "", letter: str = "") -> None:
        self.what, self.where, self.module, self.letter = what, where, module, letter

    def __str__(self) -> str:
        parts = [part for part in (self.module, self.where) if part]
        return f"{self.what}" + (f" ({', '.join(parts)})" if parts else "")

    def __deepcopy__(self, memo: Any) -> Origin:
        return self

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class Note(NamedTuple):
    """What the checker knows of one tensor.

    Attributes:
        type: its type.
        origins: axis -> Origin, for axes whose type began somewhere worth telling; or None.
        session: serial number of the mode that wrote this; 0: written outside of any.
        version: torch's version counter then: a higher one means that somebody wrote to the memory since.
        extra: `Segments` of a flat buffer, `READONLY` for what `.data` gave, `FRESH` for random numbers of which
            nothing was declared yet, `COUNTED` for 0, 1, 2, ..., `Offset`, `Foreign` or `Stacked`
            (handlers/lookups.py, stacks.py); or None.
    """

    type: TensorType
    origins: dict[str, Origin] | None
    session: int
    version: int
    extra: Any


# A tensor holds its note as a plain tuple of the same fields, `tensor.__dict__[NOTE]`: one is made for every result of
# every call and unpacked for every operand, and making a NamedTuple takes four times as long as a tuple, unpacking one
# three times. `note_of` gives the fields their names; only the mode's fast path goes without.
NOTE = "_spmd"
NAME = "_spmd_name"  # what the user calls it: "layers.3.mlp.down_proj.weight"
READONLY = "readonly"
FRESH = "fresh"
COUNTED = "counted"


class _Extra:
    """What a note may hold beside a type: never copied, and not saved."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> _Extra:
        return self

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class Offset(_Extra):
    """Equal numbers, counted from this rank's own first position (positions in its piece of a table), or masks of them.

    See `checking/types/handlers/lookups.py`.

    Attributes:
        axes: over which the ranks differ in that.
        is_mask: it is made of bools.
        shift: of positions: what was taken off on each rank, where that is known.
        true: of a mask: the positions where it is True on each rank, where that is known.
    """

    __slots__ = ("axes", "is_mask", "shift", "true")

    def __init__(self, axes: frozenset[str], is_mask: bool = False, shift: Any = None, true: Any = None) -> None:
        self.axes, self.is_mask, self.shift, self.true = axes, is_mask, shift, true


class Foreign(_Extra):
    """What was looked up in a piece of a table by positions of which other ranks hold some: there it is anything.

    Attributes:
        axes: over which the table is in pieces.
        first: the position on each rank that its first row was taken for, where that is known.
        count: rows of a piece.
    """

    __slots__ = ("axes", "count", "first")

    def __init__(self, axes: frozenset[str], first: Any = None, count: int = 0) -> None:
        self.axes, self.first, self.count = axes, first, count


class Stacked(_Extra):
    """Shards of the ranks of `axes`, stacked on a new dim.

    Attributes:
        axes: names, with commas.
        ranks: the new dim.
        dim: the one that was sharded.
    """

    __slots__ = ("axes", "dim", "ranks")

    def __init__(self, axes: str, ranks: int, dim: int) -> None:
        self.axes, self.ranks, self.dim = axes, ranks, dim


class Segments:
    """A flat buffer that holds several tensors one after the other along `dim`: `(size, type, origins)` of each.

    `blocks`: along dim 0 it is so many times that (what an all-gather of such a buffer gives).
    """

    __slots__ = ("blocks", "dim", "parts")

    def __init__(self, dim: int, parts: tuple[tuple[int, TensorType, Any], ...], blocks: int = 1) -> None:
        self.dim, self.parts, self.blocks = dim, parts, blocks

    def __deepcopy__(self, memo: Any) -> Segments:
        return self

    def __reduce__(self) -> Any:
        return OrderedDict, ()


_new_note = tuple.__new__  # `Note(*fields)` goes through a function in Python


def note_of(x: torch.Tensor) -> Note | None:
    """What is known of a tensor, None if nothing is."""
    fields = x.__dict__.get(NOTE)
    if fields is None or fields[0].__class__ is not TensorType:  # the latter of a file: see `__reduce__`
        return None
    return _new_note(Note, fields)


def type_of(x: torch.Tensor) -> TensorType | None:
    """The type of a tensor, None if it has none."""
    fields = x.__dict__.get(NOTE)
    return fields[0] if fields is not None and fields[0].__class__ is TensorType else None


def origins_of(x: torch.Tensor) -> dict[str, Origin]:
    """Where the type of a tensor began, by axis; empty if it has none."""
    note = note_of(x)
    return (note.origins if note is not None else None) or {}


def version(x: torch.Tensor) -> int:
    """torch's version counter; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def without_shards(type_: TensorType) -> TensorType:
    """Level L: what is sharded varies."""
    return TensorType.of({axis: V if spmd_type.letter == "S" else spmd_type for axis, spmd_type in type_}, type_.rest)


def tensors_in(result: Any) -> Sequence[torch.Tensor]:
    """The tensors in nested tuples and lists, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, (tuple, list)):
        return ()
    return [x for item in result for x in ((item,) if isinstance(item, torch.Tensor) else tensors_in(item))]


def write(x: torch.Tensor, type_: TensorType, origins: Any = None, session: int = 0, extra: Any = None) -> None:
    """Writes a type on a tensor."""
    x.__dict__[NOTE] = (type_, origins, session, version(x), extra)
