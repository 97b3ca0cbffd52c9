"""Views: permuted, split, merged and expanded dims; slices, whose elements stay on their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...spmd import S
from ...spmd.watching import active
from ..fallback import announce
from ..handlers import composed, sharded
from ..labels import Labels, inside, labels_of, planned
from ..moves.intervals import bounds_of
from ..moves.redistribute import redistributed_view
from ..placements import Replicate, Shard
from ..report import note
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, gradient_spec, local_of, wrap, wrap_view
from ..typed import on_own_shard, shards_of
from ..view_layouts import layouts_of_view
from .select import dim_of

__all__: list[str] = []

_T = torch.Tensor


def hashable(x: Any) -> Any:
    if not isinstance(x, (list, tuple)):
        return x
    return tuple([hashable(item) if isinstance(item, (list, tuple)) else item for item in x])


def _shape_after(func: Callable[..., Any], shape: Sequence[int], args: Sequence[Any], kwargs: Any) -> torch.Size:
    """Returns the shape that `func` makes of a shape, from a call without values."""
    result: torch.Size = func(torch.empty(tuple(shape), device="meta"), *args, **dict(kwargs)).shape
    return result


# --- permuted dims


def _viewed(shape: torch.Size, func: Callable[..., Any], args: Any, kwargs: Any) -> Labels:
    return labels_of(func, (shape, *args), dict(kwargs))


@sharded(
    *(torch.transpose, _T.transpose, torch.t, _T.t, torch.permute, _T.permute, torch.movedim, _T.movedim),
    *(torch.moveaxis, _T.moveaxis, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims, torch.adjoint, _T.adjoint),
    *(getattr(_T, name).__get__ for name in ("T", "mT", "H", "mH")),
)
def permuted(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args
    (local,), spec = inside(_viewed, (x,), func, hashable(others), hashable(list(kwargs.items())))
    return wrap_view(func(local, *others, **kwargs), spec, x)


# --- split and merged dims


@planned
def _reshaped(spec: ShardTensorSpec, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns the layout in which the view is made, and the layout of the result."""
    return layouts_of_view(spec, _shape_after(func, spec.shape, args, kwargs))


def _moved(x: ShardTensor, name: str, source: ShardTensorSpec, shape: torch.Size) -> torch.Tensor:
    """Returns the local tensor of `x` in the layout in which it is viewed as `shape`.

    Raises:
        NotImplementedError: shards are gathered, under `fallback("error")`.
    """
    whole = []
    for m, dim in x._spec.sharded:
        placement, sizes = source.placements[m], source.sizes[m]
        if not isinstance(placement, Shard):
            whole += [dim] if x.shape[dim] != 1 else []
        elif (placement.dim, sizes) != (dim, x._spec.sizes[m]):
            note(name, f"shards of dim {dim} of {tuple(x.shape)} move to dim {placement.dim}, sizes {sizes}")
    if whole and x.numel():
        size = x.numel() * x.element_size()
        announce(
            name,
            f"{name}: {tuple(x.shape)} -> {tuple(shape)} would cut or interleave the shards of dims {whole}, and no "
            f"dim can be sharded in their place: they would be gathered ({size} bytes on every rank). Shard another "
            "dim, or call redistribute() to gather explicitly",
            size,
        )
    return redistributed_view(local_of(x), x._spec, source)


@sharded(
    *(torch.reshape, _T.reshape, _T.view, torch.flatten, _T.flatten, torch.unflatten, _T.unflatten, torch.squeeze),
    *(_T.squeeze, torch.unsqueeze, _T.unsqueeze, torch.ravel, _T.ravel, _T.view_as, _T.reshape_as, torch.atleast_1d),
    *(torch.atleast_2d, torch.atleast_3d),
)
def reshaped(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args
    dtype = kwargs.get("dtype", others[0] if others else None)
    if func is _T.view and isinstance(dtype, torch.dtype):
        return _of_bytes(x, dtype)
    if func is _T.view_as and others[0] is x and not torch.is_grad_enabled():
        return wrap(x._local.detach(), x._spec)  # autograd calls it if a function returns an input
    if func in (_T.view_as, _T.reshape_as):
        if not isinstance(x, ShardTensor):
            return x.reshape(others[0]._spec.shape)
        return reshaped(_T.reshape, types, (x, tuple(others[0].shape)), {})
    source, spec = _reshaped(x._spec, func, hashable(others), hashable(list(kwargs.items())))
    local = local_of(x) if source is x._spec else _moved(x, func.__name__, source, spec.shape)
    view = _T.view if func is _T.view else _T.reshape
    if active() is not None:  # the sizes are those of this rank's shard
        view = on_own_shard(view, shards_of(spec))
    return wrap_view(view(local, spec.local_shape), spec, x)


def _of_bytes(x: ShardTensor, dtype: torch.dtype) -> ShardTensor:
    """Returns the bytes of `x` as elements of another dtype; the last dim counts its elements.

    Raises:
        RuntimeError: a shard of the last dim has bytes of a part of an element; torch's class of error.
    """
    whole = gradient_spec(x._spec)  # bytes of a summand say nothing
    local = redistributed_view(local_of(x), x._spec, whole)
    before, after = x.dtype.itemsize, dtype.itemsize
    if before == after or not whole.shape:
        return wrap_view(local.view(dtype), whole, x)
    last = len(whole.shape) - 1
    m = whole.mesh_dim_of.get(last)
    along = (whole.shape[last],) if m is None else whole.sizes[m] or ()
    if any(size * before % after for size in along):
        raise RuntimeError(
            f"view({dtype}): shards {list(along)} of dim {last}, of {before} bytes an element, are no multiples of "
            f"{after} bytes: redistribute() to shards of another dim, or convert values with to()"
        )
    sizes = [tuple(size * before // after for size in along) if i == m else s for i, s in enumerate(whole.sizes)]
    shape = (*whole.shape[:last], whole.shape[last] * before // after)
    return wrap_view(local.view(dtype), make_spec(whole.mesh, whole.placements, shape, sizes), x)


# --- expanded dims


@sharded(_T.expand, torch.broadcast_to, _T.broadcast_to, _T.expand_as)
def expanded(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args
    if not isinstance(x, ShardTensor):
        return x.expand(others[0]._spec.shape)
    if func is _T.expand_as:
        func, others = _T.expand, [tuple(others[0].shape)]
    (local,), spec = inside(_viewed, (x,), func, hashable(others), ())
    return wrap_view(local.expand(spec.local_shape), spec, x)


# --- slices and single positions


@planned
def _slice_plan(spec: ShardTensorSpec, dim: int, start: int, stop: int, step: int) -> Any:
    """Returns the slice of this rank's shard, and the layout of the result: elements stay on their ranks."""
    m = spec.mesh_dim_of.get(dim)
    size = len(range(start, stop, step))
    shape = torch.Size((*spec.shape[:dim], size, *spec.shape[dim + 1 :]))
    if m is None:
        return slice(start, stop, step), make_spec(spec.mesh, spec.placements, shape, spec.sizes)
    cuts = []
    bounds = bounds_of(spec.sizes[m] or ())
    for low, high in zip(bounds, bounds[1:]):
        first = start if low <= start else start + -(-(low - start) // step) * step
        last = min(stop, high)
        cuts.append(slice(first - low, last - low, step) if first < last else slice(0, 0))
    index = spec.mesh.communicator(m).rank
    counts = tuple(len(range(*cut.indices(high - low))) for cut, low, high in zip(cuts, bounds, bounds[1:]))
    sizes = [counts if other == m else along for other, along in enumerate(spec.sizes)]
    return cuts[index], make_spec(spec.mesh, spec.placements, shape, sizes)


def sliced(x: ShardTensor, dim: int, start: int, stop: int, step: int = 1) -> ShardTensor:
    """Returns `x[start:stop:step]` along a dim, `0 <= start`, `step > 0`, without communication."""
    cut, spec = _slice_plan(x._spec, dim, start, max(start, stop), step)
    m = spec.mesh_dim_of.get(dim)
    types = {} if m is None else {spec.mesh.communicator(m): S(dim)}
    local = on_own_shard(torch.Tensor.__getitem__, types)(local_of(x), (slice(None),) * dim + (cut,))
    return wrap_view(local, spec, x)


def selected(x: ShardTensor, dim: int, index: int) -> ShardTensor:
    """Returns `x[index]` along a dim, replicated over the ranks that shard the dim."""
    x = sliced(x, dim, index, index + 1)
    local, spec = local_of(x), x._spec
    m = spec.mesh_dim_of.get(dim)
    placements, sizes = list(spec.placements), list(spec.sizes)
    if m is not None:
        placements[m], sizes[m] = Replicate(), None
        local = redistributed_view(local, spec, make_spec(spec.mesh, placements, spec.shape, sizes))
    placements = [Shard(p.dim - 1) if isinstance(p, Shard) and p.dim > dim else p for p in placements]
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    return wrap_view(local.squeeze(dim), make_spec(spec.mesh, placements, shape, sizes), x)


def basic_index(source: Any, index: Any) -> Any:
    """Returns `source[index]` for an index of ints, slices, None and Ellipsis."""
    x = source
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        missing = x.dim() - sum(entry is not None for entry in entries) + 1
        entries[at : at + 1] = [slice(None)] * missing
    dim = 0
    for entry in entries:
        if entry is None:
            x = torch.unsqueeze(x, dim)
            dim += 1
        elif isinstance(entry, slice):
            if entry != slice(None):
                x = sliced(x, dim, *entry.indices(x.shape[dim]))
            dim += 1
        else:
            if dim >= x.dim():
                raise IndexError(f"too many indices for a tensor of {source.dim()} dims")
            x = selected(x, dim, _position(entry, x.shape[dim], dim))
    return x if x is not source else wrap_view(local_of(x)[...], x._spec, x)


def _position(index: int, size: int, dim: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dim {dim} with size {size}")
    return index % size


@sharded(torch.select, _T.select)
def select(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int, index: int) -> Any:
        dim = dim_of(input, dim)
        return selected(input, dim, _position(int(index), input.shape[dim], dim))

    return call(*args, **kwargs)


@sharded(torch.narrow, _T.narrow)
def narrow(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int, start: int, length: int) -> Any:
        dim = dim_of(input, dim)
        start = start + input.shape[dim] if start < 0 else start
        if not 0 <= start <= start + length <= input.shape[dim]:
            raise IndexError(
                f"narrow: {start} to {start + length} is out of range for dim {dim} with size {input.shape[dim]}"
            )
        return sliced(input, dim, start, start + length)

    return call(*args, **kwargs)


@sharded(
    *(torch.split, _T.split, torch.chunk, _T.chunk, torch.tensor_split, _T.tensor_split, torch.split_with_sizes),
    *(_T.split_with_sizes, torch.unsafe_chunk, _T.unsafe_chunk, torch.unsafe_split, _T.unsafe_split),
)
def split(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x: ShardTensor, count: Any = None, dim: int = 0, **named: Any) -> Any:
        count = next(iter(named.values())) if count is None else count
        if isinstance(count, torch.Tensor):
            count = (count.full_tensor() if isinstance(count, ShardTensor) else count).tolist()
        if not isinstance(x, ShardTensor):
            return func(x, count, dim)
        dim = dim_of(x, dim)
        pieces = func(torch.empty(x.shape[dim], device="meta"), count)
        bounds = bounds_of([piece.shape[0] for piece in pieces])
        return tuple(sliced(x, dim, low, high) for low, high in zip(bounds, bounds[1:]))

    return call(*args, **kwargs)


@composed(torch.hsplit, _T.hsplit, checked=True)
def hsplit(input: Any, sections: Any = None, *, indices: Any = None) -> Any:
    return torch.tensor_split(input, indices if sections is None else sections, dim=min(1, input.dim() - 1))


@composed(torch.vsplit, _T.vsplit, checked=True)
def vsplit(input: Any, sections: Any = None, *, indices: Any = None) -> Any:
    return torch.tensor_split(input, indices if sections is None else sections, dim=0)


@composed(torch.dsplit, _T.dsplit, checked=True)
def dsplit(input: Any, sections: Any = None, *, indices: Any = None) -> Any:
    return torch.tensor_split(input, indices if sections is None else sections, dim=2)


@sharded(torch.unbind, _T.unbind)
def unbind(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x: ShardTensor, dim: int = 0) -> Any:
        dim = dim_of(x, dim)
        return tuple(selected(x, dim, index) for index in range(x.shape[dim]))

    return call(*args, **kwargs)


@sharded(_T.__iter__)
def iterate(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return iter(unbind(func, types, args, kwargs))


# --- joined tensors


def _joined(*arguments: Any) -> Labels:
    *shapes, func, dim = arguments
    return labels_of(func, (shapes, dim), {})


@sharded(torch.stack)
def stack(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(tensors: Sequence[Any], dim: int = 0) -> Any:
        dim = dim + tensors[0].dim() + 1 if dim < 0 else dim
        locals_, spec = inside(_joined, tensors, torch.stack, dim)
        return wrap(torch.stack(locals_, dim), spec)

    return call(*args, **kwargs)


def cat_unsharded(tensors: Sequence[Any], dim: int) -> ShardTensor:
    """Joins tensors along a dim that no operand shards, counted from the front, without communication."""
    locals_, spec = inside(_joined, tensors, torch.cat, dim)
    return wrap(torch.cat(locals_, dim), spec)
