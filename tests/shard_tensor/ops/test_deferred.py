"""`one_exchange()`: consecutive windows exchange halos once, with the values and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Replicate, Shard, ShardTensor, distribute_tensor, one_exchange, report
from neuronx_dist.shard_tensor.ops.deferred import Deferred
from tests.shard_tensor.support.cases import MESHES, Case, assert_close, on_ranks, run_case, verbs

IMAGE, WEIGHTS = (2, 2, 16, 5), [(3, 2, 3, 3), (3,), (2, 3, 3, 3)]


def composed(function: Any) -> Any:
    def call(*operands: torch.Tensor) -> Any:
        with one_exchange():
            return function(*operands)

    return call


def two(x: Any, w: Any, b: Any, v: Any) -> Any:
    return F.conv2d(F.gelu(F.conv2d(x, w, b, padding=1)) * 0.5, v, padding=1, stride=2)


def skipping(x: Any, w: Any, b: Any, v: Any) -> Any:
    h = F.silu(F.conv2d(x, w, b, padding="same"))
    return F.conv2d(h, v, padding=2, dilation=2) + h[:, :2]


def normalised(x: Any, w: Any, b: Any, v: Any) -> Any:
    return F.conv2d(F.group_norm(F.conv2d(x, w, b, padding=1), 1), v, padding=1).relu()


CASES = [
    Case("two", composed(two), [IMAGE, *WEIGHTS]),
    Case("with a skip connection", composed(skipping), [IMAGE, *WEIGHTS]),
    Case("a reduction between", composed(normalised), [IMAGE, *WEIGHTS]),
    Case("plain weights", composed(two), [IMAGE, *WEIGHTS], plain=(1, 2, 3)),
    Case("two heads", composed(lambda x, w, v: (F.conv1d(F.conv1d(x, w), v, padding=2), F.conv1d(x, w).tanh())),
         [(2, 2, 16), (2, 2, 3), (2, 2, 4)]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, mesh: tuple[int, ...]) -> None:
    assert run_case(case, mesh, most=8) > 0


SPLITS = [None, (11, 5), (2, 9, 5), (1, 12, 0, 3), (0, 16)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_two_convolutions_exchange_once_each_way(split: tuple[int, ...] | None) -> None:
    def operands() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in (IMAGE, *WEIGHTS)]

    plain = operands()
    expected = two(*plain)
    (expected**2).sum().backward()

    def rank(mesh: Any) -> Any:
        x, *weights = operands()
        x = distribute_tensor(x, mesh, [Shard(2)], sizes=[split], src=None)
        weights = [distribute_tensor(w, mesh, [Replicate()], src=None) for w in weights]
        with comm.record() as forward, report() as r, one_exchange():
            y = two(x, *weights)
            assert isinstance(y, Deferred) and not r.calls
        assert type(y) is ShardTensor and y.requires_grad and not y.is_leaf
        assert_close(y.full_tensor().detach(), expected.detach(), "value")
        loss = (y**2).sum()
        with comm.record() as backward:
            loss.backward()
        for given, whole in zip((x, *weights), plain):
            assert_close(given.grad.full_tensor(), whole.grad, "gradient")
        return forward, backward, r

    for forward, backward, r in on_ranks(len(split or (8, 8)), rank):
        once = [] if split == (0, 16) else ["exchange"]
        assert verbs(forward) == once
        assert sorted(verbs(backward)) == ["all_reduce"] * 2 + once
        assert len(r.notes) == 1


def test_the_report_says_what_is_saved_and_what_is_computed_twice() -> None:
    def rank(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(1, 2, 16, 8), mesh, [Shard(2)], src=None)
        w, v = torch.ones(6, 2, 3, 3), torch.ones(2, 6, 3, 3)
        with report() as once, one_exchange():
            F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
        with report() as apart:
            F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
        return once, apart

    row = 8 * 4
    for once, apart in on_ranks(2, rank):
        assert (once.collectives, once.bytes) == (1, 2 * 2 * row)  # two rows of two channels
        assert (apart.collectives, apart.bytes) == (2, 2 * row + 6 * row)
        assert once.notes == [
            (
                "one_exchange",
                "conv2d, conv2d after 1 exchange of 128 bytes, apart 2 of 256: saves 128 bytes, computes 2 positions "
                "of dim 2 twice",
            )
        ]
