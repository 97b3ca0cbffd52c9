"""Cases of functions that are composed of others: integrals, statistics, diagonals, low-level forms, positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.shard_tensor.support.cases import Case
from tests.shard_tensor.support.selection import ranks_of

N = 16
_aten = torch.ops.aten
_AT = torch.tensor([[3, 0, 11], [7, 3, 15]])
_COLUMNS = torch.tensor([2, 0, 1])


def _spread(count: int) -> torch.Tensor:
    """Coordinates that grow by steps of several sizes."""
    return torch.arange(count, dtype=torch.float64).square() + 1


def _batch_norm(x, w, b):
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    return torch.native_batch_norm(x, w, b, mean, variance, True, 0.2, 1e-5)


def _counts(histogram):
    return histogram.hist, *histogram.bin_edges


def _hashes(x):
    if not hasattr(torch, "hash_tensor"):  # of newer versions
        return x
    return torch.hash_tensor(x).view(torch.int64), torch.hash_tensor(x, 0, keepdim=True).view(torch.int64)


def _places(x, y):
    ordered = y.detach().sort().values
    return torch.bucketize(x.detach(), ordered), torch.searchsorted(ordered, x.detach(), right=True)


def _stored(x, values):
    mask = torch.arange(N) % 3 == 1
    stored = x.index_put((mask,), values[:5])
    return stored.index_put((_AT, _COLUMNS), values[:2, :3], accumulate=True)


def _windows(x):
    """Pairs of neighbouring rows, which share memory in one process, and the whole again."""
    pairs = x.as_strided((3, 2, x.shape[1]), (x.stride(0), *x.stride()), x.storage_offset())
    return pairs.clone(), x.as_strided(x.shape, x.stride()).clone()


def _histogram(x):
    counts, edges = torch.histogram(x.detach(), 5)
    return counts, edges, *torch.histogram(x.detach(), 3, range=(-1.0, 1.0), weight=x.detach().abs(), density=True)


def _bincounts(x, weights):
    values = (x.detach() * 4).abs().to(torch.int64)
    return values.bincount(), torch.bincount(values.to(torch.int32), weights.detach(), minlength=40)


def _histogramdd(x, b):
    bounds = b.detach().sort()[0]
    counts, edges = torch.histogramdd(x.detach(), [bounds, bounds])
    return counts, *edges


CASES = [
    Case("trapezoid", lambda y: torch.trapezoid(y, dx=0.5, dim=0), [(N, 3)]),
    Case("trapezoid at x", lambda y, x: torch.trapezoid(y, x), [(3, N), (3, N)]),
    Case("trapezoid at a row", lambda y: torch.trapezoid(y, _spread(N), dim=0), [(N, 3)]),
    Case("cumulative_trapezoid", lambda y, x: torch.cumulative_trapezoid(y, x, dim=0), [(N, 3), (N, 3)], gathers=True),
    Case("gradient", torch.gradient, [(N, 3)]),
    Case("gradient of order 2", lambda x: torch.gradient(x, spacing=0.5, dim=0, edge_order=2), [(N, 3)]),
    Case("gradient at x", lambda x: torch.gradient(x, spacing=(_spread(N),), dim=0, edge_order=2), [(N, 3)]),
    Case("nanmean", lambda x: torch.nanmean(torch.where(x > 0, x, float("nan")), 0), [(N, 3)]),
    Case("aminmax", lambda x: [*torch.aminmax(x, dim=0), *x.aminmax()], [(N, 3)]),
    Case("cov", lambda x: torch.cov(x, correction=0, aweights=_spread(N)), [(3, N)]),
    Case("corrcoef", torch.corrcoef, [(3, N)], gathers=True),
    Case("dist", lambda x, y: torch.dist(x, y, 3), [(N, 3), (N, 3)]),
    Case("pdist", lambda x: F.pdist(x, 2), [(N, 3)], gathers=True),
    Case("linalg.norm", torch.linalg.norm, [(N, 3)]),
    Case("norm of matrices", lambda x: torch.linalg.norm(x, 1, (0, 1), True), [(N, 3, 2)]),
    Case("least norm of matrices", lambda x: torch.linalg.matrix_norm(x, -float("inf"), (2, 0)), [(N, 3, 2)]),
    Case("nuclear norm", lambda x: torch.linalg.matrix_norm(x, "nuc"), [(N, 3, 2)], gathers=True),
    Case("fftshift", torch.fft.fftshift, [(N, 3)]),
    Case("ifftshift", lambda x: torch.fft.ifftshift(x, 0), [(15, 3)]),
    Case("stft", lambda x: torch.view_as_real(torch.stft(x, 6, 2, 4, return_complex=True)), [(2, N)], gathers=True),
    Case("vander", lambda x: torch.linalg.vander(x, N=4), [(N,)]),
    Case("bilinear", F.bilinear, [(N, 3), (N, 2), (4, 3, 2), (4,)]),
    Case("histogram", _histogram, [(N, 3)], gradients=False),
    Case(
        "histogram of bounds",
        lambda x, b: torch.histogram(x.detach(), b.detach().sort()[0]),
        [(N, 3), (N,)],
        gradients=False,
    ),
    Case("bincount", _bincounts, [(N,), (N,)], gradients=False),
    Case("histogramdd of bounds", _histogramdd, [(N, 2), (N,)], gradients=False),
    Case("diagonal", lambda x: (x.diagonal(), x.diagonal(-2, 1, 0)), [(N, N)], gathers=True),
    Case("diagonals of a batch", lambda x: torch.linalg.diagonal(x, offset=1), [(2, 5, N)], gathers=True),
    Case("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y, 1), [(N, 9), (8,)], gathers=True),
    Case("diagonal_scatter below", lambda x, y: x.diagonal_scatter(y, -2), [(N, 9), (9,)], gathers=True),
    Case("diag_embed", lambda x: torch.diag_embed(x, -1, 0, 2), [(N, 4)], gathers=True),
    Case("diag", lambda x: (torch.diag(x, 1), torch.diag(x[0])), [(N, 9)], gathers=True),
    Case("trace", torch.trace, [(N, 12)], gathers=True),
    Case("block_diag", torch.block_diag, [(N, 3), (4,), (2, 5)]),
    Case("native_layer_norm", lambda x, w: torch.native_layer_norm(x, (N, 3), w, None, 1e-5), [(2, N, 3), (N, 3)]),
    Case(
        "native_group_norm",
        lambda x, w, b: torch.native_group_norm(x, w, b, 2, N, 3, 4, 1e-5),
        [(2, N, 3), (N,), (N,)],
        gathers=True,
    ),
    Case("native_batch_norm", _batch_norm, [(N, 4, 3), (4,), (4,)]),
    Case("safe softmax", lambda x: _aten._safe_softmax(x, 0), [(N, 3)]),
    Case("backward of softmax", lambda g, y: _aten._softmax_backward_data(g, y, 0, torch.float64), [(N, 3), (N, 3)]),
    Case("backward of dropout", lambda g, x: _aten.native_dropout_backward(g, x > 0, 2.0), [(N, 3), (N, 3)]),
    Case("hstack", lambda x, y: torch.hstack([x, y]), [(N,), (3,)]),
    Case("column_stack", lambda x, y: torch.column_stack([x, y]), [(N,), (N, 2)]),
    Case("atleast_2d of several", lambda x, y: torch.atleast_2d([x, y]), [(N,), (N, 2)]),
    Case("meshgrid of a list", lambda x, y: torch.meshgrid([x, y], indexing="xy"), [(N,), (5,)]),
    Case("cartesian_prod", torch.cartesian_prod, [(N,), (4,)], gathers=True),
    Case("combinations", torch.combinations, [(N,)]),
    Case("index_put", _stored, [(N, 3), (5, 3)], gathers=True),
    Case("take", lambda x: x.take(_AT - 4), [(N, 3)], gathers=True),
    Case("put", lambda x, y: x.put(_AT, y, accumulate=True), [(N, 3), (6,)], gathers=True),
    Case("masked_scatter", lambda x, y, z: x.masked_scatter(y > 0, z), [(N, 3), (N, 3), (60,)], gathers=True),
    Case("nonzero", lambda x: (torch.nonzero(x > 0), *torch.where(x > 0)), [(N, 3, 2)], gradients=False, gathers=True),
    Case(
        "nonzero_static",
        lambda x: (torch.nonzero_static(x > 0, size=5), torch.nonzero_static(x > 1, size=50, fill_value=7)),
        [(N, 3)],
        gradients=False,
        gathers=True,
    ),
    Case("places", _places, [(N, 3), (9,)], gradients=False),
    Case("squeeze_copy", lambda x: torch.squeeze_copy(x), [(N, 1, 3)]),
    Case("unbind_copy", lambda x: torch.unbind_copy(x, 1), [(N, 3)]),
    Case("slice as operator", lambda x: _aten.slice.Tensor(x, 0, 2, -3, 2), [(N, 3)]),
    Case(
        "chunks side by side",
        lambda x, y: torch._chunk_cat([x, y], 0, 3),
        [(N, 2), (5, 2)],
        gradients=False,
        gathers=True,
    ),
    Case("as_strided", lambda x: torch.as_strided(x, (5, 3), (4, 1), 2), [(N, 3)]),
    Case("windows by the strides", _windows, [(4, N)]),
    Case("windows by the strides of a view", lambda x: _windows(x.t()[1:]), [(N, 5)]),
    Case("as_strided_copy of overlapping windows", lambda x: torch.as_strided_copy(x, (4, 7), (3, 1)), [(2, N)]),
    Case("lstsq", torch.linalg.lstsq, [(N, 4, 2), (N, 4, 3)]),
    Case("lstsq with residuals", lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd"), [(N, 4, 2), (N, 4, 3)]),
    Case("lstsq of vectors", lambda a, b: torch.linalg.lstsq(a, b, driver="gels"), [(N, 4, 2), (N, 4)]),
    Case("lstsq of many columns", lambda a, b: torch.linalg.lstsq(a, b, driver="gelss"), [(5, 3), (5, N)]),
    Case("lstsq of a broadcast system", lambda a, b: torch.linalg.lstsq(a, b)[0], [(1, 3, 2), (N, 3, 2)], gathers=True),
    Case(
        "multi_margin_loss",
        lambda x, w: F.multi_margin_loss(x, ranks_of(x[:, 0]) % 4, 2, 0.7, w.detach()),
        [(N, 4), (4,)],
    ),
    Case("multi_margin_loss of one", lambda x: F.multi_margin_loss(x, torch.tensor(3), reduction="none"), [(N,)]),
    Case(
        "embedding_bag of cut bags",
        lambda x, y, w: F.embedding_bag(ranks_of(y), x, torch.tensor([0, 3, 3, 9]), mode="sum", per_sample_weights=w),
        [(N, 3), (N,), (N,)],
    ),
    Case(
        "embedding_bag means",
        lambda x, y: F.embedding_bag(
            ranks_of(y), x, torch.tensor([0, 3, 3, 16]), padding_idx=-2, include_last_offset=True
        ),
        [(N, 3), (N,)],
    ),
    Case("cross, broadcast", lambda x, y: torch.linalg.cross(x, y), [(1, 3), (N, 3)]),
    Case("multi_dot", lambda *xs: torch.linalg.multi_dot(xs), [(N,), (N, 3), (3, N), (N, 2)]),
    Case("multi_dot of matrices", lambda *xs: torch.linalg.multi_dot(xs), [(5, N), (N, 2), (2, N)]),
    Case("cov of few variables", torch.cov, [(4, N)]),
    Case("hsplit, vsplit", lambda x: (*torch.hsplit(x, 4), *x.vsplit([4, 9])), [(N, N)]),
    Case("select_scatter", lambda x, y: x.select_scatter(y, 0, -3), [(N, 4), (4,)]),
    Case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 0, 3, 14, 2), [(N, 4), (6, 4)]),
    Case("fill", lambda x, y: torch.fill(x, 2.5) + torch.fill(x, y.sum()), [(N, 3), (4,)]),
    Case("cross of the first dim of size 3", lambda x, y: torch.cross(x, y), [(N, 3), (N, 3)]),
    Case("isin", lambda x, y: torch.isin(x.round(), y.round(), invert=True), [(N, 3), (5, 2)], gradients=False),
    Case("hash_tensor", _hashes, [(N, 3)], gradients=False),
    Case(
        "unique", lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True), [(N, 5)], gradients=False
    ),
    Case("unique rows", lambda x: x.sign().unique(dim=0, return_inverse=True), [(N, 2)], gradients=False),
    Case("unique columns", lambda x: torch.unique(x, dim=-1, return_counts=True), [(3, N)], gradients=False),
    Case("unique_consecutive", lambda x: torch.unique_consecutive(x.round(), True, True), [(N, 5)], gradients=False),
    Case(
        "unique_consecutive rows",
        lambda x: x.sign().unique_consecutive(dim=0, return_counts=True),
        [(N, 2)],
        gradients=False,
    ),
    Case(
        "histogramdd",
        lambda x, w: _counts(torch.histogramdd(x, [3, 4], weight=w, density=True)),
        [(N, 2), (N,)],
        gradients=False,
    ),
    Case(
        "histogramdd in a range",
        lambda x: _counts(torch.histogramdd(x, 2, range=[-1.0, 1, 0, 2, -2, 0])),
        [(N, 4, 3)],
        gradients=False,
    ),
]
