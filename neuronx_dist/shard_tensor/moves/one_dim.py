"""Moves of a tensor along one mesh dim, differentiable and for shards of any sizes: gather, split, exchange, sum.

Each move is a row of `spmd`'s table; where shards are equal the operator of `spmd` itself runs. Elsewhere the same row
is run by `_Move`, with shards of the sizes that every rank knows, and its backward is the row's backward.

| move | types | backward |
| --- | --- | --- |
| `gather(used=False)` | S -> I | split |
| `split(used=False)` | I -> S | gather |
| `gather(used=True)` | S -> R | scatter_sum |
| `scatter_sum` | P -> S | gather(used=True) |
| `split(used=True)` | R -> S | pad |
| `pad` | S -> P | split(used=True) |
| `transpose` | S(i) -> S(j), also i = j with other sizes | transpose |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ... import comm, spmd
from ...comm import Communicator
from ...comm.verbs.transformed_tensors import transforming
from ...spmd import I, P, R, S, SpmdType
from ...spmd.linear_operator import linear
from ...spmd.watching import active
from .. import typed
from ..report import name_node
from .exchange import exchange
from .intervals import bounds_of, repartition
from .tangents import may_be_dual, moved_dual

__all__ = ["gather", "gather_each", "pad", "scatter_sum", "split", "transpose"]

Sizes = tuple[int, ...]


class Shards(NamedTuple):
    """One side of a move: the tensor dim that is sharded, and the sizes of all shards."""

    dim: int
    sizes: Sizes

    def bounds(self, index: int) -> tuple[int, int]:
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    @property
    def equal(self) -> bool:
        return min(self.sizes) == max(self.sizes)


def gather(x: torch.Tensor, communicator: Communicator, dim: int, sizes: Sizes, *, used: bool = False) -> torch.Tensor:
    """Gathers the whole tensor from shards along `dim`. `used`: each rank uses it differently; gradients are summed."""
    shards = Shards(dim, sizes)
    if shards.equal:
        return spmd.all_gather(x, communicator, src=S(dim), dst=R if used else I)
    return _apply(x, _Between("gather_R" if used else "gather_I", communicator, shards, shards))


def gather_each(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Gathers tensors of equal shapes from all ranks, stacked: `[ranks, *x.shape]`."""
    return gather(typed.shards(x.unsqueeze(0), {communicator: 0}), communicator, 0, (1,) * communicator.size)


def split(x: torch.Tensor, communicator: Communicator, dim: int, sizes: Sizes, *, used: bool = False) -> torch.Tensor:
    """Returns this rank's shard of a tensor that all ranks hold. `used`: `x` is R, not I. Nothing is communicated."""
    shards = Shards(dim, sizes)
    if shards.equal:
        return spmd.convert(x, communicator, src=R if used else I, dst=S(dim))
    return _apply(x, _Between("split_R" if used else "split_I", communicator, shards, shards))


def scatter_sum(x: torch.Tensor, communicator: Communicator, dim: int, sizes: Sizes) -> torch.Tensor:
    """Returns this rank's shard of the sum over the ranks."""
    shards = Shards(dim, sizes)
    if shards.equal:
        return spmd.reduce_scatter(x, communicator, src=P, dst=S(dim))
    return _apply(x, _Between("scatter_sum", communicator, shards, shards))


def pad(x: torch.Tensor, communicator: Communicator, dim: int, sizes: Sizes) -> torch.Tensor:
    """Returns this rank's shard in a whole tensor of zeros: a summand. Nothing is communicated."""
    shards = Shards(dim, sizes)
    between = _Between("pad", communicator, shards, shards)
    return typed.unseen(lambda: _apply(x, between), x, communicator, P)


def transpose(
    x: torch.Tensor, communicator: Communicator, src_dim: int, src_sizes: Sizes, dst_dim: int, dst_sizes: Sizes
) -> torch.Tensor:
    """Moves shards from one dim to another, or to other sizes along the same dim."""
    if src_dim == dst_dim:
        x = exchange(x, repartition(bounds_of(src_sizes), bounds_of(dst_sizes)), communicator, src_dim)
        return typed.shards(x, {communicator: src_dim})
    src, dst = Shards(src_dim, src_sizes), Shards(dst_dim, dst_sizes)
    if src.equal and dst.equal:
        return spmd.all_to_all(x, communicator, src=S(src_dim), dst=S(dst_dim))
    return _apply(x, _Between("transpose", communicator, src, dst))


class _Between(NamedTuple):
    """A move between two divisions into shards: a linear operator."""

    name: str
    communicator: Communicator
    src: Shards
    dst: Shards

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(x, self)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return _KERNELS[self.name](x, self)

    def transposed(self) -> _Between:
        return _Between(_BACKWARD[self.name], self.communicator, self.dst, self.src)

    def batched(self) -> _Between:
        src, dst = (shards._replace(dim=shards.dim + 1) for shards in (self.src, self.dst))
        return self._replace(src=src, dst=dst)


_BACKWARD = {
    "gather_I": "split_I",
    "split_I": "gather_I",
    "gather_R": "scatter_sum",
    "scatter_sum": "gather_R",
    "split_R": "pad",
    "pad": "split_R",
    "transpose": "transpose",
}


# The operator of `spmd` of which a move is the row, and its types; None: S(dim).
_OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], SpmdType | None, SpmdType | None]] = {
    "gather_I": (spmd.all_gather, None, I),
    "split_I": (spmd.convert, I, None),
    "gather_R": (spmd.all_gather, None, R),
    "scatter_sum": (spmd.reduce_scatter, P, None),
    "split_R": (spmd.convert, R, None),
    "transpose": (spmd.all_to_all, None, None),
}


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, between: _Between) -> torch.Tensor:
        ctx.between = between
        name_node()
        return between.value(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(grad, ctx.between.transposed()), None


@cache
def _unseen(between: _Between) -> Callable[..., torch.Tensor]:
    """Returns the move as a function that the checker runs, and judges as the operator."""

    def move(x: torch.Tensor, *_: Any, **types: Any) -> torch.Tensor:
        return _apply(x, between)

    move.__name__ = _OPERATORS[between.name][0].__name__
    return move


def _apply(x: torch.Tensor, between: _Between) -> torch.Tensor:
    return moved_dual(x, partial(_applied, between=between)) if may_be_dual(x) else _applied(x, between)


def _applied(x: torch.Tensor, between: _Between) -> torch.Tensor:
    if active() is not None and between.name in _OPERATORS:
        operator, src, dst = _OPERATORS[between.name]
        types = (declared or S(shards.dim) for declared, shards in ((src, between.src), (dst, between.dst)))
        judged = typed.moved(operator, _unseen(between), x, between.communicator, *types)
        if judged is not None:
            return judged
    if transforming():
        return linear(between, x)
    if x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Move.apply(x, between)
        return result
    with torch.no_grad():
        return between.value(x)


def _gather(x: torch.Tensor, between: _Between) -> torch.Tensor:
    communicator, (dim, sizes) = between.communicator, between.src
    pieces = _exchanged([x] * communicator.size, communicator, [_resized(x, dim, size) for size in sizes])
    return torch.cat(pieces, dim)


def _split(x: torch.Tensor, between: _Between) -> torch.Tensor:
    start, stop = between.dst.bounds(between.communicator.rank)
    return x.narrow(between.dst.dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _pad(x: torch.Tensor, between: _Between) -> torch.Tensor:
    dim, sizes = between.src
    start, stop = between.src.bounds(between.communicator.rank)
    whole = x.new_zeros(_resized(x, dim, sum(sizes)))
    whole.narrow(dim, start, stop - start).copy_(x)
    return whole


def _scatter_sum(x: torch.Tensor, between: _Between) -> torch.Tensor:
    communicator, (dim, sizes) = between.communicator, between.dst
    local_shape = _resized(x, dim, sizes[communicator.rank])
    pieces = _exchanged(x.split(sizes, dim), communicator, [local_shape] * communicator.size)
    return torch.stack(pieces).sum(0)


def _transpose(x: torch.Tensor, between: _Between) -> torch.Tensor:
    communicator, src, dst = between.communicator, between.src, between.dst
    local_shape = _resized(x, dst.dim, dst.sizes[communicator.rank])
    shapes = [(*local_shape[: src.dim], size, *local_shape[src.dim + 1 :]) for size in src.sizes]
    return torch.cat(_exchanged(x.split(dst.sizes, dst.dim), communicator, shapes), src.dim)


_KERNELS = {
    "gather_I": _gather,
    "gather_R": _gather,
    "split_I": _split,
    "split_R": _split,
    "scatter_sum": _scatter_sum,
    "pad": _pad,
    "transpose": _transpose,
}


def _exchanged(
    sends: Sequence[torch.Tensor], communicator: Communicator, shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Sends a tensor to each rank; returns the tensor received from each, of `shapes`."""
    received = [sends[0].new_empty(shape) for shape in shapes]
    comm.exchange(sends, received, communicator)
    return received


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])
