"""Functions that move elements: cat along any dim, roll, flip, repeat, diff, unfold, tril and triu, meshgrid.

Every rank sends the positions of its shard that others need, by a plan from sizes alone (`moves/intervals.py`). Results
are sharded as the operands are, in shards of about equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ...torch_internals.low_level import of_lists
from ..handlers import composed, sharded
from ..labels import one_mesh, planned
from ..moves.exchange import exchange, linked
from ..moves.intervals import Bounds, ExchangePlan, Run, bounds_of, divided, flipped, rolled
from ..moves.redistribute import redistributed
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, gradient_spec, local_of, wrap, wrap_result
from ..typed import on_own_shard, shards_of
from .reduce import operand
from .select import dim_of
from .views import cat_unsharded

__all__: list[str] = []

_T = torch.Tensor


def _along(spec: ShardTensorSpec, dim: int) -> tuple[int, Bounds]:
    """Returns the mesh dim that shards `dim`, and the bounds of its shards."""
    m = spec.mesh_dim_of[dim]
    return m, bounds_of(spec.sizes[m] or ())


def _sized(spec: ShardTensorSpec, dim: int, sizes: Sequence[int] | int) -> ShardTensorSpec:
    """Returns the layout with another size of `dim`, in shards of `sizes` if `dim` is sharded."""
    total = sizes if isinstance(sizes, int) else sum(sizes)
    m = spec.mesh_dim_of.get(dim)
    all_sizes = [sizes if i == m else along for i, along in enumerate(spec.sizes)]
    return make_spec(spec.mesh, spec.placements, (*spec.shape[:dim], total, *spec.shape[dim + 1 :]), all_sizes)  # type: ignore[arg-type]


def placed(x: ShardTensor, dim: int, runs: tuple[Run, ...], out_sizes: Sequence[int]) -> ShardTensor:
    """Returns the positions `runs` of a sharded dim, in shards of `out_sizes`."""
    local, spec = operand(x)
    m, bounds = _along(spec, dim)
    local = exchange(local, divided(bounds, runs, bounds_of(out_sizes)), spec.mesh.communicator(m), dim)
    return wrap(local, _sized(spec, dim, tuple(out_sizes)))


# --- joined


@planned
def _joined(spec: ShardTensorSpec, dim: int, *others: ShardTensorSpec) -> Any:
    """Returns the plan of a cat, in which each rank has joined its parts."""
    m = spec.mesh_dim_of[dim]
    parts = [operand.sizes[m] or () for operand in (spec, *others)]
    totals = tuple(sum(sizes) for sizes in zip(*parts))
    bounds = bounds_of(totals)
    runs = []
    for i in range(len(parts)):
        for rank, size in enumerate(parts[i]):
            if size:
                runs.append(Run(bounds[rank] + sum(sizes[rank] for sizes in parts[:i]), 1, size))
    return divided(bounds, tuple(runs), bounds), _sized(spec, dim, totals)


@planned
def _beside(spec: ShardTensorSpec, dim: int, count: int) -> ShardTensorSpec | None:
    """Returns the layout of a cat of tensors of one layout on their ranks; None if values travel, or are summed."""
    dim = dim + len(spec.shape) if dim < 0 else dim
    if spec.partial or not 0 <= dim < len(spec.shape) or dim in spec.mesh_dim_of:
        return None
    shape = [size * count if d == dim else size for d, size in enumerate(spec.shape)]
    return make_spec(spec.mesh, spec.placements, shape, spec.sizes)


@sharded(torch.cat, torch.concat, torch.concatenate)
def cat(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(tensors: Sequence[Any], dim: int = 0, axis: int | None = None) -> Any:
        dim = dim if axis is None else axis
        if type(tensors[0]) is ShardTensor:
            like = tensors[0]._spec
            if all(type(x) is ShardTensor and x._spec is like for x in tensors):  # the usual call
                beside = _beside(like, dim, len(tensors))
                if beside is not None:
                    return wrap(torch.cat([local_of(x) for x in tensors], dim), beside)
        ndim = max(x.dim() for x in tensors)
        mesh = one_mesh(tensors, "cat")
        tensors = [x for x in tensors if x.dim() == ndim or x.shape != (0,)]  # torch skips empty vectors, too
        if not any(isinstance(x, ShardTensor) for x in tensors):
            tensors[0] = wrap(tensors[0], make_spec(mesh, None, tensors[0].shape))
        dim = dim_of(tensors[0], dim)
        along = [x for x in tensors if isinstance(x, ShardTensor) and dim in x._spec.mesh_dim_of]
        if not along:
            return cat_unsharded(tensors, dim)
        like = gradient_spec(max(along, key=lambda x: x.numel())._spec)
        m = like.mesh_dim_of[dim]
        locals_, specs = [], []
        for x in tensors:
            layout = x._spec if isinstance(x, ShardTensor) else make_spec(like.mesh, None, x.shape)
            keeps = layout.mesh_dim_of.get(dim) == m
            sizes = [
                (layout.sizes[m] if keeps else None) if i == m else along_m for i, along_m in enumerate(like.sizes)
            ]
            specs.append(make_spec(like.mesh, like.placements, x.shape, sizes))
            locals_.append(redistributed(local_of(x) if isinstance(x, ShardTensor) else x, layout, specs[-1]))
        plan, spec = _joined(specs[0], dim, *specs[1:])
        return wrap(exchange(torch.cat(locals_, dim), plan, like.mesh.communicator(m), dim), spec)

    return call(*args, **kwargs)


# --- moved and repeated


@sharded(torch.roll, _T.roll)
def roll(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, shifts: Any, dims: Any = None) -> Any:
        if dims is None or dims == ():
            return torch.roll(input.reshape(-1), shifts, 0).reshape(input.shape)
        shifts, dims = ((value,) if isinstance(value, int) else tuple(value) for value in (shifts, dims))
        if len(shifts) != len(dims):
            raise ValueError(f"roll: {len(shifts)} shifts for {len(dims)} dims: pass one shift for each dim")
        x = input
        for shift, dim in zip(shifts, dims):
            dim = dim_of(x, dim)
            m = x._spec.mesh_dim_of.get(dim)
            if m is None:
                x = wrap(torch.roll(local_of(x), shift, dim), x._spec)
            else:
                x = placed(x, dim, rolled(x.shape[dim], shift), x._spec.sizes[m] or ())
        return x

    return call(*args, **kwargs)


@sharded(torch.flip, _T.flip, torch.fliplr, _T.fliplr, torch.flipud, _T.flipud)
def flip(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, *positions: Any, dims: Any = ()) -> Any:
        dims = positions or dims
        if func.__name__ != "flip":
            dims = (1 if func.__name__ == "fliplr" else 0,)
        dims = (dims,) if isinstance(dims, int) else dims
        dims = tuple(dims[0]) if dims and isinstance(dims[0], (list, tuple)) else dims
        x = input
        for dim in dims:
            dim = dim_of(x, dim)
            m = x._spec.mesh_dim_of.get(dim)
            if m is None:
                x = wrap(local_of(x).flip(dim), x._spec)
            else:
                x = placed(x, dim, flipped(x.shape[dim]), x._spec.sizes[m] or ())
        return x

    return call(*args, **kwargs)


@sharded(_T.repeat, torch.tile, _T.tile)
def repeat(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x: Any, *counts: Any) -> Any:
        counts = tuple(counts[0]) if isinstance(counts[0], (list, tuple)) else counts
        if func.__name__ == "tile":
            counts = (1,) * (x.dim() - len(counts)) + counts
        if len(counts) < x.dim():
            raise ValueError(
                f"repeat: {len(counts)} counts for a tensor of {x.dim()} dims: pass one count for each dim, or more"
            )
        for _ in range(len(counts) - x.dim()):
            x = x.unsqueeze(0)
        for dim, count in enumerate(counts):
            if count == 1:
                continue
            m = x._spec.mesh_dim_of.get(dim)
            if m is None:
                times = [count if d == dim else 1 for d in range(x.dim())]
                x = wrap(local_of(x).repeat(times), _sized(x._spec, dim, x.shape[dim] * count))
            else:
                runs = (Run(0, 1, x.shape[dim]),) * (count if x.shape[dim] else 0)
                x = placed(x, dim, runs, [size * count for size in x._spec.sizes[m] or ()])
        return x

    return call(*args, **kwargs)


@sharded(torch.repeat_interleave, _T.repeat_interleave)
def repeat_interleave(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
        if dim is None:
            input, dim = input.reshape(-1), 0
        if not isinstance(repeats, int):
            mesh = one_mesh((input, repeats), "repeat_interleave")
            whole = repeats.full_tensor() if isinstance(repeats, ShardTensor) else repeats
            index = torch.repeat_interleave(whole, output_size=output_size).to(input.device)
            return torch.index_select(input, dim, wrap(index, make_spec(mesh, None, index.shape)))
        dim = dim_of(input, dim)
        m = input._spec.mesh_dim_of.get(dim)
        lengths = input.shape[dim] if m is None else input._spec.sizes[m] or ()
        sizes = lengths * repeats if isinstance(lengths, int) else tuple(size * repeats for size in lengths)
        return wrap(local_of(input).repeat_interleave(repeats, dim), _sized(input._spec, dim, sizes))

    return call(*args, **kwargs)


@sharded(torch.diff, _T.diff)
def diff(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
        dim = dim_of(input, dim)
        ends = [x for x in (prepend, input, append) if x is not None]
        if n == 0:
            return input
        x = torch.cat(ends, dim) if len(ends) > 1 else input
        for _ in range(n):
            after, before = x.narrow(dim, 1, x.shape[dim] - 1), x.narrow(dim, 0, x.shape[dim] - 1)
            x = torch.ne(after, before) if x.dtype is torch.bool else after - before
        return x

    return call(*args, **kwargs)


# --- windows as a dim of their own


@planned
def _windows(spec: ShardTensorSpec, dim: int, size: int, step: int) -> Any:
    """Returns the positions that each rank needs for the windows that begin in its shard."""
    _, bounds = _along(spec, dim)
    count = (bounds[-1] - size) // step + 1
    out = tuple(min(count, -(-bound // step)) for bound in bounds[:-1]) + (count,)
    needs = [(Run(low * step, 1, (high - low - 1) * step + size),) if low < high else () for low, high in pairwise(out)]
    sizes = tuple(high - low for low, high in pairwise(out))
    shaped = _sized(spec, dim, sizes)
    return ExchangePlan(bounds, needs), make_spec(spec.mesh, spec.placements, (*shaped.shape, size), shaped.sizes)


@sharded(_T.unfold)
def unfold(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x: ShardTensor, dimension: int, size: int, step: int) -> Any:
        if not x.dim():  # a window of one element, without a dim of windows
            return x.unsqueeze(0).unfold(dimension, size, step).squeeze(-1)
        dim = dim_of(x, dimension)
        if not 0 < size <= x.shape[dim] or step < 1:
            raise ValueError(
                f"unfold: size={size}, step={step} do not fit dim {dim}, which has {x.shape[dim]} elements: size "
                "must be from 1 to that number, step at least 1"
            )
        local, spec = operand(x)
        if dim not in spec.mesh_dim_of:
            count = (x.shape[dim] - size) // step + 1
            out = _sized(spec, dim, count)
            return wrap_result(local.unfold(dim, size, step), out.with_shape(torch.Size((*out.shape, size))), (x,))
        plan, out = _windows(spec, dim, size, step)
        needed = exchange(local, plan, spec.mesh.communicator(spec.mesh_dim_of[dim]), dim)
        if needed.shape[dim]:
            return wrap(needed.unfold(dim, size, step), out)
        return wrap(linked(needed.new_zeros(out.local_shape), needed), out)

    return call(*args, **kwargs)


def _pair(x: Any) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else (x[0], x[-1])


@sharded(F.unfold)
def image_windows(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
        kernel, dilations, pads, strides = (_pair(option) for option in (kernel_size, dilation, padding, stride))
        x = F.pad(input, (pads[1], pads[1], pads[0], pads[0])) if any(pads) else input
        first = x.dim() - 2
        for i in range(2):
            x = x.unfold(first + i, (kernel[i] - 1) * dilations[i] + 1, strides[i])
        x = x[..., :: dilations[0], :: dilations[1]]
        batch = range(first - 1)
        x = x.permute(*batch, first - 1, first + 2, first + 3, first, first + 1)
        return x.reshape(*x.shape[: first - 1], -1, x.shape[-2] * x.shape[-1])

    return call(*args, **kwargs)


# --- triangles and grids


@sharded(torch.tril, _T.tril, torch.triu, _T.triu)
def triangle(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, diagonal: int = 0) -> Any:
        local, spec = local_of(input), input._spec
        on_shard = on_own_shard(func, shards_of(spec))
        return wrap(on_shard(local, diagonal + spec.offsets[-2] - spec.offsets[-1]), spec)

    return call(*args, **kwargs)


for _at_least in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
    composed(getattr(of_lists, _at_least.__name__))(
        lambda tensors, _function=_at_least: tuple(_function(x) for x in tensors)
    )


@composed(torch.hstack)
def hstack(tensors: Sequence[Any]) -> Any:
    rows = [torch.atleast_1d(x) for x in tensors]
    return torch.cat(rows, 0 if rows[0].dim() == 1 else 1)


@composed(torch.column_stack)
def column_stack(tensors: Sequence[Any]) -> Any:
    return torch.cat([x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors], 1)


@composed(torch.combinations)
def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    return input[torch.combinations(torch.arange(input.shape[0], device=input.device), r, with_replacement)]


@composed(torch.cartesian_prod)
def cartesian_prod(*tensors: Any) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([x.flatten() for x in torch.meshgrid(*tensors, indexing="ij")], 1)


@sharded(torch.meshgrid, of_lists.meshgrid)
def meshgrid(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(*tensors: Any, indexing: str = "ij") -> Any:
        tensors = tuple(tensors[0]) if isinstance(tensors[0], (list, tuple)) else tensors
        one_mesh(tensors, "meshgrid")
        shape = [x.numel() for x in tensors]
        grids = []
        for i, x in enumerate(tensors):
            x = x.reshape(-1)[(None,) * i + (slice(None),) + (None,) * (len(tensors) - 1 - i)]
            x = x.expand(shape)
            grids.append(x.transpose(0, 1) if indexing == "xy" and len(tensors) > 1 else x)
        return tuple(grids)

    return call(*args, **kwargs)
