"""Writes by position: scatter, scatter_add, index_add, index_copy, index_fill, index_put, and x[..] = y.

If the written dim is sharded, every rank has the index and the values, and writes the positions that it owns. If values
are added that are sharded and larger than the tensor, each rank adds its values, and these sums are reduced. The result
has the layout of the tensor, or of the index where only this one is sharded. An index that is shorter than the tensor
along another dim writes the tensor's first positions there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...spmd import S
from ..fallback import into_plain
from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..labels import Labels, inside, one_mesh
from ..moves.redistribute import check_is_no_copy
from ..placements import Placement, Replicate, Shard
from ..spec import make_spec
from ..tensor import ShardTensor, leave_leaf, local_of, wrap, written
from ..typed import on_own_shard
from .indexing import (
    check_positions,
    expanded,
    flat_positions,
    in_layout_of,
    is_basic,
    is_mask,
    own_positions,
    shortened,
)
from .pointwise import aligned, check_writable
from .select import dim_of
from .views import sliced

__all__: list[str] = []

_T = torch.Tensor


def _written(*arguments: Any) -> Labels:
    """Returns the labels of a write: tensor, index, values (None: a number). `rows`: the index has one dim."""
    x, index, values, dim, rows, is_sum = arguments
    if not x:
        one = [("index",) * len(shape or ()) for shape in (index, values)]
        return Labels([(), *one], (), frozenset(("index",)))
    names = tuple(range(len(x)))
    names_of_x = (*names[:dim], "written", *names[dim + 1 :])
    entries = (*names[:dim], "index", *names[dim + 1 :])
    operands = [names_of_x, ("index",) if rows else entries, entries if values else ()]
    return Labels(operands, names_of_x, frozenset(() if is_sum else ("index",)), added=frozenset((0,)))


def _write(
    func: Callable[..., Any], x: Any, dim: int, index: Any, values: Any, rows: bool, is_sum: bool, **options: Any
) -> Any:
    """Computes `func(x, dim, index, values)` on each rank's positions; others are written to an additional row."""
    dim = dim_of(x, dim)
    if not rows and x.dim() == index.dim() and any(d != dim and index.shape[d] < x.shape[d] for d in range(x.dim())):
        part = _write(func, shortened(x, index.shape, dim), dim, index, values, rows, is_sum, **options)
        return _with_first(x, part, dim)
    tensor = values if isinstance(values, torch.Tensor) else None
    (local, positions, written_values), spec = inside(_written, (x, index, tensor), dim, rows, is_sum)
    check_positions(positions, x.shape[dim] if x.dim() else 1, dim)
    m = x._spec.mesh_dim_of.get(dim) if isinstance(x, ShardTensor) else None
    written_values = values if written_values is None else written_values
    if m is None or m not in dict(spec.sharded) or spec.mesh_dim_of.get(dim) != m:
        return in_layout_of(func(local, dim, positions, written_values, **options), spec, x, lambda d: d)
    size = local.shape[dim]

    def write(local: torch.Tensor, positions: torch.Tensor, written_values: Any) -> torch.Tensor:
        positions, owned = own_positions(positions, x._spec.offsets[dim], size)
        positions = torch.where(owned, positions, size)
        padded = torch.cat([local, local.new_zeros((*local.shape[:dim], 1, *local.shape[dim + 1 :]))], dim)
        return func(padded, dim, positions, written_values, **options).narrow(dim, 0, size)

    result = on_own_shard(write, {x._spec.mesh.communicator(m): S(dim)})(local, positions, written_values)
    return in_layout_of(result, spec, x, lambda d: d)


def _with_first(x: Any, part: ShardTensor, dim: int) -> ShardTensor:
    """Returns a copy of `x` whose first positions along all dims but `dim` are `part`, sharded as `part` is."""
    spec = x._spec if isinstance(x, ShardTensor) else make_spec(part._spec.mesh, None, x.shape)
    x = x if isinstance(x, ShardTensor) else wrap(x, spec)
    placements: list[Placement] = [p if isinstance(p, Shard) else Replicate() for p in spec.placements]
    sizes = list(spec.sizes)
    for m, d in part._spec.sharded:
        if not isinstance(placements[m], Shard) and Shard(d) not in placements:
            *others, last = part._spec.sizes[m] or ()
            placements[m], sizes[m] = Shard(d), (*others, last + x.shape[d] - part.shape[d])
    result: Any = x.redistribute(placements=placements, sizes=sizes).clone()
    result[tuple(slice(None) if d == dim else slice(size) for d, size in enumerate(part.shape))] = part
    return result


def _scatter(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    def scatter(input: Any, dim: int, index: Any, src: Any = None, *reduce: Any, **options: Any) -> Any:
        values = options.pop("value", src) if src is None else src
        if reduce:
            options["reduce"] = reduce[0]
        values = shortened(values, index.shape, None) if isinstance(values, torch.Tensor) else values
        is_sum = name == "scatter_add" or (options.get("reduce") == "sum" and options.get("include_self", True))
        return _write(func, input, dim, index, values, False, is_sum, **options)

    return scatter


def _index_write(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    def write(input: Any, dim: int, index: Any, source: Any = None, *mode: Any, **options: Any) -> Any:
        values = options.pop("value", source) if source is None else source
        if mode:
            options["reduce"] = mode[0]
        if name == "index_fill" and isinstance(index, ShardTensor) and index._spec.sharded:
            n, d = input.shape[dim] if input.dim() else 1, dim_of(input, dim)
            if n <= 2 * index.numel():  # how often each position is filled, as int32, is less than all positions
                times = torch.zeros(n, dtype=torch.int32, device=index.device)
                times = torch.index_add(
                    times, 0, index.reshape(-1), torch.ones_like(index, dtype=torch.int32).reshape(-1)
                )
                filled = (times > 0).reshape([n if other == d else 1 for other in range(input.dim())])
                return torch.where(filled, values, input).to(input.dtype)
        return _write(func, input, dim, index, values, True, name == "index_add", **options)

    return write


def _handler(call: Callable[..., Any], in_place: bool, saved: bool = False) -> Callable[..., Any]:
    """Returns the handler of a write; `saved`: backward needs the tensor as it was, so that in place it is copied."""

    def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if not in_place:
            return call(*args, **kwargs)
        x, *others = args
        if not isinstance(x, ShardTensor):
            return into_plain(func, func.__name__, args, kwargs)
        check_writable(func.__name__, x)
        before = x.clone() if saved and torch.is_grad_enabled() else x
        return x.copy_(call(before, *others, **kwargs))

    return handler


for _make, _names in (
    (_scatter, ("scatter", "scatter_add", "scatter_reduce")),
    (_index_write, ("index_add", "index_copy", "index_fill", "index_reduce")),
):
    for _name in _names:
        _call = _make(getattr(torch, _name), _name)
        sharded(getattr(torch, _name), getattr(_T, _name))(_handler(_call, False))
        sharded(getattr(_T, f"{_name}_"))(_handler(_call, True, _name in ("scatter_reduce", "index_reduce")))


def _indexed(x: Any, indices: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Returns the indexed dims, and the positions in each; a mask is that of its True positions, on every rank."""
    dims: list[int] = []
    positions: list[Any] = []
    dim = 0
    for index in indices:
        if is_mask(index):
            whole = index.full_tensor() if isinstance(index, ShardTensor) else index
            found = list(whole.to(x.device).nonzero().unbind(1))
        else:
            found = [] if index is None or isinstance(index, slice) else [index.to(x.device)]
        dims += range(dim, dim + len(found))
        positions += found
        dim += max(1, len(found))
    return dims, positions


@sharded(torch.index_put, _T.index_put, _T.index_put_)
def index_put(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        dims, positions = _indexed(input, indices)
        at = torch.broadcast_shapes(*(index.shape for index in positions))
        flat = flat_positions(input, dims, positions)
        front = list(range(len(dims)))
        x = torch.movedim(input, dims, front) if dims != front else input
        rest = x.shape[len(dims) :]
        # where the values have the dims of the index: in place of adjacent dims, else in front
        before = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        values = torch.broadcast_to(values, (*rest[:before], *at, *rest[before:]))
        if before:
            values = torch.movedim(values, list(range(before, before + len(at))), list(range(len(at))))
        rows = x.flatten(0, len(dims) - 1) if len(dims) > 1 else x
        write = torch.index_add if accumulate else torch.index_copy
        result = write(rows, 0, flat.reshape(-1), values.reshape(-1, *rest)).reshape(x.shape)
        result = torch.movedim(result, front, dims) if dims != front else result
        return input.copy_(result) if func is _T.index_put_ else result

    return call(*args, **kwargs)


@sharded(_T.__setitem__)
def setitem(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> None:
    """Writes `x[slices, ints] = value`, each rank in its shard; also masks with a number, and an index at dim 0."""
    x, index, value = args
    if not isinstance(x, ShardTensor):
        into_plain(func, "x[..] = y", args, kwargs)
        return
    entries = expanded(index, x)
    if len(entries) == 1 and isinstance(entries[0], torch.Tensor):
        (only,) = entries
        if is_mask(only):
            if isinstance(value, torch.Tensor) and value.dim():
                raise NotImplementedError("x[mask] = y with a tensor y depends on the mask's values: use torch.where()")
            mask = only[(..., *[None] * (x.dim() - only.dim()))]
            x.copy_(torch.where(mask.bool(), value, x))
        else:
            if not isinstance(value, torch.Tensor):
                value = wrap(torch.tensor(value, dtype=x.dtype, device=x.device), make_spec(x._spec.mesh, None, ()))
            index_put(_T.index_put_, types, (x, (only,), value), {})
        return
    if not is_basic(entries):
        raise NotImplementedError(
            "x[index, ..] = y is not supported: index the first dim only, or use index_copy or scatter"
        )
    if x._spec.partial:
        raise ValueError(f"x[..] = y on {x._spec.placements}: redistribute() x to Replicate first")
    leave_leaf(x)
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("x[..] = y on a leaf that requires gradients: use x.clone(), or torch.no_grad()")
    _set_slices(x, [entry for entry in entries if entry is not None], value, index)


@sharded(torch.select_scatter, _T.select_scatter, torch.slice_scatter, _T.slice_scatter)
def part_scatter(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Writes a part along a sharded dim into a copy; along others shards are independent."""
    is_slice = func in (torch.slice_scatter, _T.slice_scatter)

    def call(input: Any, src: Any, dim: int = 0, *at: Any, **named: Any) -> Any:
        dim = dim_of(input, dim)
        if not isinstance(input, ShardTensor) or dim not in input._spec.mesh_dim_of or input._spec.partial:
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        bounds = [*at, *(named[name] for name in ("index", "start", "end", "step") if name in named)]
        result = input.clone()
        result[(*[slice(None)] * dim, slice(*bounds) if is_slice else bounds[0])] = src
        return result

    return call(*args, **kwargs)


def _set_slices(x: ShardTensor, entries: Sequence[Any], value: Any, index: Any) -> None:
    one_mesh((x, value), "__setitem__")
    part, cut = x, []  # index of the local tensor; ints stay dims of one
    for dim, entry in enumerate(entries):
        if isinstance(entry, int):
            if not -x.shape[dim] <= entry < x.shape[dim]:
                raise IndexError(f"index {entry} is out of bounds for dim {dim} with size {x.shape[dim]}")
            entry = slice(entry % x.shape[dim], entry % x.shape[dim] + 1)
        part = sliced(part, dim, *entry.indices(x.shape[dim]))
        cut.append(entry)
    target = local_of(x)
    check_is_no_copy("x[..] = y", target)
    for dim, entry in enumerate(cut):
        target = target[(slice(None),) * dim + (_local_slice(x, dim, entry),)]
    if isinstance(value, torch.Tensor) and value.dim():
        shape = [
            size for size, entry in zip(part.shape, [*entries, *[slice(None)] * x.dim()]) if type(entry) is not int
        ]
        if value.dim() > len(shape):
            value = value.reshape(value.shape[value.dim() - len(shape) :])
        value = value.expand(shape)
        for dim, entry in enumerate(entries):
            value = value.unsqueeze(dim) if type(entry) is int else value
    if isinstance(value, torch.Tensor):  # a plain one too: its gradient is the sum over all ranks
        (_, value), _ = inside(aligned, (part, value), result=part._spec)
    target.copy_(value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=target.device))
    written(x)


def _local_slice(x: ShardTensor, dim: int, entry: slice) -> slice:
    """Returns the part of a slice of the global dim that a rank writes."""
    start, stop, step = entry.indices(x.shape[dim])
    offset, size = x._spec.offsets[dim], x._spec.local_shape[dim]
    first = start if offset <= start else start + -(-(offset - start) // step) * step
    low, high = first - offset, min(max(start, stop) - offset, size)
    return slice(low, high, step) if low < high else slice(0, 0)
