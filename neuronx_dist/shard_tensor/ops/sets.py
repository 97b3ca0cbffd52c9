"""Values as sets: runs of equal values, membership, and histograms of points. Counts are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from ..labels import Labels, inside
from ..spec import make_spec
from ..tensor import ShardTensor, wrap
from .select import elsewhere

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


def _members(x: torch.Size, values: torch.Size) -> Labels:
    names = tuple(range(len(x)))
    return Labels([names, tuple(("value", d) for d in range(len(values)))], names)


@sharded(torch.isin)
def isin(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Searches this rank's values; of sharded values the ranks' answers are combined."""

    def call(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
        if not (isinstance(elements, torch.Tensor) and isinstance(test_elements, torch.Tensor)):
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        (x, values), spec = inside(_members, (elements, test_elements))
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
    bins = [bins] * count if isinstance(bins, int) else list(bins)
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
