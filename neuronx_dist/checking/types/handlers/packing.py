"""Flat buffers and lists: many tensors of different types in one call.

Gradients and weights travel in flat buffers. A buffer that `cat` makes of tensors of different types has no single
type: it has the types of its parts, as `Segments`, which stay through scaling, views as one row, casts and collectives,
and return when the buffer is split at the same positions. Functions of lists (`torch._foreach_add`, torch 2.15's
`torch.foreach.add`) are judged element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....call_site import call_site
from ....rules import RULES, Rule
from ....rules.names import CATS
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, Segments, TensorType, note_of
from ....spmd.types import P
from ....spmd.watching import see_through
from ....torch_internals.tensors import foreach_functions, native_nn
from ..messages.explain import shown
from ..session import Session
from .axis_numbers import Powers, factor, scaled_by
from .inplace import check_write, note_write

__all__ = ["FOREACH", "call", "for_each"]

_KEEP = ("mul", "mul_", "div", "div_", "clone", "contiguous", "detach", "to", "float", "bfloat16", "half", "double",
         "__mul__", "__truediv__", "__rmul__", "neg")  # fmt: skip


def call(
    mode: Session,
    rule: Rule,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    notes: Sequence[Note],
) -> Any | None:
    """The result of a call that makes a buffer or has one as operand; None for other calls."""
    if rule.name in CATS:
        for part, note in zip(tensors, notes):
            if isinstance(note.extra, Segments):
                raise _refuse(rule.name, part, note)
        return _pack(mode, func, args, kwargs, tensors, notes)
    x, segments = tensors[0], notes[0].extra
    if not isinstance(segments, Segments):
        index = next(i for i, note in enumerate(notes) if isinstance(note.extra, Segments))
        raise _refuse(rule.name, tensors[index], notes[index])
    if rule.name in _KEEP and all(not note.type.types for note in notes[1:]):
        result = func(*args, **kwargs)
        mode.stamp(result, notes[0].type, notes[0].origins, _scaled(segments, factor(mode, rule, args, kwargs)))
        return result
    if rule.name in ("view", "reshape", "flatten", "ravel"):
        result = func(*args, **kwargs)
        return _viewed(mode, rule.name, x, notes[0], segments, result)
    if rule.name in ("split", "split_with_sizes"):
        sizes, dim = _arguments(args, kwargs)
        result = func(*args, **kwargs)
        if dim % x.dim() == segments.dim and list(sizes) == [size for size, _, _ in segments.parts]:
            for piece, (_, type_, origins) in zip(result, segments.parts):
                mode.stamp(piece, type_, origins)
            return result
    raise _refuse(rule.name, x, notes[0])


def _scaled(segments: Segments, powers: Powers | None) -> Segments:
    """The parts of a buffer that was multiplied by powers of the sizes of axes."""
    if not powers:
        return segments
    parts = tuple((size, scaled_by(type_, powers), origins) for size, type_, origins in segments.parts)
    return Segments(segments.dim, parts, segments.blocks)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size", ()))
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return (sizes if isinstance(sizes, (list, tuple)) else ()), dim


def _pack(
    mode: Session,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    notes: Sequence[Note],
) -> Tensor | None:
    """The buffer that `cat` makes of tensors of different types; None if its result has one type."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))) % max(1, tensors[0].dim())
    types = {note.type for note in notes}
    flat = tensors[0].dim() == 1 or (tensors[0].dim() == 2 and dim == 1)
    if not flat or kwargs.get("out") is not None:
        return None
    if len(types) == 1 and not next(iter(types)).sharded:
        return None
    if all(_combine(mode, axis, [*types]) for axis in {axis for type_ in types for axis in mode.axes_of(type_)}):
        return None
    # For tensors sharded along the same other dim the usual rule is more precise.
    if tensors[0].dim() == 2 and len(types) == 1:
        return None
    result = func(*args, **kwargs)
    parts = tuple((x.shape[dim], note.type, note.origins) for x, note in zip(tensors, notes))
    mode.operators += 1
    mode.stamp(result, TensorType.of({}), None, Segments(dim, parts))
    return result


def _combine(mode: Session, axis: str, types: Sequence[TensorType]) -> bool:
    """Returns whether values of these types may be elements of one tensor: equal ones or partial maxima (a history)."""
    spmd_types = [mode.named(type_).get(axis) for type_ in types]
    kinds = {"max" if k is P("max") else k.letter if k is not None and not k.scale else "V" for k in spmd_types}
    return kinds <= {"R", "0"} or kinds <= {"I", "0"} or ("max" in kinds and kinds <= {"R", "I", "0", "max"})


def _viewed(mode: Session, name: str, x: Tensor, note: Note, segments: Segments, result: Tensor) -> Tensor:
    """Handles views of a buffer: `[1, n]` as `[n]`, or a gathered `[blocks * n]` as `[blocks, n]`."""
    width = sum(size for size, _, _ in segments.parts)
    blocks = x.numel() // width
    if result.dim() == 1 and blocks == 1:
        mode.stamp(result, note.type, note.origins, Segments(0, segments.parts))
    elif result.dim() == 2 and list(result.shape) == [blocks, width]:
        mode.stamp(result, note.type, note.origins, Segments(1, segments.parts))
    elif result.shape == x.shape:
        mode.stamp(result, note.type, note.origins, segments)
    else:
        raise _refuse(name, x, note)
    return result


def _refuse(name: str, x: Tensor, note: Note) -> SpmdTypeError:
    sizes = [size for size, _, _ in note.extra.parts]
    return SpmdTypeError(
        f"{name} at {call_site()} got {shown(x, None)}, a buffer packed of tensors of different types (sizes {sizes})",
        "it can be scaled, cast, communicated, and split into these sizes",
        repairs=[f"split({sizes[:4]}{' ...' if len(sizes) > 4 else ''}) first"],
        rule="packed",
    )


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unflattened(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pieces = flat.split([x.numel() for x in tensors])
    return tuple(piece.view(x.shape) for piece, x in zip(pieces, tensors))


# Functions of torch._utils that flatten and unflatten gradients, as functions that have rules.
see_through(native_nn.flatten_dense_tensors, _flattened)
see_through(native_nn.unflatten_dense_tensors, _unflattened)

# --- lists ---


def _bases() -> dict[Callable[..., Any], tuple[Callable[..., Any], bool]]:
    bases = {}
    for form, name in foreach_functions.items():
        base = name.removesuffix("_")
        function = getattr(torch, base, None) or getattr(Tensor, base, None)
        if base == "norm":
            function = torch.linalg.vector_norm
        elif base == "zero":
            function = torch.zeros_like
        elif base == "copy":
            function = torch.clone
        if function is not None:
            bases[form] = (function, name.endswith("_"))
    return bases


FOREACH = _bases()


def for_each(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Judges a function of lists element by element, as the function of tensors; each tensor has a note."""
    base, inplace = FOREACH[func]
    rule = RULES.get(base) or Rule(base.__name__, None)
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    options = {key: value for key, value in kwargs.items() if key not in ("dtype", "non_blocking")}
    results: list[tuple[TensorType, Any]] = []
    for index in range(len(lists[0])):
        row = tuple(x[index] if isinstance(x, (list, tuple)) and len(x) == len(lists[0]) else x for x in args)
        if base is torch.clone:
            row = row[1:2]
        tensors = [x for x in row if isinstance(x, Tensor)]
        notes = [note for x in tensors if (note := note_of(x)) is not None]
        judgement = mode.judge(rule, base, row, options, tensors, notes)
        if inplace:
            check_write(mode, rule, lists[0][index], judgement.types[0], tensors, notes)
        results.append((judgement.types[0], mode.origins(judgement, notes)))
    mode.operators += 1
    result = func(*args, **kwargs)
    for x, (type_, origins) in zip(lists[0] if inplace else result, results):
        if inplace:
            note_write(mode, x, type_, origins)
        else:
            mode.stamp(x, type_, origins)
    return result
