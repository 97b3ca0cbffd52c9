"""The lines of the table for selection, indexing, scattering, and elements at other places."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import points
from tests.shard_tensor.support.cases import Case

N = 16


def positions(*values: int) -> torch.Tensor:
    return torch.tensor(values)


_SPREAD = positions(0, 15, 3, 3, 9, 11, 10, 1, 14, 15, 2, 12, 5, 0, 8, 7)
_GRID = _SPREAD.view(4, 4)


def ranks_of(x: torch.Tensor) -> torch.Tensor:
    """Positions from 0 to 15, in the layout of `x`."""
    return (x.detach() * 1000).long() % N


SELECT = [
    Case("topk", lambda x: torch.topk(x, 3, 0), [(N, 3)]),
    Case("topk of the last, smallest", lambda x: x.topk(5, largest=False), [(4, N)]),
    Case("topk of a vector", lambda x: x.topk(9).values, [(N,)]),
    Case("topk in further use", lambda x, y: (x.topk(4, 1)[0] * y).sum(0), [(5, N), (5, 4)]),
    Case("max of a dim", lambda x: torch.max(x, 0), [(N, 3)]),
    Case("min of a dim, keepdim", lambda x: x.min(dim=-1, keepdim=True), [(3, N)]),
    Case("max of ties", lambda x: x.round().max(0), [(N, 3)]),
    Case("argmax", lambda x: x.argmax(0), [(N, 3)]),
    Case("argmin of ties", lambda x: x.round().argmin(1, keepdim=True), [(3, N)], gradients=False),
    Case("argmax of all", lambda x: x.argmax(), [(N, 3)], gradients=False),
    Case("argmax of all ties", lambda x: x.round().argmax(), [(3, N)], gradients=False),
    Case("sort", lambda x: x.sort(0), [(N, 3)]),
    Case("sort descending", lambda x: x.round().sort(stable=True, dim=1, descending=True), [(4, N)]),
    Case("argsort", lambda x: torch.argsort(x, 0), [(N, 3)], gradients=False),
    Case("msort", torch.msort, [(N, 4)]),
    Case("kthvalue", lambda x: torch.kthvalue(x, 4, 0), [(N, 3)]),
    Case("median", lambda x: x.median(1, True), [(4, N)]),
    Case("mode", lambda x: torch.mode(x.round(), 0).values, [(N, 3)]),
    Case("cummax", lambda x: torch.cummax(x, 1), [(4, N)]),
]
INDEXING = [
    Case("index_select", lambda x: x.index_select(0, _SPREAD), [(N, 3)]),
    Case("index_select inside", lambda x: torch.index_select(x, 1, positions(5, 0, 5)), [(2, N, 3)]),
    Case("an index", lambda x: x[_GRID], [(N, 3)]),
    Case("a negative index", lambda x: x[:, positions(-1, 4)], [(3, N)]),
    Case("a list", lambda x: x[[3, 1, 15]], [(N, 3)]),
    Case("an index behind a position", lambda x: x[1, _SPREAD], [(3, N, 2)]),
    Case("an index and a slice", lambda x: x[2:12, positions(2, 0)], [(N, 3)]),
    Case("an index far from a position", lambda x: x[0, :, positions(1, 0, 1)], [(2, N, 3)]),
    Case("two indices", lambda x: x[_SPREAD[:3], positions(2, 0, 1)], [(N, 3)], gathers=True),
    Case("two indices apart", lambda x: x[positions(2, 0), :, positions(1, 1)], [(3, N, 2)], gathers=True),
    Case("a sharded index", lambda x, y: x[ranks_of(y)], [(N, 3), (N,)]),
    Case("a sharded index of two dims", lambda x, y: x[ranks_of(y)], [(N, 3), (4, N)]),
    Case("a sharded index inside", lambda x, y: x.index_select(1, ranks_of(y)), [(2, N, 3), (N,)]),
    Case("fetched twice", lambda x, y: x[ranks_of(y)] * x[ranks_of(2 * y)], [(N, 3), (N,)]),
    Case("gather", lambda x, y: x.gather(0, ranks_of(y)), [(N, 3), (5, 3)]),
    Case("gather of a part", lambda x: torch.gather(x, 1, _GRID), [(N, N)]),
    Case("take_along_dim", lambda x, y: torch.take_along_dim(x, ranks_of(y), 1), [(3, N), (1, N)]),
    Case("embedding", lambda x, y: F.embedding(ranks_of(x), y, padding_idx=3), [(4, N), (N, 5)]),
    Case("embedding of plain words", lambda y: F.embedding(_GRID, y), [(N, 5)]),
    Case("one_hot", lambda x: F.one_hot(ranks_of(x), N), [(N, 3)], gradients=False),
    Case("one_hot of as many", lambda x: F.one_hot(ranks_of(x)), [(N, 3)], gradients=False),
    Case("masked_select", lambda x, y: x.masked_select(y > 0), [(N, 3), (N, 3)], gathers=True),
    Case("a mask", lambda x, y: x[y > 0], [(N, 3), (N,)]),
]
SCATTER = [
    Case("scatter", lambda x, y: x.scatter(0, positions(3, 0, 9).view(3, 1).expand(3, 3), y), [(N, 3), (3, 3)]),
    Case("scatter of a number", lambda x: torch.scatter(x, 1, _GRID, 2.5), [(4, N)]),
    Case("scatter of a part", lambda x, y: x.scatter(1, _GRID, y), [(6, N), (4, 4)]),
    Case("scatter of a part, in place", lambda x, y: (x * 1).scatter_(1, _GRID, y), [(6, N), (4, 4)]),
    Case("scatter_add of a part", lambda x, y: x.scatter_add(1, ranks_of(y), y), [(6, N), (4, 4)]),
    Case("scatter_reduce of a part", lambda x, y: x.scatter_reduce(0, ranks_of(y), y, "amax"), [(N, 6), (9, 2)]),
    Case(
        "scatter_reduce in place",
        lambda x, y: (x * 1).scatter_reduce_(0, ranks_of(y), y, "amax").square(),
        [(N, 3), (5, 3)],
    ),
    Case("scatter_reduce sum", lambda x, y: x.scatter_reduce(0, ranks_of(y), y, "sum"), [(N, 3), (4 * N, 3)]),
    Case(
        "scatter_reduce sum of values alone",
        lambda x, y: x.scatter_reduce(0, ranks_of(y), y, "sum", include_self=False),
        [(N, 3), (5, 3)],
    ),
    Case("scatter_add", lambda x, y: x.scatter_add(0, ranks_of(y), y), [(N, 3), (5, 3)]),
    Case("scatter_add of many", lambda x, y: x.scatter_add(1, ranks_of(y), y), [(3, N), (3, 4 * N)]),
    Case("scatter_reduce", lambda x, y: x.scatter_reduce(0, ranks_of(y), y, "amax"), [(N, 3), (5, 3)]),
    Case("index_add", lambda x, y: x.index_add(0, _SPREAD, y, alpha=2), [(N, 3), (N, 3)]),
    Case("index_add of few", lambda x, y: torch.index_add(x, 1, positions(4, 4, 15), y), [(2, N), (2, 3)]),
    Case("index_fill of sharded positions", lambda x, y: x.index_fill(0, ranks_of(y), 2.5), [(N, 3), (N,)]),
    Case("index_copy", lambda x, y: x.index_copy(0, positions(7, 2), y), [(N, 3), (2, 3)]),
    Case("index_fill", lambda x: x.index_fill(0, positions(7, 2), 1.5), [(N, 3)]),
    Case("index_put", lambda x, y: x.index_put((positions(-1, 2),), y), [(N, 3), (2, 3)]),
    Case("scatter_add in place", lambda x, y: (x * 1).scatter_add_(0, ranks_of(y), y), [(N, 3), (5, 3)]),
    Case("set a slice", lambda x, y: assigned(x, slice(2, 13, 3), y), [(N, 3), (4, 3)]),
    Case("set a row", lambda x, y: assigned(x, (5, ...), y), [(N, 3), (3,)]),
    Case("set a block to a number", lambda x: assigned(x, (slice(4, None), 1), 2.0), [(N, 3)]),
    Case("set an element to a scalar", lambda x, y: assigned(x, (5, 1), y), [(N, 3), ()]),
    Case("set rows to a scalar", lambda x, y: assigned(x, slice(2, 13, 3), y), [(N, 3), ()]),
    Case("set all to a scalar", lambda x, y: assigned(x, slice(None), y), [(N, 3), ()]),
    Case("set an element to one of its own", lambda x: assigned(x, (5, 1), x[0, 2] * 3), [(N, 3)]),
    Case("set an element to a plain scalar", lambda x, y: assigned(x, (5, 1), y), [(N, 3), ()], plain=(1,)),
    Case("set a plain row", lambda x, y: assigned(x, slice(2, 13, 3), y), [(N, 3), (3,)], plain=(1,)),
    Case("set plain rows", lambda x, y: assigned(x, slice(4, 8), y), [(N, 3), (4, 3)], plain=(1,)),
    Case("set a plain column", lambda x, y: assigned(x, (slice(None), 1), y), [(N, 3), (N,)], plain=(1,)),
    Case("fill with a scalar", lambda x, y: (x * 1).fill_(y), [(N, 3), ()]),
    Case("set where", lambda x: assigned(x, x > 0, 0.0), [(N, 3)]),
    Case("set positions", lambda x, y: assigned(x, positions(4, 15), y), [(N, 3), (2, 3)]),
]
REARRANGE = [
    Case("cat", lambda x, y: torch.cat([x, y, x]), [(N, 3), (5, 3)]),
    Case("cat of the last", lambda x, y: torch.cat([x, y], -1), [(2, N), (2, N)]),
    Case("roll", lambda x: torch.roll(x, 5, 0), [(N, 3)]),
    Case("roll of two", lambda x: x.roll((-1, 20), (0, 1)), [(N, 3)]),
    Case("roll of all", lambda x: x.roll(2), [(N, 3)], gathers=True),
    Case("index_fill by a tensor", lambda x, y: x.index_fill(0, positions(7, 2), y), [(N, 3), ()]),
    Case("index_fill of columns by a tensor", lambda x, y: x.index_fill(1, torch.tensor([2, 0]), y), [(N, 3), ()]),
    Case("flip by name", lambda x: torch.flip(x, dims=[0]), [(N, 3)]),
    Case("flip", lambda x: x.flip(0, -1), [(N, 3)]),
    Case("repeat", lambda x: x.repeat(2, 3, 2), [(N, 3)]),
    Case("tile", lambda x: torch.tile(x, (2,)), [(3, N)]),
    Case("repeat_interleave", lambda x: x.repeat_interleave(3, 0), [(N, 3)]),
    Case("repeat_interleave by counts", lambda x: x.repeat_interleave(torch.arange(N) % 3, 0), [(N, 3)]),
    Case("diff of none", lambda x: x.diff(0), [(N, 3)]),
    Case("diff", lambda x: x.diff(dim=0), [(N, 3)]),
    Case("diff twice, with ends", lambda x, y: torch.diff(x, 2, 0, prepend=y), [(N, 3), (1, 3)]),
    Case("unfold", lambda x: x.unfold(0, 3, 2), [(N, 3)]),
    Case("unfold of long windows", lambda x: x.unfold(1, 14, 1), [(3, N)]),
    Case("unfold with gaps", lambda x: x.unfold(0, 2, 6), [(N, 3)]),
    Case("F.unfold", lambda x: F.unfold(x, (3, 2), 2, 1, 1), [(2, 3, N, 5)], gathers=True),
    Case("tril", lambda x: torch.tril(x, -1), [(N, N)]),
    Case("triu", lambda x: x.triu(2), [(2, N, 5)]),
    Case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="xy"), [(N,), (5,)]),
]
DISTANCES = [
    Case("cdist", torch.cdist, [(2, N, 3), (2, 5, 3)]),
    Case("cdist of one set", lambda x, y: torch.cdist(x, y, 1.0), [(N, 3), (4, 7, 3)]),
    Case("pairwise_distance", F.pairwise_distance, [(N, 3), (N, 3)]),
    Case("knn", lambda x, y: points.knn(x, y, 4), [(N, 3), (7, 3)]),
    Case("radius_search", lambda x, y: points.radius_search(x, y, 1.5, 6), [(N, 3), (7, 3)]),
    Case("brute-force knn", lambda x, y: brute_force_knn(x, y, 4), [(N, 3), (7, 3)]),
]


def assigned(x: torch.Tensor, index: object, value: object) -> torch.Tensor:
    y = x * 1
    y[index] = value
    return y


def brute_force_knn(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
    """Nearest neighbours as the tutorial computes them."""
    displacement = x[None, :, :] - y[:, None, :]
    distance = torch.norm(displacement, dim=2)
    distance, indices = torch.topk(distance, k=k, dim=1, largest=False)
    return x[indices]


CASES = [*SELECT, *INDEXING, *SCATTER, *REARRANGE, *DISTANCES]
