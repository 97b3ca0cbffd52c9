"""Integrals, derivatives, statistics, distances and norms, composed of functions that have handlers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...spmd import P, no_typecheck
from ..handlers import FUNCTIONS, UNHANDLED, composed
from ..labels import Labels, inside
from ..moves.extremes import extreme
from ..spec import make_spec
from ..tensor import ShardTensor, wrap
from ..typed import on_own_shard
from .select import dim_of, elsewhere

__all__: list[str] = []

_T = torch.Tensor
_linalg = torch.linalg
_INF = float("inf")


# --- integrals and derivatives


def _trapezoids(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Returns twice the areas between neighbours along `dim`."""
    n = y.shape[dim]
    heights = y.narrow(dim, 0, max(n - 1, 0)) + y.narrow(dim, min(n, 1), max(n - 1, 0))
    if x is None:
        return heights * (1 if dx is None else dx)
    if x.dim() == 1:
        x = x.reshape([-1 if d == dim else 1 for d in range(y.dim())])
    elif x.dim() < y.dim():
        x = x[(None,) * (y.dim() - x.dim())]
    return torch.diff(x, dim=dim) * heights


@composed(torch.trapezoid, torch.trapz, checked=True)
def trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> Any:
    dim = dim_of(y, dim)
    return _trapezoids(y, x, dx, dim).sum(dim) / 2


@composed(torch.cumulative_trapezoid)
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = None, dim: int = -1) -> Any:
    dim = dim_of(y, dim)
    return _trapezoids(y, x, dx, dim).cumsum(dim) / 2


@composed(torch.gradient)
def gradient(input: Any, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> list[Any]:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    steps = spacing if isinstance(spacing, (list, tuple)) else [1.0 if spacing is None else spacing] * len(dims)
    if edge_order not in (1, 2) or len(steps) != len(dims) or any(input.shape[d] <= edge_order for d in dims):
        raise RuntimeError(
            f"gradient: edge_order {edge_order} must be 1 or 2, with a spacing for each of {len(dims)} dims, and more "
            f"elements than it along each: the tensor has shape {tuple(input.shape)}"
        )
    return [_derivative(input, dim_of(input, d), step, edge_order) for d, step in zip(dims, steps)]


def _derivative(x: Any, dim: int, spacing: Any, edge_order: int) -> Any:
    """Returns the derivative along `dim`; `spacing`: a distance, or the coordinate of each position."""
    n = x.shape[dim]
    gaps: Any = None
    if isinstance(spacing, torch.Tensor) and spacing.dim():
        gaps = torch.diff(spacing).reshape([-1 if d == dim else 1 for d in range(x.dim())])

    def gap(start: int, length: int = 1) -> Any:
        return spacing if gaps is None else gaps.narrow(dim, start, length)

    def at(start: int, length: int = 1) -> Any:
        return x.narrow(dim, start, length)

    def end(first: int, towards: int) -> Any:
        second, near = first + towards, gap(0 if towards > 0 else n - 2)
        if edge_order == 1:
            return (at(second) - at(first)) * towards / near
        far = gap(1 if towards > 0 else n - 3)
        slopes = (at(second) - at(first)) / near, (at(second + towards) - at(second)) / far
        return (slopes[0] + (slopes[0] - slopes[1]) * near / (near + far)) * towards

    if n == 2:
        return torch.cat([end(0, 1), end(1, -1)], dim)
    before, after = gap(0, n - 2), gap(1, n - 2)
    left, right = (at(1, n - 2) - at(0, n - 2)) / before, (at(2, n - 2) - at(1, n - 2)) / after
    return torch.cat([end(0, 1), (left * after + right * before) / (before + after), end(n - 1, -1)], dim)


# --- statistics


@composed(torch.nanmean, _T.nanmean, checked=True)
def nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    counts = torch.sum(~input.isnan(), dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / counts


@composed(torch.aminmax, _T.aminmax, checked=True)
def aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    over = () if dim is None else dim
    return torch.return_types.aminmax((torch.amin(input, over, keepdim), torch.amax(input, over, keepdim)))


@composed(torch.cov, _T.cov)
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    if aweights is not None and aweights.dtype is not input.dtype:  # rounded in torch's order of sums
        weights = {"correction": correction, "fweights": fweights, "aweights": aweights}
        return FUNCTIONS[UNHANDLED](torch.cov, (), (input,), weights)
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if isinstance(x, ShardTensor) and 0 in x._spec.mesh_dim_of and 1 not in x._spec.mesh_dim_of:
        columns = elsewhere(x._spec, 0)  # in place of all rows on each rank
        x = x.redistribute(placements=columns.placements, sizes=columns.sizes)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    given = [w for w in (fweights, aweights) if w is not None]
    w: Any = prod(given) if given else None
    total = x.shape[1] if w is None else w.sum()
    mean = (x if w is None else x * w).sum(1, keepdim=True) / total
    x = x - mean
    product = x @ (x if w is None else x * w).mH
    subtracted = correction * (w * aweights).sum() / total if aweights is not None and correction else correction
    rest = total - subtracted
    return (product / (rest.clamp(min=0) if isinstance(rest, torch.Tensor) else max(rest, 0))).squeeze()


@composed(torch.corrcoef, _T.corrcoef)
def corrcoef(input: Any) -> Any:
    c = torch.cov(input)
    if not c.dim():
        return c / c
    deviations = torch.diagonal(c).real.sqrt() if c.is_complex() else torch.diagonal(c).sqrt()
    c = c / deviations[:, None] / deviations[None]
    return torch.view_as_complex(torch.view_as_real(c).clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


@composed(torch.histogram, _T.histogram)
def histogram(input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Returns the sums of the ranks' counts, in bins of all ranks' range."""
    bins = bins.full_tensor() if isinstance(bins, ShardTensor) else bins
    if range is None and isinstance(bins, int):
        range = (float(input.amin()), float(input.amax())) if input.numel() else None
    (x, w), spec = inside(_counted, (input, weight))
    options = {} if range is None else {"range": range}
    counts, edges = torch.histogram(x, bins, weight=w, **options)
    whole = make_spec(spec.mesh, None, edges.shape)
    result: Any = wrap(counts, make_spec(spec.mesh, spec.placements, counts.shape))
    if density:
        result = result / result.sum() / wrap(edges.diff(), make_spec(spec.mesh, None, counts.shape))
    return torch.return_types.histogram((result.redistribute(placements=whole.placements), wrap(edges, whole)))


def _counted(x: torch.Size, weight: torch.Size | None) -> Labels:
    names = tuple(range(len(x)))
    return Labels([names, names], ())


@composed(torch.bincount, _T.bincount)
def bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Returns the ranks' counts, which are Partial, in bins for the largest value of all ranks."""
    if input.dim() != 1 or input.is_floating_point() or (weights is not None and weights.shape != input.shape):
        raise ValueError(
            f"bincount: input has shape {tuple(input.shape)} and dtype {input.dtype}, weights "
            f"{None if weights is None else tuple(weights.shape)}: input must be 1-d and of integers, weights as long"
        )
    (x, w), spec = inside(_counted, (input, weights))
    x = x.to(torch.int64)
    groups = tuple(spec.mesh.communicator(m) for m in spec.partial)
    with no_typecheck():
        largest, opposite = extreme(torch.stack((x, -x)), (1,), groups, "max").flatten().tolist()
    if input.numel() and opposite > 0:  # on all ranks, whichever has the value
        raise ValueError(f"bincount: input has the value {-opposite}; values must be at least 0")
    counts = on_own_shard(torch.bincount, dict.fromkeys(groups, P))(x, w, max(minlength, largest + 1))
    if w is not None:  # of no elements torch counts in integers
        counts = counts.to(torch.float32 if w.dtype is torch.float32 else torch.float64)
    return wrap(counts, make_spec(spec.mesh, spec.placements, counts.shape))


# --- distances and norms


@composed(torch.dist, _T.dist, checked=True)
def dist(input: Any, other: Any, p: float = 2) -> Any:
    return _linalg.vector_norm(input - other, p)


@composed(torch.pdist, F.pdist)
def pdist(input: Any, p: float = 2.0) -> Any:
    """Returns the distances above the diagonal of those of all pairs, which are sharded as the points are."""
    n = input.shape[0]
    all_pairs = torch.cdist(input, input, p, compute_mode="donot_use_mm_for_euclid_dist")
    rows, columns = torch.triu_indices(n, n, 1, device=input.device)
    return all_pairs.reshape(-1).index_select(0, rows * n + columns)


@composed(_linalg.norm, checked=True)
def norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    is_vector = isinstance(dim, int) or (dim is not None and len(dim) == 1) or (dim is None and A.dim() == 1)
    if ord is None or (is_vector and not isinstance(ord, str)):
        return _linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return _linalg.matrix_norm(A, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype)


@composed(_linalg.matrix_norm, checked=True)
def matrix_norm(
    A: Any, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Returns norms of matrices; those of order 2, -2 and "nuc" of their singular values, with the matrices whole."""
    rows, columns = (dim_of(A, d) for d in dim)
    x = A if dtype is None else A.to(dtype)
    if ord == "fro":
        return _linalg.vector_norm(x, 2, (rows, columns), keepdim)
    if 0 in (x.shape[rows], x.shape[columns]):
        return FUNCTIONS[UNHANDLED](_linalg.matrix_norm, (), (x, ord, (rows, columns), keepdim), {})
    if ord == "nuc" or abs(ord) == 2:
        values = _linalg.svdvals(torch.movedim(x, (rows, columns), (-2, -1)))
        y = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord > 0 else values.amin(-1)
    else:  # 1, -1, inf or -inf: torch takes no other order
        summed, compared = (rows, columns) if abs(ord) == 1 else (columns, rows)
        y = x.abs().sum(summed, keepdim=True)
        y = torch.amax(y, compared, True) if ord > 0 else torch.amin(y, compared, True)
        return y if keepdim else y.squeeze((rows, columns))
    for d in sorted((rows, columns)) if keepdim else ():
        y = y.unsqueeze(d)
    return y


@composed(_linalg.vander)
def vander(x: Any, *, N: int | None = None) -> Any:
    x = torch.atleast_1d(x)
    return x.unsqueeze(-1) ** torch.arange(x.shape[-1] if N is None else N, device=x.device)


@composed(F.bilinear)
def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


# --- signals


@composed(torch.fft.fftshift)
def fftshift(input: Any, dim: Any = None) -> Any:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return torch.roll(input, [input.shape[d] // 2 for d in dims], list(dims))


@composed(torch.fft.ifftshift)
def ifftshift(input: Any, dim: Any = None) -> Any:
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return torch.roll(input, [-(input.shape[d] // 2) for d in dims], list(dims))


@composed(torch.stft, _T.stft, checked=True)
def stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Returns the transforms of windows, which are sharded as their beginnings are.

    Raises:
        NotImplementedError: `align_to_window` without `center`.
    """
    if align_to_window:
        raise NotImplementedError("stft of ShardTensors does not support align_to_window: call it on full_tensor()")
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    x = input.reshape(1, -1) if input.dim() == 1 else input
    if center:
        x = F.pad(x[None], (n_fft // 2, n_fft // 2), pad_mode)[0]
    frames = x.unfold(-1, n_fft, hop)
    if window is not None or width != n_fft:
        window = torch.ones(width, dtype=x.dtype, device=x.device) if window is None else window
        before = (n_fft - width) // 2
        frames = frames * F.pad(window, (before, n_fft - width - before))
    half = onesided if onesided is not None else not frames.is_complex()
    is_complex = frames.is_complex() if return_complex is None else return_complex
    y = (torch.fft.rfft if half else torch.fft.fft)(frames, norm="ortho" if normalized else None).transpose(1, 2)
    y = y[0] if input.dim() == 1 else y
    return y if is_complex else torch.view_as_real(y)
