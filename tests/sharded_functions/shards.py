"""A function of every rank's shard, beside torch's function of the whole tensor: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh

__all__ = ["SIZES", "assert_like_whole", "randn", "shard", "verbs_of"]

SIZES = [(8,), (4, 4), (5, 3), (0, 8), (2, 2, 2, 2), (1, 4, 0, 3)]
"""Ways in which 1, 2 and 4 ranks divide a dim of 8."""

Function = Callable[[torch.Tensor], torch.Tensor]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shard(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return x.split(list(sizes), dim)[comm.rank("tp")]


def assert_like_whole(
    of_shard: Function, of_whole: Function, x: torch.Tensor, dim: int, sizes: Sequence[int], summed: bool = False
) -> None:
    """Compares results and gradients at 1e-10.

    Args:
        summed: results are equal on all ranks (I), and no shards along `dim`.
    """
    whole = x.clone().requires_grad_()
    expected = of_whole(whole)
    cotangent = randn(*expected.shape, seed=1)
    expected.backward(cotangent)

    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        part = shard(x, dim, sizes).clone().requires_grad_()
        y = of_shard(part)
        y.backward(cotangent if summed else shard(cotangent, dim, sizes))
        return y.detach(), part.grad

    size = len(sizes)
    results, gradients = zip(*threads.run(Mesh(size, tp=size), rank))
    for y in results if summed else [torch.cat(results, dim)]:
        torch.testing.assert_close(y, expected.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)
    torch.testing.assert_close(torch.cat(gradients, dim), whole.grad, rtol=1e-10, atol=1e-10, equal_nan=True)


def verbs_of(function: Function, x: torch.Tensor, dim: int, size: int) -> list[Any]:
    """The collectives of rank 0, forward and backward, as (verb, elements)."""

    def rank() -> list[Any]:
        part = x.chunk(size, dim)[comm.rank("tp")].clone().requires_grad_()
        with comm.record() as forward:
            y = function(part)
        with comm.record() as backward:
            y.backward(torch.ones_like(y))
        return [[(call.verb, torch.Size(call.shape).numel()) for call in calls] for calls in (forward, backward)]

    return threads.run(Mesh(size, tp=size), rank)[0]
