"""`spmd.check` of models with ShardTensors whose ranks differ: halos at the ends, shards of other sizes, empty ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Shard, ShardTensor
from tests.support.call_sites import find_sites, mutate

pytestmark = pytest.mark.slow

ROWS = 12


def swapped(x, mesh):
    return x.redistribute(mesh, [Shard(0)], sizes=[(1, 1, *[0] * (mesh.size() - 2))])


MOVES = {
    "halo": (3, lambda x, mesh: x),
    "windows apart": (2, lambda x, mesh: x),
    "roll": (1, lambda x, mesh: x.roll(3, 1)),
    "flip": (1, lambda x, mesh: x.flip(1)),
    "softmax": (1, lambda x, mesh: x.softmax(1)),
    "another dim": (1, swapped),
}


class Model(nn.Module):
    def __init__(self, move, is_uneven):
        super().__init__()
        kernel, self.move = MOVES[move]
        self.conv = nn.Conv1d(2, 2, kernel, stride=2 if kernel == 2 else 1, padding=kernel // 2)
        self.is_uneven = is_uneven

    def forward(self, x):
        mesh = DeviceMesh.from_axes("dp")
        x = ShardTensor.from_local(x, mesh, [Shard(0)], sharding_shapes="chunk")
        if self.is_uneven:
            x = x.redistribute(sizes=[(ROWS - 3, 3, *[0] * (mesh.size() - 2))])
        y = self.conv(x.t().unsqueeze(0)).squeeze(0)
        return self.move(y, mesh).square().mean().full_tensor()


def step(model, optimizer, inputs):
    """Without `reduce_gradients`: each gradient is reduced where the weight is used."""
    model(inputs).backward()
    optimizer.step()


def checked(move, is_uneven, ranks):
    rows = torch.randn(ROWS // ranks, 2)
    return spmd.check(lambda: Model(move, is_uneven), rows, mesh=Mesh(ranks), step=step)


@pytest.mark.each_pair
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_ranks_that_differ_are_played_each(move, is_uneven, ranks):
    report = checked(move, is_uneven, ranks)
    assert report.ok, str(report)


def test_what_is_wrong_in_such_a_program_is_reported():
    def left_out(original, x, axis, **types):
        return x

    with mutate(find_sites()["total:spmd.all_reduce#1"], left_out):
        assert "its layout requires I on dp, but the local tensor [] is" in str(checked("halo", True, 3))


class Unlike(nn.Module):
    """Each rank sends two rows to the next one, which expects one of the first rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        group = comm.communicator("dp")
        rank, size = int(group.rank), group.size
        sends = [x[:2] if index == rank + 1 else x[:0] for index in range(size)]
        expected = 1 if rank == 1 else 2
        recvs = [x.new_empty(expected if index == rank - 1 else 0, 2) for index in range(size)]
        comm.exchange(sends, recvs, "dp")
        return (x * self.weight).square().mean()


def test_an_exchange_whose_sides_differ_is_reported():
    report = spmd.check(Unlike, torch.randn(4, 2), mesh=Mesh(3), level=None)
    assert "rank 0 sends 4 elements to rank 1, which expects 2" in str(report)
