"""Exchanges as one program for all ranks, here on ranks that are threads; tests/xla replays them on XLA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.comm import CommError
from neuronx_dist.shard_tensor import Shard, distribute_tensor
from neuronx_dist.shard_tensor.moves import exchange
from neuronx_dist.shard_tensor.windows import convolution
from neuronx_dist.shard_tensor.windows.local_windows import ShardedDim
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs


@pytest.fixture(autouse=True)
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "in_one_program", lambda x: True)


def whole(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


FUNCTIONS = {
    "conv": lambda x, w: F.conv1d(x, w, padding=1),
    "two neighbours away": lambda x, w: F.conv1d(x, w, padding=5, dilation=5),
    "strided": lambda x, w: F.conv1d(x, w[..., :2], stride=2),
    "max_pool": lambda x, w: F.max_pool1d(x, 3, 1, 1),
    "roll and flip": lambda x, w: x.roll(3, 2).flip(2),
}


@pytest.mark.each_value
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_one_process(name: str, ranks: int) -> None:
    function = FUNCTIONS[name]
    plain, w = whole(2, 2, 16), whole(2, 2, 3)
    expected = function(plain, w)
    (expected**2).sum().backward()

    def rank(mesh: Any) -> None:
        x = distribute_tensor(whole(2, 2, 16), mesh, [Shard(2)], src=None)
        y = function(x, w.detach())
        assert_close(y.full_tensor().detach(), expected.detach(), name)
        (y**2).sum().backward()
        assert_close(x.grad.full_tensor(), plain.grad, f"gradient of {name}")

    on_ranks(ranks, rank)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_what_is_outside(mode: str) -> None:
    plain, w = whole(1, 2, 8), whole(2, 2, 3).detach()
    expected = F.conv1d(F.pad(plain, (1, 1), mode=mode), w)
    (expected**2).sum().backward()

    def rank(mesh: Any) -> None:
        group = mesh.communicator()
        own = whole(1, 2, 8).detach().chunk(4, 2)[group.rank].requires_grad_()
        y, _ = convolution.conv(own, w, None, (ShardedDim(2, (0, 2, 4, 6, 8), group),), padding=1, padding_mode=mode)
        assert_close(y.detach(), expected.detach().chunk(4, 2)[group.rank], mode)
        (y**2).sum().backward()
        assert_close(own.grad, plain.grad.chunk(4, 2)[group.rank], f"gradient of {mode}")

    on_ranks(4, rank)


def test_all_ranks_send_alike() -> None:
    def rank(mesh: Any) -> list[tuple[str, int]]:
        x = distribute_tensor(whole(1, 2, 16), mesh, [Shard(2)], src=None)
        with comm.record() as calls:
            F.conv1d(x, torch.ones(2, 2, 3, dtype=torch.float64), padding=1)
            F.conv1d(x, torch.ones(2, 2, 1, dtype=torch.float64))
        assert verbs(calls) == ["exchange"]
        return [(call.verb, call.bytes) for call in calls]

    assert on_ranks(4, rank) == [[("exchange", 2 * 2 * 8)]] * 4  # ends too


def test_sizes_that_differ_are_refused_on_all_ranks() -> None:
    def rank(mesh: Any) -> None:
        x = distribute_tensor(whole(1, 1, 16), mesh, [Shard(2)], sizes=[(5, 11)], src=None)
        with pytest.raises(CommError, match=r"shards have sizes \[5, 11\], but on XLA all ranks run one program"):
            F.conv1d(x, torch.ones(1, 1, 3, dtype=torch.float64), padding=1)
        x = distribute_tensor(whole(1, 1, 16), mesh, [Shard(2)], src=None)
        with pytest.raises(CommError, match=r"results have sizes \[9, 8\]"):
            F.conv1d(x, torch.ones(1, 1, 2, dtype=torch.float64))

    on_ranks(2, rank)
