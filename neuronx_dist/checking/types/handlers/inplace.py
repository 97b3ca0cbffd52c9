"""Writes in place: the types that a tensor may get, and those of other tensors over the same memory.

A write through the checker is stored by memory and version. A tensor that is used later with another version counter
either finds that write, or was written where the checker does not see it, which is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ....call_site import call_site
from ....rules import Rule
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import NAME, NOTE, READONLY, ZERO_TYPE, Foreign, Note, TensorType, note_of, type_of, version
from ....spmd.types import SAME, UNIFORM, VARYING, ZERO, R, Shard, SpmdType, V, scaled
from ....torch_internals.autograd import in_backward
from ....torch_internals.tensors import base_of_view, is_view, storage_key
from ....torch_internals.transforms import is_functorch_wrapped_tensor
from ..messages.explain import data_error, shown, write_error
from ..session import Session

__all__ = ["OVERWRITES", "check_write", "last_write", "note_write", "overwritten", "shard_zeros", "stale"]

_MOST = 10_000

# Functions that write every element, so that the former values do not matter.
OVERWRITES = {Tensor.copy_, Tensor.zero_, Tensor.fill_, torch.fill_, torch.zero_}


def overwritten(type_: TensorType) -> TensorType:
    """An operand that is fully overwritten contributes its sharding, not its values."""
    if not type_.sharded:
        return ZERO_TYPE
    return TensorType.of({axis: spmd_type for axis, spmd_type in type_ if isinstance(spmd_type, Shard)}, ZERO)


def check_write(
    mode: Session, rule: Rule, target: Tensor, type_: TensorType, tensors: Sequence[Tensor], notes: Sequence[Note]
) -> None:
    """Checks that a write may make `target` a tensor of type `type_`.

    Raises:
        SpmdTypeError: it receives a gradient, or is a parameter, and would have another type; or came from `.data`.
    """
    note = note_of(target)
    if note is None:
        return
    if note.extra == READONLY:
        raise data_error(mode, rule.name, target, note)
    old = note.type
    if old is type_:
        return
    differentiable = target.requires_grad
    declared = isinstance(target, nn.Parameter)
    if not differentiable and not declared:
        return
    view = differentiable and is_view(target)
    for axis in sorted({*old.types, *type_.types}):
        before, after = old.get(axis), type_.get(axis)
        if _keeps(before, after) and not (view and f"{before}{after}" in ("RI", "IR")):
            continue
        raise write_error(mode, rule.name, target, tensors, [note.type for note in notes], axis, after)


# Writes after which a tensor keeps its type: its letter -> letters of the type that the write would give it.
_TAKES = {
    "R": frozenset("RI0"),  # one value on all ranks
    "I": frozenset("RI0"),
    "V": frozenset("SRI0"),  # an equal value may stand for each rank's own
    "S": frozenset("VRI0"),
    "P": frozenset("P0"),  # a summand, or nothing
}


def _keeps(before: SpmdType | None, after: SpmdType | None) -> bool:
    """Returns whether a tensor of type `before` may keep it after a write that would make it `after`."""
    if before is after or before is None or after is None:
        return True
    if after.letter in _TAKES.get(before.letter, ()):
        return (before.reduction, before.scale) == (after.reduction, after.scale) or after.letter == "0"
    return _one(before, after)


def _one(before: SpmdType | None, after: SpmdType | None) -> bool:
    """Returns whether two types are equal apart from the dims of which a shard was merged."""
    if isinstance(before, Shard) and isinstance(after, Shard):
        return replace(before, extent=None, part=None) == replace(after, extent=None, part=None)
    return before == after


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view made under no_grad, of a parameter that was written since
        return True


def note_write(mode: Session, target: Tensor, type_: TensorType, origins: Any, extra: Any = None) -> None:
    """Records the type that a write in place gave `target`, for other tensors over its memory too."""
    old = type_of(target)
    # A write that autograd did not see leaves the gradient as it was.
    unseen = target.requires_grad and not torch.is_grad_enabled()
    if unseen and old is not None and _is_leaf(target):  # of zeros it is not known yet
        unseen = old.rest not in (ZERO, UNIFORM) and not any(
            spmd_type is ZERO or spmd_type is UNIFORM for _, spmd_type in old
        )
    new = old if old is not None and (unseen or isinstance(target, nn.Parameter)) else type_
    mode.stamp(target, new, origins, extra)
    if _has_no_memory(target):  # no other tensor is over its memory
        return
    known = last_write(mode, target)
    if known is None:
        storage = target.untyped_storage()
        if len(mode.writes) > _MOST:
            mode.writes = {key: write for key, write in mode.writes.items() if write.memory() is not None}
        known = mode.writes[storage_key(storage)] = Writes(ref(storage))
    known.version = version(target)
    if old is not None:
        full = target.numel() * target.itemsize == target.untyped_storage().nbytes() and target.is_contiguous()
        seen = target.requires_grad and torch.is_grad_enabled()
        known.kinds[old, new, full, seen] = version(target)


def shard_zeros(mode: Session, part: Tensor, type_: TensorType) -> None:
    """Makes an empty tensor a shard, before a shard is written to slices of its other dims.

    Zeros are a shard too. A slice of the sharded dim itself would be no part of the shard.
    """
    whole = base_of_view(part)
    if whole is None:
        return
    known = [(x, note) for x in (part, whole) if (note := note_of(x)) is not None]
    if [note[2:4] for _, note in known] != [(mode.session, version(part))] * 2:
        return
    for x, note in known:
        types = {axis: s for axis, s in type_ if _has_all(part, whole, s) and note.type.get(axis) is ZERO}
        if types:
            mode.stamp(x, TensorType.of({**note.type.types, **types}, note.type.rest), note.origins, note.extra)


def _has_all(part: Tensor, whole: Tensor, spmd_type: SpmdType) -> bool:
    """Returns whether slices of a contiguous tensor have all positions of the dim that is sharded."""
    if not isinstance(spmd_type, Shard) or spmd_type.part is not None or not whole.is_contiguous():
        return False
    if part.stride() != whole.stride() or part.shape[spmd_type.dim] != whole.shape[spmd_type.dim]:
        return False
    rest, starts = part.storage_offset() - whole.storage_offset(), []
    for stride in whole.stride():
        starts.append(rest // max(stride, 1))
        rest -= starts[-1] * stride
    return all(start + size <= full for start, size, full in zip(starts, part.shape, whole.shape))


def _has_no_memory(x: Tensor) -> bool:
    """Returns whether a tensor is no strided view of some memory: a sparse one, or one that torch.func wraps."""
    return x.layout is not torch.strided or is_functorch_wrapped_tensor(x)


class Writes:
    """The writes to one piece of memory.

    Attributes:
        version: torch's counter after the last one.
        memory: weak reference to the storage, so that another one at its address does not count as it.
        kinds: `(type of the target before, after, whether the target is all of the memory, whether the write gave it
            a gradient)` -> version after the last write of that kind.
    """

    __slots__ = ("kinds", "memory", "version")

    def __init__(self, memory: Any) -> None:
        self.memory, self.version = memory, 0
        self.kinds: dict[tuple[TensorType, TensorType, bool, bool], int] = {}


def last_write(mode: Session, x: Tensor) -> Writes | None:
    """The writes to the memory of `x`, None if there were none."""
    if _has_no_memory(x):
        return None
    storage = x.untyped_storage()
    known: Writes | None = mode.writes.get(storage_key(storage))
    return known if known is not None and known.memory() is storage else None


def stale(mode: Session, x: Tensor, note: Note) -> Note:
    """The note of a tensor whose memory was written after the note.

    Raises:
        SpmdTypeError: the checker saw no such write; or the type that was written does not fit the tensor's.
    """
    known = last_write(mode, x)
    kinds: list[tuple[TensorType, TensorType, bool, bool]] = []
    if known is not None and known.version == version(x):
        in_order = sorted(known.kinds.items(), key=lambda item: item[1])
        kinds = [kind for kind, version in in_order if version > note.version]
    else:
        if not in_backward() and not (x.grad_fn is None and isinstance(x, nn.Parameter)):
            raise SpmdTypeError(
                f"{shown(x, note.type)} was written in place where the checker does not see it, before {call_site()}",
                "its new value may have another type",
                repairs=["write to it by torch functions, inside of the check", "make a new tensor"],
                rule="stale",
            )  # autograd and optimizers write what they made
    type_ = note.type
    for old, new, full, differentiable in kinds:
        types: dict[str, SpmdType] = {}
        for axis in sorted({*type_.types, *old.types, *new.types}):
            before, after = type_.get(axis), new.get(axis)
            if before is None or after is None:
                kind = before
            elif isinstance(x, nn.Parameter) or (x.requires_grad and not differentiable):
                # The tensor keeps its type, whichever view of it was written.
                kind = before if after == old.get(axis) or _keeps(before, after) else None
            else:
                kind = _joined(before, old.get(axis), after, full, differentiable)
            if kind is None and before is not None:
                name = x.__dict__.get(NAME) or ("a parameter" if isinstance(x, nn.Parameter) else "")
                raise SpmdTypeError(
                    f"{name + ' ' if name else ''}{shown(x, type_)} was written through another view of its memory, "
                    f"before {call_site()}",
                    f"on {axis} it is {before}, but the written part is {after}: the whole has neither type"
                    + (", and what has a gradient keeps its type" if x.requires_grad else ""),
                    axis=axis,
                    rule="inplace",
                )
            if kind is not None:
                types[axis] = kind
        rest = type_.rest
        if rest is not None and new.rest is not None:
            rest = _joined(rest, old.rest, new.rest, full, differentiable) or rest
        type_ = TensorType.of(types, rest)
    extra = None if isinstance(note.extra, Foreign) else note.extra  # it may have been masked through another view
    fresh = note._replace(type=type_, session=mode.session, version=version(x), extra=extra)
    x.__dict__[NOTE] = tuple(fresh)  # `stamp` would ask torch whether it has a version, which is recorded as a call
    return fresh


def _joined(
    current: SpmdType, old: SpmdType | None, new: SpmdType, full: bool, differentiable: bool
) -> SpmdType | None:
    """The type of a tensor of type `current`, after a view of its memory went from `old` to `new`; None: it has none.

    `full`: the view is all of the memory, so that nothing else is left in it.
    """
    if new is not ZERO and current is not ZERO and current.scale != new.scale:
        return new if full else None
    if getattr(new, "along", None):  # dims of the view
        new = scaled(R, new.scale)
    if current.letter == "R" and current.base is not R and not full and new.letter in "R0":
        return scaled(R, current.scale)  # constants, and now others in between
    if _one(current, new) and (_one(old, new) or current.letter != "S"):
        return current
    if new.letter == "P" or current.letter == "P":
        if new is ZERO or current is ZERO or (full and new.letter != "S"):
            return current if new is ZERO else new
        return None
    if new.letter in VARYING:
        return current if current.base is V or (_one(old, new) and current.letter == "S") else scaled(V, current.scale)
    if full:
        stays = (current.base is R or current.letter == "I") and new.letter in SAME and not differentiable
        return current if stays else new
    if current.letter in VARYING:  # constants are as sharded as the tensor that they were written to
        constant = new is ZERO or new is UNIFORM
        return current if constant and old is not None and old.letter == current.letter else scaled(V, current.scale)
    if new is ZERO or new is UNIFORM:
        return current if current.letter in SAME and current is not UNIFORM else R
    return new if differentiable or current is ZERO or current is UNIFORM else current
