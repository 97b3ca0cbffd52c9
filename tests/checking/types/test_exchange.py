"""Types of `comm.exchange`: pieces vary, pieces of a sum are refused, all ranks compare their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdType, SpmdTypeError, V, get_local_type, typecheck


@pytest.fixture
def mode() -> Iterator[Any]:
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), typecheck() as mode:
        yield mode


def pieces(type_: SpmdType) -> list[torch.Tensor]:
    with spmd.no_typecheck():
        x = torch.randn(4, 2)
    return list(spmd.assert_type(x, {"tp": type_}).split(2))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("type_", [S(1), V, R, I])
def test_what_comes_varies(mode: Any, type_: SpmdType, async_op: bool) -> None:
    sends = pieces(type_)
    recvs = [torch.zeros(2, 2), torch.zeros(2, 2)]
    result = comm.exchange(sends, recvs, "tp", async_op=async_op)
    result = result.wait() if async_op else result
    assert [get_local_type(x)["tp"] for x in result] == [V, V]


def test_pieces_of_a_partial_sum_are_refused(mode: Any) -> None:
    with pytest.raises(SpmdTypeError, match="comm.exchange.*partial sum: pieces of summands are not pieces of the sum"):
        comm.exchange(pieces(P), [torch.zeros(2, 2), torch.zeros(2, 2)], "tp")


class Neighbours(torch.nn.Module):
    """Rank 0 sends three rows, of two elements; rank 1 expects as many, or one more."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, nothing = x.detach(), x.new_empty(0)
        if comm.rank("tp") == 0:
            comm.exchange([nothing, rows[:3]], [nothing, x.new_empty(1, 2)], "tp")
        else:
            comm.exchange([rows[:1], nothing], [x.new_empty(3 + self.more, 2), nothing], "tp")
        return self.layer(x).sum()


def problems(more: int) -> list[str]:
    report = spmd.check(lambda: Neighbours(more), torch.ones(4, 2), Mesh(2, tp=2), level=None)
    return [str(problem) for problem in report.problems]


def test_sizes_are_compared_across_ranks() -> None:
    assert problems(0) == []
    (problem,) = problems(1)
    assert "rank 0 sends 6 elements to rank 1, which expects 8" in problem
    assert "Both sides of an exchange must pass the same sizes" in problem
