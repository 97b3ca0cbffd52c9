"""`torch.vmap` and `torch.func`: types inside of a function whose tensors have hidden dims.

A tensor inside of vmap has its hidden dims before its own ones, in the order in which they were hidden: `S(0)` of a
tensor with one hidden dim means that the batch is sharded. Every function keeps hidden dims, each with a label of its
own, so that the rules need not know of them. The note of such a tensor says which it has (`Batched`).

The gradients of one sample, by `torch.func.grad` inside of vmap, are no sums over the batch: on an axis that shards a
hidden dim of the loss, the gradient is sharded along that dim, whatever the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from ....call_site import call_site
from ....rules import Rule
from ....rules.spec import Spec
from ....spmd.errors import SpmdTypeError, Violation
from ....spmd.tensor_type import Note, TensorType, note_of
from ....spmd.types import P, Shard, SpmdType, repeated, scaled
from ....spmd.watching import active
from ....torch_internals.tensors import DisableTorchFunction
from ....torch_internals.transforms import (
    ADD_BATCH_DIM,
    REMOVE_BATCH_DIM,
    UNWRAP_FOR_GRAD,
    WRAP_FOR_GRAD,
    eager_transforms,
    vmap_module,
)
from ..session import Session

__all__ = [
    "Batched",
    "batched",
    "hidden_gradient",
    "install",
    "refuse_inside",
    "refused",
    "remove",
    "seen_losses",
    "with_hidden_dims",
]


class Batched:
    """The hidden dims of a tensor: `(level, size)` of each, outermost vmap first."""

    __slots__ = ("levels",)

    def __init__(self, levels: tuple[tuple[int, int], ...]) -> None:
        self.levels = levels


def _levels(note: Note) -> tuple[tuple[int, int], ...]:
    return note.extra.levels if isinstance(note.extra, Batched) else ()


def batched(notes: Sequence[Note]) -> Batched | None:
    """The hidden dims of the result of a call; None: it has none."""
    levels = dict.fromkeys(level for note in notes for level in _levels(note))
    return Batched(tuple(sorted(levels))) if levels else None


def with_hidden_dims(spec: Spec, notes: Sequence[Note]) -> Spec:
    """The spec of a call with the hidden dims of its operands, which it keeps."""
    whole = batched(notes)
    if whole is None:
        return spec
    first = max(spec.sizes, default=-1) + 1
    labels = {level: first + number for number, level in enumerate(whole.levels)}
    ins = tuple(
        None if dims is None else (*((labels[level],) for level in _levels(note)), *dims)
        for dims, note in zip(spec.ins, notes)
    )
    hidden_levels = {level for dims, note in zip(spec.ins, notes) if dims is not None for level in _levels(note)}
    hidden = tuple((labels[level],) if level in hidden_levels else () for level in whole.levels)
    sizes = {**spec.sizes, **{label: size for (_, size), label in labels.items()}}
    outs = tuple((*hidden, *dims) for dims in spec.outs)
    return spec._replace(ins=(*ins, *spec.ins[len(notes) :]), outs=outs, sizes=sizes)


def refused(rule: Rule, violation: Violation, tensors: Sequence[Tensor], notes: Sequence[Note]) -> SpmdTypeError:
    """The error of a call inside of vmap."""
    operands = ", ".join(f"{list(x.shape)} {note.type}" for x, note in zip(tensors, notes))
    return SpmdTypeError(
        f"{rule.name}({operands}) at {call_site()}, inside of torch.vmap, whose dim counts as the first one",
        f"on {violation.axis} {violation.why}",
        repairs=["write it without torch.vmap: its message then says what to gather or to reduce"],
        axis=violation.axis,
        rule=violation.rule,
    )


def refuse_inside(name: str, notes: Sequence[Note | None]) -> None:
    """Checks that a collective is not called inside of vmap.

    Raises:
        SpmdTypeError: it is; its dims would be those of one sample.
    """
    if any(note is not None and isinstance(note.extra, Batched) for note in notes):
        raise SpmdTypeError(
            f"{name} at {call_site()} is inside of torch.vmap",
            "it communicates tensors, and there is one for each sample",
            repairs=[f"{name} of what torch.vmap returns", "write the loop out"],
            rule="vmap",
        )


# --- dims that come and go --------------------------------------------------------------------------------------------


def _moved(type_: TensorType, move: Callable[[int], int]) -> TensorType:
    """The type of a tensor whose dims have moved."""

    def of(kind: SpmdType) -> SpmdType:
        if isinstance(kind, Shard):
            return replace(kind, dim=move(kind.dim))
        along = getattr(kind, "along", None)
        return scaled(repeated(frozenset(map(move, along))), kind.scale) if along else kind

    rest = of(type_.rest) if type_.rest is not None else None
    return TensorType.of({axis: of(kind) for axis, kind in type_}, rest)


def _add_batch_dim(x: Tensor, in_dim: int, level: int) -> Tensor:
    result: Tensor = _add(x, in_dim, level)
    mode = cast("Session | None", active())
    with DisableTorchFunction():
        note = mode.note(x, "vmap") if mode is not None else None
        if mode is not None and note is not None:
            levels = _levels(note)
            first, source = len(levels), len(levels) + in_dim
            type_ = _moved(note.type, lambda dim: first if dim == source else dim + (first <= dim < source))
            mode.stamp(result, type_, note.origins, Batched((*levels, (level, x.shape[in_dim]))))
    return result


def _remove_batch_dim(x: Tensor, level: int, batch_size: int, out_dim: int) -> Tensor:
    result: Tensor = _remove(x, level, batch_size, out_dim)
    mode = cast("Session | None", active())
    with DisableTorchFunction():
        note = note_of(x) if isinstance(x, Tensor) else None
        if mode is None or note is None:
            return result
        levels = _levels(note)
        left = tuple(item for item in levels if item[0] != level)
        to = len(left) + out_dim % result.dim()
        source = next((number for number, item in enumerate(levels) if item[0] == level), None)

        def move(dim: int) -> int:
            if dim == source:
                return to
            dim -= source is not None and dim > source
            return dim + (dim >= to)

        mode.stamp(result, _moved(note.type, move), note.origins, Batched(left) if left else None)
    return result


# --- gradients --------------------------------------------------------------------------------------------------------


def _same_note(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a `torch.func` wrapping function so that its result carries the type of its input."""

    def call(x: Tensor, level: int) -> Any:
        result = function(x, level)
        mode = cast("Session | None", active())
        with DisableTorchFunction():
            note = mode.note(x, "torch.func") if mode is not None and isinstance(x, Tensor) else None
            if mode is not None and note is not None and result is not x:
                mode.stamp(result, note.type, note.origins, note.extra)
        return result

    return call


def _hidden_shards(note: Note) -> dict[str, Shard]:
    """The axes that shard a hidden dim."""
    count = len(_levels(note))
    return {axis: kind for axis, kind in note.type if isinstance(kind, Shard) and kind.dim < count}


@contextmanager
def seen_losses(mode: Session, losses: Sequence[Tensor]) -> Iterator[None]:
    """Types losses of one sample, inside the context, as summands on the axes that shard the batch."""
    before = [(x, note) for x in losses if (note := note_of(x)) is not None and isinstance(note.extra, Batched)]
    for x, note in before:
        type_ = note.type
        for axis, kind in _hidden_shards(note).items():
            type_ = type_.with_axis(axis, scaled(P, kind.scale))
        mode.stamp(x, type_, note.origins)
    try:
        yield
    finally:
        for x, note in before:
            mode.stamp(x, note.type, note.origins, note.extra)


def hidden_gradient(losses: Sequence[Note], note: Note, type_: TensorType) -> tuple[TensorType, Batched | None]:
    """The type of an operand's gradient (`type_` without hidden dims of the loss), and its hidden dims."""
    whole = batched([*losses, note])
    if whole is None:
        return type_, None
    levels, order = _levels(note), {level: number for number, level in enumerate(whole.levels)}
    shift = len(whole.levels) - len(levels)
    type_ = _moved(type_, lambda dim: order[levels[dim]] if dim < len(levels) else dim + shift)
    for loss in losses:
        for axis, kind in _hidden_shards(loss).items():
            type_ = type_.with_axis(axis, replace(kind, dim=order[_levels(loss)[kind.dim]]))
    return type_, whole


# --- what is changed in torch while a mode is entered -----------------------------------------------------------------

_add, _remove = getattr(vmap_module, ADD_BATCH_DIM), getattr(vmap_module, REMOVE_BATCH_DIM)
_WRAPPERS = [(eager_transforms, WRAP_FOR_GRAD), (eager_transforms, UNWRAP_FOR_GRAD)]
_OURS = [
    (vmap_module, ADD_BATCH_DIM, _add_batch_dim),
    (vmap_module, REMOVE_BATCH_DIM, _remove_batch_dim),
    *((owner, name, _same_note(getattr(owner, name))) for owner, name in _WRAPPERS),
]
_ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name, _ in _OURS]


def install() -> None:
    """Makes types pass through vmap and torch.func, in threads that check types."""
    for owner, name, function in _OURS:
        setattr(owner, name, function)


def remove() -> None:
    """Restores torch's own functions."""
    for owner, name, function in _ORIGINALS:
        setattr(owner, name, function)
