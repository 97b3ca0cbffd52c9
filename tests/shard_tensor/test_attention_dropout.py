"""Attention with dropout: the values of one process at any layout, in memory of the own part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import DeviceMesh, distribute_tensor
from neuronx_dist.shard_tensor.attention_method import attention_method
from neuronx_dist.shard_tensor.placements import Shard
from tests.shard_tensor.support.cases import assert_close, on_ranks, sizes
from tests.shard_tensor.test_attention import SHAPE, attend, normal, triple


def _dropped(mesh: DeviceMesh, seed: int) -> list[torch.Tensor]:
    """Attention with dropout at several layouts."""
    results = []
    for dims in ((2, 2, 2), (None, 2, 2), (2, None, None), (1, 1, 1), (0, 0, 0)):
        torch.manual_seed(seed)
        with attention_method("ring"):
            y, given = attend(mesh, dims, dropout_p=0.4)
        drawn = torch.rand(1)
        y.backward(normal(*SHAPE, seed=9))
        results.append([drawn, y.full_tensor().detach(), *(x.grad.full_tensor() for x in given)])
    return results


def test_dropout_has_the_values_of_one_process():
    plain = triple()
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*plain, dropout_p=0.4)
    drawn = torch.rand(1)
    expected.backward(normal(*SHAPE, seed=9))
    for by_layout in on_ranks(2, lambda mesh: _dropped(mesh, 3)):
        for each in by_layout:
            for actual, other in zip(each, [drawn, expected.detach(), *(x.grad for x in plain)]):
                assert_close(actual, other, "with dropout")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_in_short_types_has_the_values_of_one_process(dtype):
    plain = [x.detach().to(dtype) for x in triple()]
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*plain, dropout_p=0.4)

    def alone(mesh):
        torch.manual_seed(3)
        given = [distribute_tensor(x, mesh, [Shard(2)], src=None) for x in plain]
        return F.scaled_dot_product_attention(*given, dropout_p=0.4).full_tensor()

    for actual in on_ranks(2, alone):
        assert_close(actual, expected, "with dropout", tolerance=3e-2 if dtype is torch.bfloat16 else 1e-6)


def test_of_the_noise_of_dropout_a_rank_keeps_its_part():
    def rank(mesh):
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
        with hooks, attention_method("ring"):
            attend(mesh, (2, 2, 2), dropout_p=0.4)
        return max(x.untyped_storage().nbytes() for x in kept if x.shape[-1:] == SHAPE[2:3])

    batch, heads, rows, _ = SHAPE
    for index, nbytes in enumerate(on_ranks(2, rank)):
        own = sizes(rows, 2, "uneven")[index]
        assert nbytes == batch * heads * own * rows * 8


def test_dropout_of_everything():
    def rank(mesh):
        state = torch.get_rng_state()
        y, given = attend(mesh, (2, 2, 2), dropout_p=1.0)
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        return y.full_tensor().abs().max().item(), given[2].grad.full_tensor().abs().max().item()

    assert on_ranks(2, rank) == [(0.0, 0.0)] * 2
