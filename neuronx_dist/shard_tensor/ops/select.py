"""Selection: topk, extremes with their positions, sorting.

Along a sharded dim candidates (value, global index) are sent, not the tensor: each rank proposes k, or all its
elements. For `topk` they go to the rank that owns the row in the result, which is sharded along another dim if one is
long enough; `max(dim)` and `argmax` propose one candidate, and each rank has the result, as of `amax`. The smaller
index wins among equal candidates; torch does not say which of more than k equal elements a shard's `topk` proposes.
Sorting needs every element: the tensor is sharded along another dim (all to all; gathered if there is none), sorted,
and brought back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...spmd import S
from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..labels import Labels, inside, planned
from ..moves.fetch import position_type
from ..moves.redistribute import redistributed
from ..placements import Placement, Replicate, Shard
from ..spec import ShardTensorSpec, gradient_spec, make_spec
from ..tensor import ShardTensor, wrap
from ..typed import on_own_shard
from .reduce import operand, reduced

__all__: list[str] = []

_T = torch.Tensor


def dim_of(x: torch.Tensor, dim: int) -> int:
    """Returns `dim` counted from the front.

    Raises:
        IndexError: the tensor has no such dim.
    """
    ndim = max(1, x.dim())
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {x.dim()} dims")
    return dim % ndim


@planned
def elsewhere(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """Returns a layout without shards of `dim`: of the longest other unsharded dim, or whole if all are short."""
    m = spec.mesh_dim_of.get(dim)
    if m is None:
        return spec
    free = [d for d in range(len(spec.shape)) if d != dim and d not in spec.mesh_dim_of]
    longest = max(free, key=lambda d: spec.shape[d], default=None)
    placements: list[Placement] = list(spec.placements)
    sizes = list(spec.sizes)
    fits = longest is not None and spec.shape[longest] >= spec.mesh.shape[m]
    placements[m], sizes[m] = Shard(longest) if fits else Replicate(), None  # type: ignore[arg-type]
    return make_spec(spec.mesh, placements, spec.shape, sizes)


@planned
def _proposed(spec: ShardTensorSpec, dim: int, k: int) -> ShardTensorSpec:
    """Returns the layout of all ranks' candidates, joined along `dim` in the order of shards."""
    m = spec.mesh_dim_of[dim]
    counts = tuple(min(k, size) for size in spec.sizes[m] or ())
    shape = (*spec.shape[:dim], sum(counts), *spec.shape[dim + 1 :])
    return make_spec(
        spec.mesh, spec.placements, shape, [counts if i == m else along for i, along in enumerate(spec.sizes)]
    )


@planned
def _whole(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    placements = [Replicate() if isinstance(p, Shard) and p.dim == dim else p for p in spec.placements]
    return make_spec(spec.mesh, placements, spec.shape, spec.sizes)


def _candidates(function: Callable[..., Any], spec: ShardTensorSpec, dim: int) -> Callable[..., Any]:
    """Calls `function`, which picks some elements of this rank's shard of `dim`."""
    return on_own_shard(function, {spec.mesh.communicator(spec.mesh_dim_of[dim]): S(dim)})


def _gathered(
    values: torch.Tensor,
    indices: torch.Tensor,
    spec: ShardTensorSpec,
    dim: int,
    k: int,
    layout: Callable[[ShardTensorSpec, int], ShardTensorSpec],
) -> tuple[torch.Tensor, torch.Tensor, ShardTensorSpec]:
    """Gathers all ranks' candidates, in the order of ranks, and their layout; indices become global."""
    proposed = _proposed(spec, dim, k)
    target = layout(proposed, dim)
    indices = (indices + spec.offsets[dim]).to(position_type(spec.shape[dim]))
    indices = redistributed(indices, proposed, target)
    return redistributed(values, proposed, target), indices.to(torch.int64), target


def _resized(spec: ShardTensorSpec, dim: int, size: int) -> ShardTensorSpec:
    return make_spec(spec.mesh, spec.placements, (*spec.shape[:dim], size, *spec.shape[dim + 1 :]), spec.sizes)


@sharded(torch.topk, _T.topk)
def topk(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        dim = dim_of(input, dim)
        if input.dim() and not 0 <= k <= input.shape[dim]:
            raise ValueError(f"topk: k={k} is out of range for dim {dim}, which has {input.shape[dim]} elements")
        local, spec = operand(input)
        if dim not in spec.mesh_dim_of:
            values, indices = torch.topk(local, k, dim, largest, sorted)
            out = _resized(spec, dim, k) if input.dim() else spec
        else:
            values, indices = _candidates(torch.topk, spec, dim)(local, min(k, local.shape[dim]), dim, largest)
            values, indices, out = _gathered(values, indices, spec, dim, k, elsewhere)
            indices, order = indices.sort(dim=dim)
            values, order = values.gather(dim, order).sort(dim=dim, descending=largest, stable=True)
            values, indices = values.narrow(dim, 0, k), indices.gather(dim, order.narrow(dim, 0, k))
            out = _resized(out, dim, k)
        return torch.return_types.topk((wrap(values, out), wrap(indices, out)))

    return call(*args, **kwargs)


# --- extremes and their positions

_MAXIMA = frozenset((torch.max, _T.max, torch.argmax, _T.argmax))


def extreme_along(x: ShardTensor, dim: int, keepdim: bool, maximum: bool) -> tuple[ShardTensor, ShardTensor]:
    """Returns the extreme along a dim and its first position."""
    dim = dim_of(x, dim)
    if x.dim() and not x.shape[dim]:
        raise IndexError(f"max or min over dim {dim}, which has no elements")
    best = torch.max if maximum else torch.min
    local, spec = operand(x)
    out = reduced(spec, dim, keepdim).spec
    if dim not in spec.mesh_dim_of:
        values, indices = best(local, dim, keepdim)
        return wrap(values, out), wrap(indices, out)
    if local.shape[dim]:
        values, indices = _candidates(best, spec, dim)(local, dim, True)
    else:
        values, indices = local, torch.zeros_like(local, dtype=torch.int64)
    values, indices, _ = _gathered(values, indices, spec, dim, 1, _whole)
    values, chosen = best(values, dim, True)
    indices = indices.gather(dim, chosen)
    return wrap(values.reshape(out.local_shape), out), wrap(indices.reshape(out.local_shape), out)


@sharded(torch.max, _T.max, torch.min, _T.min)
def maximum(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Computes max or min of all elements, along one dim, or of two tensors by element."""
    maximum = func in _MAXIMA
    if len(args) + len(kwargs) == 1:
        return (torch.amax if maximum else torch.amin)(*args, **kwargs)
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        return (torch.maximum if maximum else torch.minimum)(*args, **kwargs)

    def call(input: ShardTensor, dim: int, keepdim: bool = False) -> Any:
        pair = extreme_along(input, dim, keepdim, maximum)
        return torch.return_types.max(pair) if maximum else torch.return_types.min(pair)

    return call(*args, **kwargs)


@sharded(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
def argmax(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        maximum = func in _MAXIMA
        with torch.no_grad():
            if dim is not None:
                return extreme_along(input, dim, keepdim, maximum)[1]
            return _position_of_all(input, keepdim, maximum)

    return call(*args, **kwargs)


def _position_of_all(x: ShardTensor, keepdim: bool, maximum: bool) -> torch.Tensor:
    """Returns the first position of the extreme in the flattened tensor, found dim by dim from the last."""
    if not x.numel():
        raise IndexError(f"max or min of a tensor of shape {tuple(x.shape)}, which has no elements")
    values, position = x, None
    stride = 1
    for dim in reversed(range(x.dim())):
        values, along = extreme_along(values, dim, True, maximum)
        before = along * stride
        position = before if position is None else torch.gather(position, dim, along) + before
        stride *= x.shape[dim]
    if position is None:
        return wrap(torch.zeros_like(x._local, dtype=torch.int64), x._spec)
    return position if keepdim else position.reshape(())


# --- functions that need every element of a dim


def _along(func: Callable[..., Any], x: ShardTensor, dim: int, /, *others: Any, **options: Any) -> list[Any]:
    """Computes `func` in a layout without shards of `dim`; results of the shape of `x` get its layout again."""
    local, spec = operand(x)
    moved = elsewhere(spec, dim)
    results = func(redistributed(local, spec, moved), *others, **options)
    wrapped = []
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if result.shape == moved.local_shape:
            wrapped.append(wrap(redistributed(result, moved, spec), spec))
        else:
            wrapped.append(wrap(result, reduced(moved, dim, result.dim() == x.dim()).spec))
    return wrapped


@sharded(torch.sort, _T.sort, torch.argsort, _T.argsort)
def sort(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        options = {"dim": dim, "descending": descending, "stable": stable}
        if func in (torch.argsort, _T.argsort):
            return _along(torch.argsort, input, dim_of(input, dim), **options)[0]
        return _named(torch.sort, _along(torch.sort, input, dim_of(input, dim), **options))

    return call(*args, **kwargs)


@sharded(torch.msort, _T.msort)
def msort(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return sort(torch.sort, types, (*args, 0), kwargs)[0]


@sharded(torch.cummax, _T.cummax, torch.cummin, _T.cummin)
def cumulative(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int, **options: Any) -> Any:
        results = _along(func, input, dim_of(input, dim), dim, **options)
        return _named(func, results)

    return call(*args, **kwargs)


@sharded(
    *(torch.median, _T.median, torch.nanmedian, _T.nanmedian, torch.mode, _T.mode),
    *(torch.kthvalue, _T.kthvalue),
)
def median(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Computes the median along a dim; `median()` of all elements has no handler."""
    name = func.__name__
    if name.endswith("median") and len(args) + len(kwargs) == 1:
        return FUNCTIONS[UNHANDLED](func, types, args, kwargs)

    def kth(input: ShardTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
        return _along(func, input, dim_of(input, dim), k, dim, keepdim)

    def call(input: ShardTensor, dim: int = -1, keepdim: bool = False) -> Any:
        return _along(func, input, dim_of(input, dim), dim, keepdim)

    return _named(func, (kth if name == "kthvalue" else call)(*args, **kwargs))


def _named(func: Callable[..., Any], pair: Sequence[torch.Tensor]) -> Any:
    return getattr(torch.return_types, func.__name__)(tuple(pair))


# --- places in sorted sequences


def _placed(values: torch.Size, sequence: torch.Size) -> Labels:
    names = tuple(range(len(values)))
    return Labels([names, (*(names[:-1] if len(sequence) > 1 else ()), "sequence")], names)


@sharded(torch.bucketize, torch.searchsorted)
def places(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Returns the number of smaller elements: the sum of the numbers among the elements of each shard."""

    def call(first: Any, second: Any, **options: Any) -> Any:
        values, sequence = (first, second) if func is torch.bucketize else (second, first)
        if options.get("sorter") is not None or options.get("out") is not None:
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        if not isinstance(values, torch.Tensor):
            values = torch.tensor(values, device=sequence.device)
        dtype = torch.promote_types(values.dtype, sequence.dtype)  # torch takes equal ones alone
        values, sequence = values.to(dtype), sequence.to(dtype)
        (values, sequence), spec = inside(_placed, (values, sequence))
        local = torch.searchsorted(sequence, values, **options)
        whole = gradient_spec(spec)
        return wrap(redistributed(local, spec, whole), whole)

    names = {"input": "first" if func is torch.bucketize else "second", "self": "second"}
    names |= {"boundaries": "second", "sorted_sequence": "first"}
    return call(*args, **{names.get(name, name): value for name, value in kwargs.items()})
