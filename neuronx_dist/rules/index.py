"""Spec of `x[index]` for an index of numbers, slices, None, `...`, masks and index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .splits import cut
from .views import ViewLabels, as_int

__all__ = ["Indexed", "indexed"]

Dim = tuple[int, ...]

ONE = "an index picks one of its positions"
RANGE = "a slice takes a range of its positions"
STEPS = "a slice takes every n-th of its positions"
TABLE = "another tensor indexes it"
MASK = "a mask picks another number of its positions on every rank"


class Indexed(NamedTuple):
    """Dims of the operands and the result of `x[index]`.

    Attributes:
        x: the dims of x.
        tensors: the dims of each tensor in the index, in order.
        out: the dims of the result.
        masked: True if the index is one boolean mask of some dims of x and takes the other dims whole.
    """

    x: list[Dim]
    tensors: list[list[Dim]]
    out: list[Dim]
    masked: bool


def _items(index: Any) -> list[Any]:
    """Returns the index of each dim as torch reads it: a list is an index tensor, a tuple has one index per dim."""
    if isinstance(index, tuple):
        return list(index)
    if isinstance(index, list) and any(isinstance(item, (slice, Tensor, type(None), type(...))) for item in index):
        return list(index)  # torch still reads such a list as a tuple
    return [index]


def _consumed(item: Any) -> int:
    """Number of dims of x that an item of the index stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def indexed(builder: ViewLabels, shape: Sequence[int], index: Any) -> Indexed:
    """Returns the dims of `x[index]` for an x of `shape`. Masks share labels with the dims that they mask."""
    items: list[Any] = [
        torch.as_tensor(item) if not isinstance(item, (Tensor, int, slice, type(None), type(...))) else item
        for item in _items(index)
    ]
    are_tensors = [isinstance(item, Tensor) for item in _items(index)]
    if not any(item is Ellipsis for item in items):
        items.append(...)
        are_tensors.append(False)
    missing = len(shape) - sum(_consumed(item) for item in items)
    x: list[Dim] = []
    tensors: list[list[Dim]] = []
    out: list[Dim] = []
    tables: list[tuple[int, list[Dim], tuple[int, ...]]] = []  # index tensors: (place in `out`, dims, shape)
    for item, is_tensor in zip(items, are_tensors):
        at = len(x)
        if item is Ellipsis:
            for size in shape[at : at + missing]:
                x.append((builder.new(size),))
                out.append(x[-1])
        elif item is None:
            out.append(())
        elif isinstance(item, bool):
            tables.append((len(out), [(builder.new(int(item)),)], (int(item),)))
        elif isinstance(item, int):
            x.append((builder.new(shape[at], ONE, selected=True),))
        elif isinstance(item, slice):
            dim, part = _sliced(builder, shape[at], item, len(out))
            x.append(dim)
            out.append(part)
        elif item.dtype in (torch.bool, torch.uint8):
            dims: list[Dim] = [(builder.new(size, MASK, selected=True),) for size in item.shape]
            x.extend(dims)
            tables.append((len(out), [(builder.new(0),)], (0,)))
            if is_tensor:
                tensors.append(list(dims))
        else:
            x.append((builder.new(shape[at], TABLE, looked_up=True),))
            dims = [(builder.new(size),) for size in item.shape]
            if dims:  # an index tensor without dims is read as a number
                tables.append((len(out), dims, tuple(item.shape)))
            if is_tensor:
                tensors.append(dims)
    masks = [item for item in items if isinstance(item, Tensor)]
    others = (item is Ellipsis or item == slice(None) for item in items if not isinstance(item, Tensor))
    masked = len(masks) == len(tensors) == 1 and masks[0].dtype is torch.bool and all(others)
    _insert_tables(builder, tables, tensors, out)
    return Indexed(x, tensors, out, masked)


def _sliced(builder: ViewLabels, length: int, item: slice, at: int) -> tuple[Dim, Dim]:
    start, stop, step = (None if value is None else as_int(value) for value in (item.start, item.stop, item.step))
    if step not in (None, 1):
        count = len(range(*slice(start, stop, step).indices(length)))
        return (builder.new(length, STEPS, selected=True),), (builder.new(count),)
    first, last, _ = slice(start, stop).indices(length)
    if start is not None and start < 0:  # counted from the end: another position in the global tensor
        return (builder.new(length, RANGE, selected=True),), (builder.new(max(0, last - first)),)
    dim, (part,) = cut(builder, length, [(first, max(0, last - first))], RANGE, at, start in (None, 0) and stop is None)
    return dim, part


def _insert_tables(
    builder: ViewLabels,
    tables: list[tuple[int, list[Dim], tuple[int, ...]]],
    tensors: list[list[Dim]],
    out: list[Dim],
) -> None:
    """Inserts the dims of the index tensors, broadcast against each other, into `out`.

    The inserted dims replace the indexed dims if these are adjacent, else they go to the front.
    """
    if not tables:
        return
    builder.ranges.clear()  # dims of index tensors stand between
    positions = [position for position, _, _ in tables]
    width = max(len(dims) for _, dims, _ in tables)
    merged: list[Dim] = [()] * width
    for _, dims, shape in tables:
        for at, (dim, size) in enumerate(zip(dims, shape), width - len(dims)):
            if size == 1 and any(len(s) >= width - at and s[at - width] != 1 for _, _, s in tables):
                for others in tensors:  # this dim broadcasts
                    others[:] = [() if other == dim else other for other in others]
            elif not merged[at]:
                merged[at] = dim
            else:
                for others in tensors:  # the same positions as those of an earlier index
                    others[:] = [merged[at] if other == dim else other for other in others]
                if dim[0] in builder.sizes and dim[0] != merged[at][0]:
                    builder.sizes[dim[0]] = builder.sizes[merged[at][0]]
    together = len(set(positions)) == 1
    out[positions[0] if together else 0 : positions[0] if together else 0] = merged
