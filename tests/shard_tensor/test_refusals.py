"""Refusals: what, where, and what to do; on all ranks alike, and none waits for another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    promotion_mode,
)

TIMEOUT = 60.0


def x(mesh, *sizes, shape=(7, 6), dim=0):
    return distribute_tensor(torch.ones(shape), mesh, [Shard(dim)], sizes=[sizes or None], src=None)


def _local(mesh, rows):
    return ShardTensor.from_local(torch.ones(rows, 6), mesh, [Shard(0)], sharding_shapes="infer")


REFUSALS = {
    "sizes that do not add up": (lambda mesh: x(mesh, 3, 3), ValueError, r"sizes \[3, 3\] on mesh dim 0.*add up to 7"),
    "a negative size": (lambda mesh: x(mesh, 9, -2), ValueError, r"none below 0"),
    "a wrong number of sizes": (lambda mesh: x(mesh, 7), ValueError, r"they must be 2"),
    "other dims that differ between ranks": (
        lambda mesh: ShardTensor.from_local(torch.ones(2, 3 + mesh.get_rank()), mesh, [Shard(0)]),
        ValueError,
        "must be equal but for dim 0, and the ranks have",
    ),
    "a replicated tensor of which ranks have other shapes": (
        lambda mesh: ShardTensor.from_local(torch.ones(2 + mesh.get_rank()), mesh, [Replicate()]),
        ValueError,
        "must be equal, and the ranks have",
    ),
    "a placement too many": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()], src=None),
        ValueError,
        "there are 2 for a mesh of 1 dims",
    ),
    "a dim that is not there": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(1)], src=None),
        ValueError,
        "the tensor has 1 dims",
    ),
    "another mesh among operands": (
        lambda mesh: x(mesh) + x(DeviceMesh("cpu", [1, 0])),
        ValueError,
        r"operands are on .* redistribute\(mesh, placements\) one of them",
    ),
    "a plain tensor under DISABLED": (
        lambda mesh: _disabled(x(mesh)),
        ValueError,
        "its layout is unknown: distribute_tensor",
    ),
    "a view of a sharded dim": (
        lambda mesh: x(mesh, 4, 3, dim=0).t().reshape(-1),
        ValueError,
        r"x.redistribute\(placements=\[Replicate\(\)\]\) first",
    ),
    "a halo that reflects past the tensor": (
        lambda mesh: F.pad(x(mesh, 2, 1, shape=(3, 6)).t(), (4, 0), mode="reflect"),
        ValueError,
        "positions -4 to 1 reach past its reflections.*pad less",
    ),
    "in place on a Partial": (
        lambda mesh: torch.dot(x(mesh, shape=(6,)), x(mesh, shape=(6,))).mul_(2),
        ValueError,
        "redistribute",
    ),
    "distribute_tensor of a Partial": (
        lambda mesh: distribute_tensor(torch.ones(4), mesh, [Partial()], src=None),
        ValueError,
        "a Partial is made by redistribute",
    ),
    "distribute_tensor of a result": (
        lambda mesh: distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)], src=None),
        RuntimeError,
        "takes a leaf",
    ),
    "a process group of threads": (lambda mesh: mesh.get_group(), RuntimeError, "has no process group on the backend"),
}


def _disabled(x):
    with promotion_mode("disabled"):
        return x + torch.ones(7, 6)


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse(name):
    function, kind, words = REFUSALS[name]

    def rank():
        mesh = DeviceMesh("cpu", [0, 1])
        with pytest.raises(kind, match=words):
            function(mesh)
        return True

    assert threads.run(Mesh(2), rank, timeout=TIMEOUT) == [True, True]


def test_one_tensor_dim_on_two_mesh_dims():
    def rank():
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        with pytest.raises(ValueError, match="tensor dim 0 is sharded on mesh dims 0 and 1; shard it on one of them"):
            distribute_tensor(torch.ones(8), mesh, [Shard(0), Shard(0)], src=None)

    threads.run(Mesh(4), rank, timeout=TIMEOUT)
