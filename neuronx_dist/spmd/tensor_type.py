"""The type of a tensor, one of R, I, V, P, S(i) per mesh axis, and its storage on tensors.

Types are interned: two that are equal are one object, so that the checker compares and caches them by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..torch_internals.tensors import version_of
from .types import UNIFORM, ZERO, I, R, Shard, SpmdType, V, dual

__all__ = [
    "COUNTED",
    "EQUAL",
    "Extra",
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
        rest: the type on every other axis; R for tensors made of constants alone.
        sharded: whether any of the types is S.
        shaped: whether results depend on shapes: the tensor is sharded, or a constant.
        graded: whether results depend on receiving a gradient: the tensor is I, or a constant.
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
        """Returns the type with another one on `axis` (None: not known there)."""
        types = {name: old for name, old in self.types.items() if name != axis}
        if spmd_type is not None:
            types[axis] = spmd_type
        return TensorType.of(types, self.rest)

    def of_gradient(self) -> TensorType:
        """Returns the type of the gradient."""
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
        """Saves no types with tensors: anybody must be able to read a file, also with `weights_only=True`."""
        return OrderedDict, ()


UNTYPED = TensorType.of({})
EQUAL = TensorType.of({}, R)  # equal on all ranks of all axes
ZERO_TYPE = TensorType.of({}, ZERO)
UNIFORM_TYPE = TensorType.of({}, UNIFORM)


class Origin:
    """Place where a tensor received its type on some axis, for messages.

    Attributes:
        what: in words: "contraction over a sharded dim in linear".
        where: `file:line` of the user's code.
        module: path of the module whose forward contained it, or "".
        letter: letter of that type; the origin does not concern a tensor with another type there.
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
    """The checker's knowledge of one tensor.

    Attributes:
        type: its type.
        origins: axis -> Origin, for axes whose type has an origin worth reporting; or None.
        session: serial number of the mode that wrote the note; 0: written outside of any mode.
        version: torch's version counter at that time: a higher one means that the memory was written since.
        extra: `Segments` of a flat buffer, `READONLY` for the result of `.data`, `FRESH` for random numbers without
            a declaration, `COUNTED` for 0, 1, 2, ..., `Offset`, `Foreign`, `Stacked` or
            `GatheredRows` (handlers/{lookups,stacks,own_rows}.py); or None.
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
NAME = "_spmd_name"  # the user's name of the tensor: "layers.3.mlp.down_proj.weight"
READONLY = "readonly"
FRESH = "fresh"
COUNTED = "counted"


class Extra:
    """Base of the objects that a note may hold beside a type: never copied, and not saved."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> Extra:
        return self

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class Offset(Extra):
    """Equal numbers counted from this rank's first position (positions in its piece of a table), or masks of them.

    See `checking/types/handlers/lookups.py`.

    Attributes:
        axes: axes over which the first position differs.
        is_mask: whether the values are bools.
        shift: of positions: the number subtracted on each rank, where it is known.
        true: of a mask: the positions where it is True on each rank, where they are known.
    """

    __slots__ = ("axes", "is_mask", "shift", "true")

    def __init__(self, axes: frozenset[str], is_mask: bool = False, shift: Any = None, true: Any = None) -> None:
        self.axes, self.is_mask, self.shift, self.true = axes, is_mask, shift, true


class Foreign(Extra):
    """Rows looked up in a piece of a table; arbitrary at positions whose rows other ranks hold.

    Attributes:
        axes: axes over which the table is divided.
        first: the position that each rank's first row stands for, where it is known.
        count: number of rows of a piece.
    """

    __slots__ = ("axes", "count", "first")

    def __init__(self, axes: frozenset[str], first: Any = None, count: int = 0) -> None:
        self.axes, self.first, self.count = axes, first, count


class Stacked(Extra):
    """Shards of the ranks of `axes`, stacked on a new dim.

    Attributes:
        axes: names, with commas.
        ranks: the new dim.
        dim: the dim that was sharded.
    """

    __slots__ = ("axes", "dim", "ranks")

    def __init__(self, axes: str, ranks: int, dim: int) -> None:
        self.axes, self.ranks, self.dim = axes, ranks, dim


class Segments:
    """A flat buffer that holds several tensors one after the other along `dim`: `(size, type, origins)` of each.

    `blocks`: number of repetitions along dim 0 (in the result of an all-gather of such a buffer).
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
    """Returns the note of a tensor, None if there is none."""
    fields = x.__dict__.get(NOTE)
    if fields is None or fields[0].__class__ is not TensorType:  # the latter from a file: see `__reduce__`
        return None
    return _new_note(Note, fields)


def type_of(x: torch.Tensor) -> TensorType | None:
    """Returns the type of a tensor, None if it has none."""
    fields = x.__dict__.get(NOTE)
    return fields[0] if fields is not None and fields[0].__class__ is TensorType else None


def origins_of(x: torch.Tensor) -> dict[str, Origin]:
    """Returns the origins of a tensor's type, by axis; empty if there is no type."""
    note = note_of(x)
    return (note.origins if note is not None else None) or {}


def version(x: torch.Tensor) -> int:
    """Returns torch's version counter; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else version_of(x)


def without_shards(type_: TensorType) -> TensorType:
    """Returns the type at level L, where S is V."""
    return TensorType.of({axis: V if spmd_type.letter == "S" else spmd_type for axis, spmd_type in type_}, type_.rest)


def tensors_in(result: Any) -> Sequence[torch.Tensor]:
    """Returns the tensors in nested tuples and lists, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, (tuple, list)):
        return ()
    return [x for item in result for x in ((item,) if isinstance(item, torch.Tensor) else tensors_in(item))]


def write(x: torch.Tensor, type_: TensorType, origins: Any = None, session: int = 0, extra: Any = None) -> None:
    """Writes a type on a tensor."""
    x.__dict__[NOTE] = (type_, origins, session, version(x), extra)
