"""Runs an operator on shards of tensors, on ranks as threads, against the same in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor.moves.intervals import Bounds, bounds_of
from neuronx_dist.shard_tensor.windows.local_windows import ShardedDim

__all__ = ["SPLITS", "Doubled", "Foreign", "assert_close", "assert_like_one_process", "own_part", "split_of"]

TOLERANCE = 1e-10
SPLITS = {2: [(8, 8), (11, 5), (16, 0)], 3: [(6, 5, 5), (2, 9, 5)], 4: [(4, 4, 4, 4), (1, 12, 0, 3)]}


def split_of(size: int, cuts: Sequence[float]) -> Bounds:
    """Bounds at parts of a size; `cuts` between 0 and 1."""
    places = sorted(round(size * cut) for cut in cuts)
    return bounds_of(b - a for a, b in itertools.pairwise([0, *places, size]))


def own_part(x: torch.Tensor, sharded: Sequence[ShardedDim]) -> torch.Tensor:
    for dim, bounds, axis in sharded:
        rank = comm.rank(axis)
        x = x.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])
    return x


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), (what, actual, expected)
        return
    scale = max(1.0, float(expected.norm()))
    assert float((actual - expected).detach().norm()) <= TOLERANCE * scale, (what, actual, expected)


def assert_like_one_process(
    whole: Callable[..., Any],
    local: Callable[..., Any],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    sharded: Sequence[ShardedDim],
    mesh: Mesh,
) -> None:
    """`whole(x, *weights)` and `local(shard, *weights, sharded)` agree in values and in all gradients.

    The first result of both is differentiated, with weights of its own for each output. `local` gives its results, and
    how they are sharded.
    """
    x = x.clone().requires_grad_()
    params = [w.clone().requires_grad_() if w is not None else None for w in weights]
    expected = whole(x, *params)
    expected = expected if isinstance(expected, tuple) else (expected,)
    factor = torch.linspace(-1, 2, expected[0].numel(), dtype=x.dtype).view(expected[0].shape)
    grads = torch.autograd.grad((expected[0] * factor).sum(), [t for t in (x, *params) if t is not None])

    def rank_main() -> None:
        own = own_part(x.detach(), sharded).clone().requires_grad_()
        mine = [w.detach().clone().requires_grad_() if w is not None else None for w in weights]
        *results, shards = local(own, *mine, sharded)
        for result, value in zip(results, expected, strict=True):
            assert_close(result, own_part(value, shards).detach(), "value")
        loss = (results[0] * own_part(factor, shards)).sum()
        found = torch.autograd.grad(loss, [t for t in (own, *mine) if t is not None])
        assert_close(found[0], own_part(grads[0], sharded), "gradient of the input")
        for grad, value in zip(found[1:], grads[1:], strict=True):
            assert_close(comm.all_reduce(grad, "world"), value, "gradient of a weight")

    threads.run(mesh, rank_main, timeout=60.0)


class Foreign(torch.autograd.Function):
    """A function that is not asked by `__torch_function__`, as those of FSDP and DDP."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Doubled(torch.autograd.Function):
    """Another one, whose gradient is not what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2
