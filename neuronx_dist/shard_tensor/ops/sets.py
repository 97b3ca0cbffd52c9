"""Values as sets: unique ones, runs of equal ones, membership, and histograms of points. Ranks' counts are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...spmd import no_typecheck
from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from ..labels import Labels, inside
from ..moves.one_dim import gather, gather_each
from ..moves.redistribute import redistributed
from ..placements import Placement, Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, wrap
from ..windows.local_windows import nonempty
from .reduce import operand, reduced
from .select import dim_of, elsewhere

__all__: list[str] = []

_T = torch.Tensor


@composed(torch.unique_consecutive, _T.unique_consecutive)
def unique_consecutive(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Returns the first value of each run, sharded as the values are: a rank needs one value of a neighbour."""
    x = input.detach().reshape(-1) if dim is None else torch.movedim(input.detach(), dim, 0)
    n = x.shape[0]
    if not x.numel():
        options = {"return_inverse": return_inverse, "return_counts": return_counts, "dim": dim}
        return FUNCTIONS[UNHANDLED](torch.unique_consecutive, (), (input,), options)
    differs = x.narrow(0, 1, n - 1) != x.narrow(0, 0, n - 1)
    differs = differs.any(list(range(1, x.dim()))) if x.dim() > 1 else differs
    starts = F.pad(differs.to(torch.int64), (1, 0), value=1)
    rows: Any = x[starts.bool()]
    results = [rows if dim is None else torch.movedim(rows, 0, dim)]
    if return_inverse:
        runs = starts.cumsum(0) - 1
        results.append(runs.reshape(input.shape) if dim is None else runs)
    if return_counts:
        at: Any = torch.arange(n, device=x.device)[starts.bool()]
        results.append(torch.diff(at, append=torch.tensor([n], device=x.device)))
    return tuple(results) if len(results) > 1 else results[0]


def _with_counts(x: torch.Tensor, dim: int | None) -> Any:
    """Returns the sorted values, the place of each element among them, and counts; also of no elements."""
    if x.numel():
        return torch.unique(x, return_inverse=True, return_counts=True, dim=dim)
    nothing = torch.zeros(0, dtype=torch.int64, device=x.device)
    return (x.reshape(-1), nothing.reshape(x.shape), nothing) if dim is None else (x, nothing, nothing)


def _rows(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """Returns a layout in which no dim but `dim` is sharded: by the first mesh dim of those that shard any."""
    placements: list[Placement] = [Replicate()] * spec.mesh.ndim
    sizes: list[tuple[int, ...] | None] = [None] * spec.mesh.ndim
    m = spec.mesh_dim_of.get(dim)
    if m is not None:
        placements[m], sizes[m] = spec.placements[m], spec.sizes[m]
    elif spec.sharded:
        placements[spec.sharded[0][0]] = Shard(dim)
    return make_spec(spec.mesh, placements, spec.shape, sizes)


@composed(torch.unique, _T.unique)
def unique(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Returns the values of all ranks, each of which sends a value once; places are sharded as elements are."""
    x, spec = operand(input.detach())
    if dim is not None:
        dim = dim_of(input, dim)
        x, spec = redistributed(x, spec, _rows(spec, dim)), _rows(spec, dim)
    values, places, counts = _with_counts(x, dim)
    with no_typecheck():
        for m, _ in spec.sharded:
            group = spec.mesh.communicator(m)
            sizes = tuple(gather_each(torch.tensor(len(counts), device=x.device), group).tolist())
            first, counts = sum(sizes[: group.rank]), gather(counts, group, 0, sizes)
            values, at, _ = _with_counts(gather(values, group, dim or 0, sizes), dim)
            places = at[first : first + sizes[group.rank]][places]
            counts = counts.new_zeros(values.shape[dim or 0]).index_add(0, at, counts)
    along = spec
    if dim is not None:
        placements = [Shard(0) if isinstance(p, Shard) else p for p in spec.placements]
        along = make_spec(spec.mesh, placements, (spec.shape[dim],), spec.sizes)
    results = [wrap(values, make_spec(spec.mesh, None, values.shape))]
    results += [wrap(places, along)] if return_inverse else []
    results += [wrap(counts, make_spec(spec.mesh, None, counts.shape))] if return_counts else []
    return tuple(results) if len(results) > 1 else results[0]


def _isin(x: torch.Size, values: torch.Size) -> Labels:
    names = tuple(range(len(x)))
    return Labels([names, tuple(("value", d) for d in range(len(values)))], names)


@sharded(torch.isin)
def isin(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Searches this rank's values; of sharded values the ranks' answers are combined."""

    def call(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
        if not (isinstance(elements, torch.Tensor) and isinstance(test_elements, torch.Tensor)):
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        (x, values), spec = inside(_isin, (elements, test_elements))
        found: Any = wrap(torch.isin(x, values, assume_unique=assume_unique).to(torch.int32), spec)
        return found == 0 if invert else found > 0

    return call(*args, **kwargs)


def _points(x: torch.Size, weight: torch.Size | None) -> Labels:
    return Labels([("point", "coordinate"), ("point",)], (), whole=frozenset(("coordinate",)))


@composed(torch.histogramdd)
def histogramdd(input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Returns the sums of the ranks' counts, in bins of all ranks' range."""
    x = input.flatten(0, -2)
    if isinstance(x, ShardTensor):
        rows = elsewhere(x._spec, 1)
        x = x.redistribute(placements=rows.placements, sizes=rows.sizes)
    count = x.shape[1]
    bins = (
        [bins] * count
        if isinstance(bins, int)
        else [b.full_tensor() if isinstance(b, ShardTensor) else b for b in bins]
    )
    if range is None and isinstance(bins[0], int) and len(x):
        range = torch.stack((x.amin(0), x.amax(0)), 1).reshape(-1).tolist()
    (local, w), spec = inside(_points, (x, None if weight is None else weight.reshape(-1)))
    counts, edges = torch.histogramdd(local, bins, range=range, weight=w)
    whole = make_spec(spec.mesh, None, counts.shape)
    result: Any = wrap(counts, make_spec(spec.mesh, spec.placements, counts.shape)).redistribute(
        placements=whole.placements
    )
    if density:
        result = result / result.sum()
        for dim, edge in enumerate(edges):
            result = result / edge.diff().reshape([-1, *[1] * (count - dim - 1)])
    bounds = tuple(wrap(edge, make_spec(spec.mesh, None, edge.shape)) for edge in edges)
    return torch.return_types.histogramdd((result, bounds))


if hasattr(torch, "hash_tensor"):  # of newer versions

    @sharded(torch.hash_tensor)
    def hash_tensor(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        """Hashes this rank's elements, and then the hashes of all ranks: an exclusive or has no order."""

        def call(input: Any, dim: Any = (), *, keepdim: bool = False, **options: Any) -> Any:
            if not input.numel():
                return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
            local, spec = operand(input)
            plan = reduced(spec, dim, keepdim)
            for d in plan.dims:
                local = nonempty(local, d)  # the hash of zero is zero
            y = torch.hash_tensor(local, plan.dims, keepdim=keepdim, **options)
            for group in plan.groups:
                y = torch.hash_tensor(gather_each(y.view(torch.int64), group), 0)
            return wrap(y, plan.spec)

        return call(*args, **kwargs)
