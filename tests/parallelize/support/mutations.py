"""The smallest cases for collectives of composites: an AssertionError if one is made wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.choose.strategies import candidates
from neuronx_dist.parallelize.composites import ring_attention
from neuronx_dist.program.program import Value, operands_of
from neuronx_dist.rules.containers import substituted
from neuronx_dist.spmd import R, S, assert_type, typecheck
from tests.parallelize.support.pieces import Case, cut

__all__ = ["checked_ring", "running_statistics"]


def running_statistics(name: str = "batch_norm_of_channels of S(1) of operand 0") -> None:
    """Checks that every rank writes the running statistics of one process, whole, in place."""
    x = torch.rand(8, 4, 5, dtype=torch.float64)

    def fresh() -> list[Tensor]:
        return [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]

    whole = fresh()
    expected = F.batch_norm(x, *whole, training=True, momentum=0.3)
    call = Case(F.batch_norm, (x, *fresh(), None, None, True, 0.3), {}).call
    call.writes = (1, 2)
    (strategy,) = [one for one in candidates(call, "tp", 2) if one.name == name]
    shard: Any = strategy.operands[0]
    assert strategy.operands[1:] == (R, R)

    def run() -> Any:
        values = [cut(x, shard, 2, comm.rank("tp")), *fresh()]
        leaves = dict(zip(operands_of(call), values, strict=True))
        args, kwargs = substituted(strategy.local[1:], Value, leaves.__getitem__)
        return strategy.local.function(*args, **kwargs), *values[1:]

    pieces, means, variances = zip(*threads.run(Mesh(2, tp=2), run))
    torch.testing.assert_close(torch.cat(pieces, shard.dim), expected, rtol=1e-10, atol=1e-10)
    for mean, variance in zip(means, variances):
        torch.testing.assert_close([mean, variance], whole, rtol=1e-10, atol=1e-10)


def checked_ring() -> None:
    """Checks values and gradients of ring attention while a checker follows it."""
    whole = [torch.rand(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()

    def run() -> list[Tensor | None]:
        parts = [cut(x.detach(), S(2), 2, comm.rank("tp")).contiguous().requires_grad_() for x in whole]
        with typecheck():
            out = ring_attention(*(assert_type(x, {"tp": S(2)}) for x in parts), axis="tp", is_causal=True)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in parts)]

    for has, wanted in zip(zip(*threads.run(Mesh(2, tp=2), run)), [expected, *(x.grad for x in whole)]):
        torch.testing.assert_close(torch.cat(has, 2), wanted, rtol=1e-10, atol=1e-10)
