"""Rules of the functions that cut dims into pieces or put tensors together: split, chunk, narrow, cat, stack.

A cut is described in blocks: if all borders are multiples of n, a dim of length L is L/n blocks (outer, fixed) of n
positions (inner, free). So `chunk(2)` of a fused output that holds both halves of its shard keeps the sharding of the
inner factor, and `cat` of two shards gives a dim of two blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .spec import ALL, Spec, derive, labels, rule
from .views import FIRST, ViewLabels, as_int, raised

__all__ = ["cut", "joined"]

Dim = tuple[int, ...]


def cut(
    builder: ViewLabels, length: int, pieces: Sequence[tuple[int, int]], why: str, at: int, whole: bool
) -> tuple[Dim, list[Dim]]:
    """Cuts a dim of `length` into `pieces`, each (start, length), which are dim `at` of the results.

    A piece of the full length is no cut; but a piece of size 1 is (the first position, of a rank that has only one),
    unless the call says that it is the `whole`.

    Returns:
        The dim, and for each piece its dim.
    """
    if all(piece == (0, length) for piece in pieces) and (length != 1 or whole):
        dim = (builder.new(length),)
        return dim, [dim] * len(pieces)
    block = reduce(gcd, (number for piece in pieces for number in piece), length)
    if not block:
        return (builder.new(length),), [(builder.new(0),) for _ in pieces]
    blocks = builder.new(length // block, why, selected=True)
    builder.ranges[blocks] = tuple((at, start, start + size, length) for start, size in pieces)
    rest = (builder.new(block),) if block > 1 else ()
    outs = [rest if size == block else (builder.new(size // block), *rest) for _, size in pieces]
    return (blocks, *rest), outs


def _cut_dim(
    shape: Sequence[int], dim: int, pieces: Sequence[tuple[int, int]], why: str, everything: bool = False
) -> Spec:
    builder = ViewLabels()
    dim %= len(shape)
    dims = builder.dims(shape[:dim]) + [()] + builder.dims(shape[dim + 1 :])
    whole, parts = cut(builder, shape[dim], pieces, why, dim, everything)
    return builder.spec(
        [[*dims[:dim], whole, *dims[dim + 1 :]]], [[*dims[:dim], part, *dims[dim + 1 :]] for part in parts]
    )


def _in_steps(length: int, step: int) -> list[tuple[int, int]]:
    """Pieces of length `step`, the last one shorter; at least one piece."""
    starts = range(0, length, step) if length and step else [0]
    return [(start, min(step, length - start)) for start in starts]


def _in_sizes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return list(zip(starts, sizes))


@rule(
    *(torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes),
    *(torch.unsafe_split, Tensor.unsafe_split, torch.unsafe_split_with_sizes, Tensor.unsafe_split_with_sizes),
    linear=FIRST,
    aliases=True,
)
def split(*args: Any, dim: int = 0, **kwargs: Any) -> Spec:
    arguments = [*args, *(value for value in kwargs.values())]
    tensor, size = arguments[:2]
    dim = arguments[2] if len(arguments) > 2 else dim
    if isinstance(size, int):
        length, size = tensor.shape[dim], as_int(size)
        return _cut_dim(tensor.shape, dim, _in_steps(length, size), f"split({size}) cuts it into pieces")
    sizes = [as_int(length) for length in size]
    return _cut_dim(tensor.shape, dim, _in_sizes(sizes), f"split({sizes}) cuts it into pieces")


@rule(torch.chunk, Tensor.chunk, torch.unsafe_chunk, Tensor.unsafe_chunk, linear=FIRST, aliases=True)
def chunk(input: Tensor, chunks: int, dim: int = 0) -> Spec:
    length, count = input.shape[dim], as_int(chunks)
    pieces = _in_steps(length, -(-length // count)) if length else [(0, 0)] * count
    return _cut_dim(input.shape, dim, pieces, f"chunk({count}) cuts it into pieces", count == 1)


def _evenly(length: int, count: int) -> list[tuple[int, int]]:
    return _in_sizes([length // count + (number < length % count) for number in range(count)])


def _at(length: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    ends = [max(0, min(border + length if border < 0 else border, length)) for border in borders]
    return [(start, max(0, end - start)) for start, end in zip([0, *ends], [*ends, length])]


@rule(torch.tensor_split, Tensor.tensor_split, linear=FIRST, aliases=True)
def tensor_split(input: Tensor, *args: Any, dim: int = 0, **kwargs: Any) -> Spec:
    arguments = [*args, *kwargs.values()]
    where = arguments[0]
    dim = arguments[1] if len(arguments) > 1 else dim
    if isinstance(where, Tensor):
        where = where.tolist()
    length = input.shape[dim]
    pieces = _evenly(length, as_int(where)) if isinstance(where, int) else _at(length, [as_int(at) for at in where])
    spec = _cut_dim(input.shape, dim, pieces, "tensor_split cuts it into pieces")
    return spec._replace(ins=spec.ins + (None,) * any(isinstance(value, Tensor) for value in arguments))


@rule(torch.hsplit, Tensor.hsplit, linear=FIRST, aliases=True)
def hsplit(input: Tensor, *args: Any, **kwargs: Any) -> Spec:
    return tensor_split(input, *args, *kwargs.values(), dim=0 if input.ndim == 1 else 1)


@rule(torch.vsplit, Tensor.vsplit, linear=FIRST, aliases=True)
def vsplit(input: Tensor, *args: Any, **kwargs: Any) -> Spec:
    return tensor_split(input, *args, *kwargs.values(), dim=0)


@rule(torch.dsplit, Tensor.dsplit, linear=FIRST, aliases=True)
def dsplit(input: Tensor, *args: Any, **kwargs: Any) -> Spec:
    return tensor_split(input, *args, *kwargs.values(), dim=2)


@rule(torch.narrow, Tensor.narrow, linear=FIRST, aliases=True)
def narrow(input: Tensor, dim: int, start: Any, length: int) -> Spec:
    size = input.shape[dim]
    why = "narrow takes a range of its positions"
    if isinstance(start, Tensor):
        spec = _cut_dim(input.shape, dim, [(1, as_int(length))], why)
        return spec._replace(ins=(*spec.ins, ()), ranges={})
    first = as_int(start)
    return _cut_dim(input.shape, dim, [(first + size if first < 0 else first, as_int(length))], why)


derive(torch.narrow, torch.narrow_copy, Tensor.narrow_copy, aliases=False)


def _without(shape: Sequence[int], dim: int, outs: int, why: str) -> Spec:
    dims = labels(len(shape))
    dim %= len(shape)
    out = (*dims[:dim], *dims[dim + 1 :])
    return Spec((dims,), (out,) * outs, dict(enumerate(shape)), {}, {dim: why}, frozenset((dim,)))


@rule(torch.unbind, Tensor.unbind, linear=FIRST, aliases=True)
def unbind(input: Tensor, dim: int = 0) -> Spec:
    return _without(input.shape, dim, input.shape[dim], "unbind takes its positions apart")


@rule(Tensor.__iter__, linear=FIRST, aliases=True)
def iterate(input: Tensor) -> Spec:
    return _without(input.shape, 0, input.shape[0], "a loop takes its positions apart")


@rule(torch.select, Tensor.select, linear=FIRST, aliases=True)
def select(input: Tensor, dim: int, index: Any) -> Spec:
    spec = _without(input.shape, dim, 1, "select takes one of its positions")
    return spec._replace(ins=spec.ins + ((),) * isinstance(index, Tensor))


# --- joins ---


def joined(builder: ViewLabels, lengths: Sequence[int], why: str) -> tuple[list[Dim], Dim]:
    """Joins dims of `lengths`: returns the dim of each operand, and that of the result."""
    if len(lengths) == 1:
        dim = (builder.new(lengths[0]),)
        return [dim], dim
    block = reduce(gcd, lengths, 0)
    if not block:
        return [(builder.new(0),) for _ in lengths], (builder.new(0),)
    rest = (builder.new(block),) if block > 1 else ()
    ins = [rest if n == block else (builder.new(n // block, why, selected=True), *rest) for n in lengths]
    if block == 1:  # pieces of one position have no free factor
        ins = [(builder.new(n, why, selected=True),) for n in lengths]
    return ins, (builder.new(sum(lengths) // block), *rest)


def _listed(tensors: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    return list(tensors if tensors is not None else next(iter(kwargs.values())))


def _together(shapes: Sequence[Sequence[int]], dim: int) -> Spec:
    builder = ViewLabels()
    skipped = [tuple(shape) == (0,) for shape in shapes]  # cat skips empty vectors, whatever the shape of the others
    model = next((shape for shape, skip in zip(shapes, skipped) if not skip), shapes[0])
    dim %= len(model)
    dims = builder.dims(model[:dim]) + [()] + builder.dims(model[dim + 1 :])
    lengths = [shape[dim] for shape, skip in zip(shapes, skipped) if not skip]
    parts, whole = joined(builder, lengths, "cat puts pieces of different sizes after one another along it")
    rows = iter(parts)
    ins = [
        [(builder.new(0, "cat leaves an empty tensor out"),)] if skip else [*dims[:dim], next(rows), *dims[dim + 1 :]]
        for skip in skipped
    ]
    return builder.spec(ins, [[*dims[:dim], whole, *dims[dim + 1 :]]])


@rule(torch.cat, torch.concat, torch.concatenate, linear=ALL)
def cat(tensors: Any = None, dim: int = 0, **kwargs: Any) -> Spec:
    return _together([x.shape for x in _listed(tensors, kwargs)], kwargs.get("axis", dim))


@rule(torch.stack, linear=ALL)
def stack(tensors: Any = None, dim: int = 0, **kwargs: Any) -> Spec:
    listed = _listed(tensors, kwargs)
    shape = listed[0].shape
    dims = labels(len(shape))
    dim %= len(shape) + 1
    new = (len(shape),)
    sizes = {**dict(enumerate(shape)), len(shape): len(listed)}
    return Spec((dims,) * len(listed), ((*dims[:dim], new, *dims[dim:]),), sizes)


def _raised(tensors: Sequence[Tensor], ndim: int, dim: int) -> Spec:
    """Builder for cat of tensors that get dims of size 1 first."""
    shapes = []
    for x in tensors:
        padded = raised([(size,) for size in x.shape], ndim)
        shapes.append([size[0] if size else 1 for size in padded])
    spec = _together(shapes, dim)
    ins = []
    for x, dims in zip(tensors, spec.ins):
        assert dims is not None
        present = raised([(1,)] * x.dim(), ndim)  # the dims that the tensor itself has
        ins.append(tuple(label for label, is_present in zip(dims, present) if is_present))
    return spec._replace(ins=tuple(ins))


@rule(torch.hstack, linear=ALL)
def hstack(tensors: Any = None, **kwargs: Any) -> Spec:
    listed = _listed(tensors, kwargs)
    return _raised(listed, 1, 0 if listed[0].dim() < 2 else 1)


@rule(torch.vstack, torch.row_stack, linear=ALL)
def vstack(tensors: Any = None, **kwargs: Any) -> Spec:
    return _raised(_listed(tensors, kwargs), 2, 0)


@rule(torch.dstack, linear=ALL)
def dstack(tensors: Any = None, **kwargs: Any) -> Spec:
    return _raised(_listed(tensors, kwargs), 3, 2)


@rule(torch.column_stack, linear=ALL)
def column_stack(tensors: Any = None, **kwargs: Any) -> Spec:
    listed = _listed(tensors, kwargs)
    builder = ViewLabels()
    rows = (builder.new(listed[0].shape[0] if listed[0].dim() else 1),)
    lengths = [x.shape[1] if x.dim() > 1 else 1 for x in listed]
    parts, whole = joined(builder, lengths, "column_stack puts pieces of different sizes after one another along it")
    rest = builder.dims(listed[0].shape[2:])
    ins = [[] if not x.dim() else [rows] if x.dim() == 1 else [rows, part, *rest] for x, part in zip(listed, parts)]
    return builder.spec(ins, [[rows, whole, *rest]])


@rule(torch.block_diag, linear=ALL)
def block_diag(*tensors: Tensor) -> Spec:
    builder = ViewLabels()
    why = "block_diag puts the matrices along the diagonal"
    ins = [[(builder.new(size, why),) for size in x.shape] for x in tensors]
    rows = sum(x.shape[0] if x.dim() == 2 else 1 for x in tensors)
    columns = sum(x.shape[-1] if x.dim() else 1 for x in tensors)
    return builder.spec(ins, [builder.dims((rows, columns))])


@rule(torch.cartesian_prod, linear=ALL)
def cartesian_prod(*tensors: Tensor) -> Spec:
    builder = ViewLabels()
    if len(tensors) == 1:
        dims = builder.dims(tensors[0].shape)
        return builder.spec([dims], [dims])
    dims = builder.dims(x.shape[0] for x in tensors)
    merged = tuple(label for dim in dims for label in dim)
    return builder.spec([[dim] for dim in dims], [[merged, (builder.new(len(tensors)),)]])
