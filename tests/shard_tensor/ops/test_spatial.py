"""Convolutions, pooling, padding and interpolation of ShardTensors at every layout, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor
from tests.shard_tensor.support.cases import MESHES, Case, on_ranks, run_case
from tests.shard_tensor.support.windows import CASES


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, mesh: tuple[int, ...]) -> None:
    assert run_case(case, mesh, most=6) > 0


def test_a_convolution_moves_its_halos_and_reduces_its_weight_gradient() -> None:
    def rank(mesh):
        x = distribute_tensor(torch.randn(1, 2, 8, 5), mesh, [Shard(2)], src=None).requires_grad_()
        w = distribute_tensor(torch.randn(3, 2, 3, 3), mesh, [Replicate()], src=None).requires_grad_()
        with comm.record() as calls:
            y = F.conv2d(x, w, padding=1)
        with comm.record() as back:
            y.sum().backward()
        return [call.verb for call in calls], sorted(call.verb for call in back), calls[0].bytes

    for forward, backward, size in on_ranks(2, rank):
        assert forward == ["exchange"] and size == 2 * 5 * 4  # one row of two channels
        assert backward == ["all_reduce", "all_reduce", "exchange"]  # the sum itself; the weight's gradient


def test_a_reflection_past_the_tensor_is_refused_on_all_ranks() -> None:
    def rank(mesh):
        x = distribute_tensor(torch.randn(1, 2, 4), mesh, [Shard(2)], src=None)
        with pytest.raises(ValueError, match="reflect' of a dim of 4: .*use less padding"):
            F.pad(x, (4, 0), mode="reflect")

    on_ranks(3, rank)


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_of_no_elements(dim):
    def rank(mesh):
        y = F.pad(distribute_tensor(torch.zeros(0, 4), mesh, [Shard(dim)], src=None), (0, 0, 2, 1), value=3.0)
        assert torch.equal(y.full_tensor(), torch.full((3, 4), 3.0))

    on_ranks(2, rank)


def test_padding_gives_memory_of_its_own() -> None:
    """On the second rank nothing is added to the shard."""

    def rank(mesh):
        x = distribute_tensor(torch.zeros(1, 1, 4, 2), mesh, [Shard(2)], src=None)
        F.pad(x, (0, 0, 1, 0)).add_(1)
        assert not x.full_tensor().any()

    on_ranks(2, rank)
