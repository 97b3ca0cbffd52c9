"""Rules of the functions that copy values along dims, move them along dims, or read them by position in a dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .spec import Spec, along, derive, labels, rule, same
from .views import FIRST, ViewLabels, as_int, each_of, sizes_of, swapped

# --- copies of values along dims ---


def _expanded(shape: Sequence[int], sizes: Sequence[int]) -> Spec:
    builder = ViewLabels()
    new = len(sizes) - len(shape)
    ins: list[tuple[int, ...]] = []
    outs: list[tuple[int, ...]] = [() if size == 1 else (builder.new(size),) for size in sizes[:new]]
    for size, into in zip(shape, sizes[new:]):
        if into in (-1, size):
            ins.append((builder.new(size),))
            outs.append(ins[-1])
        else:
            ins.append(())
            outs.append((builder.new(into),))
    return builder.spec([ins], [outs])


@rule(Tensor.expand, linear=FIRST, aliases=True)
def expand(input: Tensor, *sizes: Any, size: Any = None, implicit: bool = False) -> Spec:
    return _expanded(input.shape, sizes_of(sizes, size))


@rule(torch.broadcast_to, Tensor.broadcast_to, linear=FIRST, aliases=True)
def broadcast_to(input: Tensor, *sizes: Any, size: Any = None) -> Spec:
    return _expanded(input.shape, sizes_of(sizes, size))


@rule(Tensor.expand_as, linear=FIRST, aliases=True)
def expand_as(input: Tensor, other: Tensor) -> Spec:
    spec = _expanded(input.shape, other.shape)
    return spec._replace(ins=(*spec.ins, None))


def _broadcast(*tensors: Any) -> list[Tensor]:
    """Decomposes into one broadcast per operand: each result shares memory and type with its operand."""
    listed = each_of(tensors)
    shape = torch.broadcast_shapes(*(x.shape for x in listed))
    return [x.expand(shape) for x in listed]


rule(torch.broadcast_tensors, kind="decompose", decompose=_broadcast)(None)


def _grids(*tensors: Any, indexing: str | None = None) -> list[Tensor]:
    listed = each_of(tensors)
    order = list(range(len(listed)))
    if indexing == "xy" and len(listed) > 1:
        order[:2] = 1, 0
    sizes = [listed[number].numel() for number in order]
    shapes = [[size if at == number else 1 for at, size in zip(order, sizes)] for number in range(len(listed))]
    return [_grid(x, shape).expand(sizes) for x, shape in zip(listed, shapes)]


def _grid(x: Tensor, shape: list[int]) -> Tensor:
    """Returns a vector as a tensor of `shape`, along the dim whose size is not 1."""
    at = next((dim for dim, size in enumerate(shape) if size != 1), 0)
    for _ in shape[:at]:
        x = x.unsqueeze(0)
    while x.dim() < len(shape):
        x = x.unsqueeze(-1)
    return x


rule(torch.meshgrid, kind="decompose", decompose=_grids)(None)


def _repeated(shape: Sequence[int], times: Sequence[int]) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(shape)
    new = len(times) - len(shape)
    outs: list[tuple[int, ...]] = [() if count == 1 else (builder.new(count),) for count in times[:new]]
    for dim, count in zip(dims, times[new:]):
        outs.append(dim if count == 1 else (builder.new(count), *dim))
    return builder.spec([dims], [outs])


@rule(Tensor.repeat, linear=FIRST)
def repeat(input: Tensor, *sizes: Any, repeats: Any = None) -> Spec:
    return _repeated(input.shape, sizes_of(sizes, repeats))


@rule(torch.tile, Tensor.tile, linear=FIRST)
def tile(input: Tensor, *sizes: Any, dims: Any = None) -> Spec:
    times = sizes_of(sizes, dims)
    return _repeated(input.shape, (1,) * (input.ndim - len(times)) + times)


def _of_counts(input: Tensor, repeats: Any = None, *_: Any, **__: Any) -> bool:
    return repeats is None


@rule(torch.repeat_interleave, Tensor.repeat_interleave, linear=FIRST, affine=_of_counts)
def repeat_interleave(input: Tensor, repeats: Any = None, dim: int | None = None, output_size: Any = None) -> Spec:
    builder = ViewLabels()
    if repeats is None:  # the number of repetitions of each position: returns positions
        return builder.spec(
            [[(builder.new(input.shape[0], "repeat_interleave counts its positions"),)]], [builder.dims([0])]
        )
    dims = builder.dims(input.shape)
    outs: list[tuple[int, ...]]
    if isinstance(repeats, Tensor):
        why = "repeat_interleave with a tensor of counts makes pieces of different sizes of it"
        at = list(range(input.ndim)) if dim is None else [dim % input.ndim]
        for d in at:
            builder.fixed[dims[d][0]] = why
        new = (builder.new(output_size or 0),)
        outs = [new] if dim is None else [new if d in at else dims[d] for d in range(input.ndim)]
        dims_of_repeats: list[tuple[int, ...]] = [
            (builder.new(size, why),) if size != 1 else () for size in repeats.shape
        ]
        return builder.spec([dims, dims_of_repeats], [outs])
    inner = (builder.new(as_int(repeats)),) if as_int(repeats) != 1 else ()
    if dim is None:
        outs = [tuple(label for d in dims for label in d) + inner]
    else:
        outs = [d + inner if at == dim % input.ndim else d for at, d in enumerate(dims)]
    return builder.spec([dims], [outs])


# --- values that move along dims ---


def _moves(what: str) -> Callable[..., Spec]:
    def spec(input: Tensor, dims: Any = None, *more: Any, **_: Any) -> Spec:
        if more:  # flip(0, 1)
            dims = sizes_of((dims, *more))
        return along(input.shape, dims, f"{what} moves values along it")

    return spec


rule(torch.flip, Tensor.flip, linear=FIRST)(_moves("flip"))


@rule(torch.fliplr, Tensor.fliplr, linear=FIRST)
def fliplr(input: Tensor) -> Spec:
    return along(input.shape, 1, "fliplr moves values along it")


@rule(torch.flipud, Tensor.flipud, linear=FIRST)
def flipud(input: Tensor) -> Spec:
    return along(input.shape, 0, "flipud moves values along it")


@rule(torch.roll, Tensor.roll, linear=FIRST)
def roll(input: Tensor, shifts: Any, dims: Any = None) -> Spec:
    return along(input.shape, None if dims in (None, (), []) else dims, "roll moves values along it")


@rule(torch.rot90, Tensor.rot90, linear=FIRST)
def rot90(input: Tensor, k: int = 1, dims: Any = (0, 1)) -> Spec:
    turns = as_int(k) % 4
    spec = swapped(input, *dims) if turns % 2 else same(input.shape)
    reversed_ = {0: (), 1: (dims[1],), 2: dims, 3: (dims[0],)}[turns]
    return spec._replace(fixed={dim % input.ndim: "rot90 turns its order round" for dim in reversed_})


@rule(torch.tril, Tensor.tril, torch.triu, Tensor.triu, linear=FIRST)
def triangle(input: Tensor, diagonal: int = 0) -> Spec:
    return along(input.shape, (-2, -1), "tril and triu keep values by their local row and column numbers")


derive(torch.tril, Tensor.tril_, Tensor.triu_, inplace=0)


# --- diagonals, windows, strides ---


@rule(torch.diagonal, Tensor.diagonal, linear=FIRST, aliases=True)
def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Spec:
    return _diagonal(input.shape, as_int(offset), dim1, dim2)


@rule(torch.linalg.diagonal, linear=FIRST, aliases=True)
def diagonal_of_matrices(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    return _diagonal(A.shape, as_int(offset), dim1, dim2)


def _diagonal(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(shape)
    pair = [dim1 % len(shape), dim2 % len(shape)]
    for dim in pair:
        builder.fixed[dims[dim][0]] = "the diagonal of two dims is taken"
    rows, columns = shape[pair[0]], shape[pair[1]]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    return builder.spec([dims], [[dim for at, dim in enumerate(dims) if at not in pair] + [(builder.new(length),)]])


@rule(torch.diag, Tensor.diag, linear=FIRST)
def diag(input: Tensor, diagonal: int = 0) -> Spec:
    if input.ndim == 2:
        return _diagonal(input.shape, as_int(diagonal), 0, 1)
    return _onto_diagonal(input.shape, as_int(diagonal))


def _onto_diagonal(shape: Sequence[int], offset: int, dim1: int = -2, dim2: int = -1) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(shape)
    builder.fixed[dims[-1][0]] = "it is put on the diagonal of two dims"
    outs = list(dims[:-1])
    size = shape[-1] + abs(offset)
    for at in sorted((dim1 % (len(shape) + 1), dim2 % (len(shape) + 1))):
        outs.insert(at, (builder.new(size),))
    return builder.spec([dims], [outs])


@rule(torch.diag_embed, Tensor.diag_embed, linear=FIRST)
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    return _onto_diagonal(input.shape, as_int(offset), dim1, dim2)


@rule(torch.diagflat, Tensor.diagflat, linear=FIRST)
def diagflat(input: Tensor, offset: int = 0) -> Spec:
    builder = ViewLabels()
    dims = [(builder.new(size, "diagflat puts it on the diagonal of two dims"),) for size in input.shape]
    size = prod(input.shape) + abs(as_int(offset))
    return builder.spec([dims], [builder.dims((size, size))])


@rule(Tensor.unfold, linear=FIRST, aliases=True)
def unfold(input: Tensor, dimension: int, size: int, step: int) -> Spec:
    if not input.ndim:
        return Spec(((),), (((0,),),), {0: as_int(size)})
    builder = ViewLabels()
    dims = builder.dims(input.shape)
    at, width, step = dimension % input.ndim, as_int(size), as_int(step)
    length = input.shape[at]
    if width == step and length % width == 0:  # windows side by side: a view
        dims[at] = (builder.new(length // width), builder.new(width))
        outs = [*dims[:at], dims[at][:1], *dims[at + 1 :], dims[at][1:]]
        return builder.spec([dims], [outs])
    builder.fixed[dims[at][0]] = "unfold takes overlapping windows of it"
    windows = (builder.new((length - width) // step + 1),)
    return builder.spec([dims], [[*dims[:at], windows, *dims[at + 1 :], (builder.new(width),)]])


@rule(torch.as_strided, Tensor.as_strided, linear=FIRST, aliases=True)
def as_strided(input: Tensor, size: Any, stride: Any = None, storage_offset: Any = None) -> Spec:
    builder = ViewLabels()
    dims = [(builder.new(length, "as_strided reads memory, not dims"),) for length in input.shape]
    return builder.spec([dims], [builder.dims(as_int(length) for length in size)])


# --- complex numbers as pairs ---


@rule(torch.view_as_real, linear=FIRST, aliases=True)
def view_as_real(input: Tensor) -> Spec:
    dims = labels(input.ndim + 1)
    return Spec((dims[:-1],), (dims,), dict(enumerate((*input.shape, 2))))


@rule(torch.view_as_complex, linear=FIRST, aliases=True)
def view_as_complex(input: Tensor) -> Spec:
    dims = labels(input.ndim)
    fixed = {input.ndim - 1: "view_as_complex makes one number of the two values along it"}
    return Spec((dims,), (dims[:-1],), dict(enumerate(input.shape)), fixed=fixed)
