"""Every function with a handler: one line each, which `test_ops.py` runs at all placements and splits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import points
from tests.shard_tensor.support.cases import Case

N = 16

POINTWISE = [
    Case("relu", torch.relu, [(N, 3)]),
    Case("gelu", F.gelu, [(N, 3)]),
    Case("times a number", lambda x: x * 2.0, [(N, 3)]),
    Case("a number minus", lambda x: 1.0 - x, [(N, 3)]),
    Case("power", lambda x: x**3, [(N, 3)]),
    Case("add", torch.add, [(N, 3), (N, 3)]),
    Case("add alpha", lambda x, y: torch.add(x, y, alpha=3), [(N, 3), (N, 3)]),
    Case("add a row", torch.add, [(N, 3), (3,)]),
    Case("multiply a column", torch.mul, [(N, 3), (N, 1)]),
    Case("divide outer", torch.div, [(N, 1), (1, 5)], positive=True),
    Case("outer difference", lambda x, y: x[None, :, :] - y[:, None, :], [(N, 3), (7, 3)]),
    Case("a plain operand", torch.mul, [(N, 3), (N, 3)], plain=(1,)),
    Case("a plain row first", lambda x, y: y - x, [(N, 3), (3,)], plain=(1,)),
    Case("where", lambda x, y: torch.where(x > 0, x, y), [(N, 3), (N, 3)]),
    Case("where with a number", lambda x: torch.where(x > 0, x, 0.0), [(N, 3)]),
    Case("clamp", lambda x: x.clamp(-0.5, 0.5), [(N, 3)]),
    Case("lerp", torch.lerp, [(N, 3), (N, 3), (N, 1)]),
    Case("addcmul", torch.addcmul, [(N, 3), (N, 1), (3,)]),
    Case("masked_fill", lambda x, y: x.masked_fill(y > 0, 2.0), [(N, 3), (N, 1)]),
    Case("atan2", torch.atan2, [(N, 3), (N, 3)]),
    Case("comparison", lambda x, y: x > y, [(N, 3), (N, 3)], gradients=False),
    Case("a float32", lambda x: x.float().double() * 0 + x, [(N, 3)]),
    Case("frexp", lambda x: torch.frexp(x)[0], [(N, 3)], gradients=False),
    Case("in place", lambda x, y: (x * 1).add_(y), [(N, 3), (N, 3)]),
    Case("in place, broadcast", lambda x, y: (x * 1).mul_(y), [(N, 3), (3,)]),
    Case("augmented", lambda x, y: x.clone().__iadd__(y), [(N, 3), (N, 1)]),
    Case("softplus", F.softplus, [(N, 3)]),
    Case("leaky_relu", lambda x: F.leaky_relu(x, 0.2), [(N, 3)]),
    Case("prelu", lambda x, y: torch.where(x > 0, x, x * y), [(N, 3), (1,)]),
    Case("logs", lambda x: torch.log(x) + x.sqrt(), [(N, 3)], positive=True),
]
MATMUL = [
    Case("linear", F.linear, [(2, N, 6), (5, 6), (5,)]),
    Case("linear without bias", F.linear, [(N, 6), (5, 6)]),
    Case("matmul", torch.matmul, [(N, 6), (6, 5)]),
    Case("batched matmul", lambda x, y: x @ y, [(3, N, 4), (3, 4, 5)]),
    Case("broadcast matmul", torch.matmul, [(2, 3, N, 4), (4, 5)]),
    Case("matmul of a vector", torch.matmul, [(3, N, 4), (4,)]),
    Case("vector matmul", torch.matmul, [(N,), (N, 5)]),
    Case("mm", torch.mm, [(N, 6), (6, 5)]),
    Case("bmm", torch.bmm, [(3, N, 4), (3, 4, 5)]),
    Case("mv", torch.mv, [(N, 6), (6,)]),
    Case("dot", torch.dot, [(N,), (N,)]),
    Case("outer", torch.outer, [(N,), (5,)]),
    Case("addmm", torch.addmm, [(5,), (N, 6), (6, 5)]),
    Case("addmm beta", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(N, 5), (N, 6), (6, 5)]),
    Case("einsum", lambda x, y: torch.einsum("bik,bkj->bij", x, y), [(3, N, 4), (3, 4, 5)]),
    Case("einsum with dots", lambda x, y: torch.einsum("...i,ji->...j", x, y), [(2, N, 4), (5, 4)]),
    Case("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), [(N, 4), (4, 5)]),
    Case("einsum trace", lambda x: torch.einsum("iij->j", x), [(4, 4, N)]),
    Case("a sum times a matrix", lambda x, y, z: (x @ y) @ z, [(5, N), (N, 6), (6, 3)]),
]
VIEWS = [
    Case("transpose", lambda x: x.transpose(0, 1), [(N, 3, 2)]),
    Case("permute", lambda x: x.permute(2, 0, 1), [(N, 3, 2)]),
    Case("T", lambda x: x.T, [(N, 3)]),
    Case("mT", lambda x: x.mT, [(2, N, 3)]),
    Case("movedim", lambda x: torch.movedim(x, 0, -1), [(N, 3, 2)]),
    Case("unsqueeze", lambda x: x.unsqueeze(1), [(N, 3)]),
    Case("squeeze", lambda x: x.squeeze(), [(1, N, 1, 3)]),
    Case("flatten behind", lambda x: x.flatten(1), [(N, 3, 2)], refusals="redistribute"),
    Case("flatten all", lambda x: x.flatten(), [(N, 3)], refusals="redistribute"),
    Case("view of a merge", lambda x: x.view(2 * N, 3), [(N, 2, 3)], refusals="redistribute"),
    Case("reshape of a split", lambda x: x.reshape(4, 4, 3), [(N, 3)], refusals="redistribute"),
    Case("unflatten", lambda x: x.unflatten(1, (2, 3)), [(N, 6)], refusals="redistribute"),
    Case("heads", lambda x: x.view(2, N, 2, 3).transpose(1, 2), [(2, N, 6)], refusals="redistribute"),
    Case("expand", lambda x: x.expand(4, N, 5), [(N, 1)]),
    Case("expand_as", lambda x, y: x.expand_as(y) * 1, [(1, 3), (N, 3)]),
    Case("contiguous", lambda x: x.transpose(0, 1).contiguous(), [(N, 3)]),
    Case("slice", lambda x: x[2:13], [(N, 3)]),
    Case("slice with step", lambda x: x[1:15:3, ::2], [(N, 3)]),
    Case("empty slice", lambda x: x[9:4], [(N, 3)]),
    Case("position", lambda x: x[5], [(N, 3)]),
    Case("last position", lambda x: x[..., -1], [(N, 3)]),
    Case("None and slice", lambda x: x[None, :, 1:], [(N, 3)]),
    Case("select", lambda x: x.select(1, 2), [(N, 3)]),
    Case("narrow", lambda x: x.narrow(0, 3, 8), [(N, 3)]),
    Case("chunk", lambda x: x.chunk(3, 0), [(N, 3)]),
    Case("split", lambda x: torch.split(x, [5, 0, 11]), [(N, 3)]),
    Case("tensor_split", lambda x: x.tensor_split(5), [(N, 3)]),
    Case("unbind", lambda x: x.unbind(1), [(N, 3)]),
    Case("stack", lambda x, y: torch.stack([x, y], 1), [(N, 3), (N, 3)]),
    Case("cat of other dims", lambda x, y: torch.cat([x, y], 1), [(N, 3), (N, 2)]),
]
REDUCE = [
    Case("sum", torch.sum, [(N, 3)]),
    Case("sum of a dim", lambda x: x.sum(0), [(N, 3)]),
    Case("sum of dims, keepdim", lambda x: x.sum((0, -1), keepdim=True), [(2, N, 3)]),
    Case("sum of the last", lambda x: x.sum(-1), [(N, 3)]),
    Case("mean", torch.mean, [(N, 3)]),
    Case("mean of dims", lambda x: x.mean((0, 1)), [(2, N, 3)]),
    Case("mean keepdim", lambda x: x.mean(1, keepdim=True), [(2, N, 3)]),
    Case("prod", torch.prod, [(N, 3)]),
    Case("prod of a dim", lambda x: x.prod(0), [(N, 3)]),
    Case("var", torch.var, [(N, 3)]),
    Case("var of dims", lambda x: x.var((0, 2), keepdim=True, correction=0), [(4, N, 3)]),
    Case("std", lambda x: x.std(0), [(N, 3)]),
    Case("var_mean", lambda x: torch.var_mean(x, 0), [(N, 3)]),
    Case("amax", lambda x: x.amax(0), [(N, 3)]),
    Case("amax then mean", lambda x: x.amax(0).mean(), [(N, 3)]),
    Case("amin of all", torch.amin, [(N, 3)]),
    Case("amax of ties", lambda x: x.round().amax(0), [(N, 3)]),
    Case("amax of equals", lambda x: (x * 0).amax((0, 1)), [(N, 3)]),
    Case("max", torch.max, [(N, 3)]),
    Case("max of two", torch.max, [(N, 3), (N, 3)]),
    Case("logsumexp", lambda x: x.logsumexp(0), [(N, 3)]),
    Case("norm", torch.norm, [(N, 3)]),
    Case("vector_norm", lambda x: torch.linalg.vector_norm(x, 3, 0), [(N, 3)]),
    Case("norm inf", lambda x: torch.linalg.vector_norm(x, float("inf"), 0), [(N, 3)]),
    Case("any", lambda x: (x > 1).any(0), [(N, 3)], gradients=False),
    Case("all", lambda x: (x > -1).all(), [(N, 3)], gradients=False),
    Case("count_nonzero", lambda x: torch.count_nonzero(x > 0, 0), [(N, 3)], gradients=False),
    Case("a sum in further use", lambda x, y: (x / x.sum(0)) * y, [(N, 3), (N, 3)]),
    Case("standardised", lambda x: (x - x.mean(0)) / x.std(0), [(N, 3)]),
]


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
    Case("cumsum", lambda x: x.cumsum(0), [(N, 3)]),
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
    Case("two indices", lambda x: x[_SPREAD[:3], positions(2, 0, 1)], [(N, 3)], refusals="redistribute"),
    Case("two indices apart", lambda x: x[positions(2, 0), :, positions(1, 1)], [(3, N, 2)], refusals="redistribute"),
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
    Case("masked_select", lambda x, y: x.masked_select(y > 0), [(N, 3), (N, 3)], refusals="redistribute"),
    Case("a mask", lambda x, y: x[y > 0], [(N, 3), (N,)]),
]
SCATTER = [
    Case("scatter", lambda x, y: x.scatter(0, positions(3, 0, 9).view(3, 1).expand(3, 3), y), [(N, 3), (3, 3)]),
    Case("scatter of a number", lambda x: torch.scatter(x, 1, _GRID, 2.5), [(4, N)]),
    Case("scatter of a part", lambda x, y: x.scatter(1, _GRID, y), [(6, N), (4, 4)], refusals="narrow"),
    Case("scatter_add", lambda x, y: x.scatter_add(0, ranks_of(y), y), [(N, 3), (5, 3)]),
    Case("scatter_add of many", lambda x, y: x.scatter_add(1, ranks_of(y), y), [(3, N), (3, 4 * N)]),
    Case("scatter_reduce", lambda x, y: x.scatter_reduce(0, ranks_of(y), y, "amax"), [(N, 3), (5, 3)]),
    Case("index_add", lambda x, y: x.index_add(0, _SPREAD, y, alpha=2), [(N, 3), (N, 3)]),
    Case("index_add of few", lambda x, y: torch.index_add(x, 1, positions(4, 4, 15), y), [(2, N), (2, 3)]),
    Case("index_copy", lambda x, y: x.index_copy(0, positions(7, 2), y), [(N, 3), (2, 3)]),
    Case("index_fill", lambda x: x.index_fill(0, positions(7, 2), 1.5), [(N, 3)]),
    Case("index_put", lambda x, y: x.index_put((positions(-1, 2),), y), [(N, 3), (2, 3)]),
    Case("scatter_add in place", lambda x, y: (x * 1).scatter_add_(0, ranks_of(y), y), [(N, 3), (5, 3)]),
    Case("set a slice", lambda x, y: assigned(x, slice(2, 13, 3), y), [(N, 3), (4, 3)]),
    Case("set a row", lambda x, y: assigned(x, (5, ...), y), [(N, 3), (3,)]),
    Case("set a block to a number", lambda x: assigned(x, (slice(4, None), 1), 2.0), [(N, 3)]),
    Case("set where", lambda x: assigned(x, x > 0, 0.0), [(N, 3)]),
    Case("set positions", lambda x, y: assigned(x, positions(4, 15), y), [(N, 3), (2, 3)]),
]
REARRANGE = [
    Case("cat", lambda x, y: torch.cat([x, y, x]), [(N, 3), (5, 3)]),
    Case("cat of the last", lambda x, y: torch.cat([x, y], -1), [(2, N), (2, N)]),
    Case("roll", lambda x: torch.roll(x, 5, 0), [(N, 3)]),
    Case("roll of two", lambda x: x.roll((-1, 20), (0, 1)), [(N, 3)]),
    Case("roll of all", lambda x: x.roll(2), [(N, 3)], refusals="redistribute"),
    Case("flip", lambda x: x.flip(0, -1), [(N, 3)]),
    Case("repeat", lambda x: x.repeat(2, 3, 2), [(N, 3)]),
    Case("tile", lambda x: torch.tile(x, (2,)), [(3, N)]),
    Case("repeat_interleave", lambda x: x.repeat_interleave(3, 0), [(N, 3)]),
    Case("repeat_interleave by counts", lambda x: x.repeat_interleave(torch.arange(N) % 3, 0), [(N, 3)]),
    Case("diff", lambda x: x.diff(dim=0), [(N, 3)]),
    Case("diff twice, with ends", lambda x, y: torch.diff(x, 2, 0, prepend=y), [(N, 3), (1, 3)]),
    Case("unfold", lambda x: x.unfold(0, 3, 2), [(N, 3)]),
    Case("unfold of long windows", lambda x: x.unfold(1, 14, 1), [(3, N)]),
    Case("unfold with gaps", lambda x: x.unfold(0, 2, 6), [(N, 3)]),
    Case("F.unfold", lambda x: F.unfold(x, (3, 2), 2, 1, 1), [(2, 3, N, 5)], refusals="redistribute"),
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
    """As the tutorial's."""
    displacement = x[None, :, :] - y[:, None, :]
    distance = torch.norm(displacement, dim=2)
    distance, indices = torch.topk(distance, k=k, dim=1, largest=False)
    return x[indices]


CASES = [*POINTWISE, *MATMUL, *VIEWS, *REDUCE, *SELECT, *INDEXING, *SCATTER, *REARRANGE, *DISTANCES]
