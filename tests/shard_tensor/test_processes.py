"""A sample on gloo processes, and what only processes have: process groups, torch's DTensor and DeviceMesh."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

from neuronx_dist import comm, distributed
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor
from tests.shard_tensor.support.cases import assert_close, check_on_this_rank
from tests.shard_tensor.support.selection import DISTANCES, INDEXING, REARRANGE, SCATTER, SELECT
from tests.shard_tensor.support.table import ATTENTION, LOSSES, MATMUL, NORMALISE, POINTWISE, REDUCE, SOFTMAX, VIEWS
from tests.shard_tensor.support.windows import CASES as WINDOWS
from tests.support.pool import processes

pytestmark = pytest.mark.process
FAMILIES = {
    "pointwise": POINTWISE,
    "matmul": MATMUL,
    "views": VIEWS,
    "reduce": REDUCE,
    "normalise": NORMALISE,
    "softmax": SOFTMAX,
    "losses": LOSSES,
    "attention": ATTENTION,
    "windows": WINDOWS,
    "select": SELECT,
    "indexing": INDEXING,
    "scatter": SCATTER,
    "rearrange": REARRANGE,
    "distances": DISTANCES,
}
SAMPLE = [(name, case) for name, family in FAMILIES.items() for case in family[::6]]
RING = replace(ATTENTION[0], whole=tuple((operand, dim) for operand in range(3) for dim in (0, 1, 3)))


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def sample() -> dict[str, int]:
    """Number of computed layouts, by family."""
    counts = dict.fromkeys(FAMILIES, 0)
    for name, case in SAMPLE:
        counts[name] += check_on_this_rank(case, (2,), 2)
    counts["ring"] = check_on_this_rank(RING, (2,), 7)  # each of q, k, v whole, or sharded along the sequence
    return counts


def check_sample(first: dict[str, int], second: dict[str, int]) -> None:
    """Compares the counts of two ranks."""
    assert first == second
    assert min(first.values()) >= 4 and first["ring"] == (21 if os.environ.get("NXD_FULL") else 7)


def test_a_sample_of_the_table():
    check_sample(*processes(2).run(sample, mesh={}))


def torchs_tensors():
    mesh = distributed.init_device_mesh("cpu", (2,))
    theirs = mesh.to_torch()
    assert DeviceMesh.from_torch(theirs) is mesh
    x = distribute_dtensor(whole(7, 3), theirs, [Shard(0)]).requires_grad_()
    y = ShardTensor.from_dtensor(x)
    assert y.placements == (Shard(0),) and y._spec.sizes == ((4, 3),)
    (y * whole(3)).sum().backward()
    assert_close(x.grad.full_tensor(), whole(3).expand(7, 3), "gradient of a DTensor")
    assert_close(y.grad.full_tensor(), whole(3).expand(7, 3), "gradient of a DTensor's ShardTensor")
    z = distributed.distribute_tensor(whole(7, 3).requires_grad_(), mesh, [Shard(0)], sizes=[(1, 6)])
    d = z.to_dtensor()
    assert isinstance(d, DTensor) and d.shape == (7, 3)
    assert_close(d.full_tensor().detach(), whole(7, 3), "as a DTensor")
    local = whole(3) * (dist.get_rank() + 1)
    dist.all_reduce(local, group=mesh.get_group())
    assert_close(local, whole(3) * 3, "a raw collective on get_group()")
    assert distributed.ones(4, device_mesh=mesh, placements=[Replicate()]).sum().item() == 4


def test_torchs_tensors_and_groups():
    processes(2).run(torchs_tensors, mesh={})


def torchs_tensors_on_two_mesh_dims():
    """[Shard(0), Shard(0)] of 7 rows on 2 x 2: from torch's DTensor and to it, without communication."""
    mesh = distributed.init_device_mesh("cpu", (2, 2))
    twice = [Shard(0), Shard(0)]
    x = distribute_dtensor(whole(7, 3), mesh.to_torch(), twice).requires_grad_()
    with comm.record() as calls:
        y = ShardTensor.from_dtensor(x)
        back = (y * 2).to_dtensor()
    assert y.placements == tuple(twice) and y._spec.sizes[0] == (2, 2, 2, 1) and calls == []
    assert back.placements == tuple(twice)
    assert_close(back.full_tensor().detach(), whole(7, 3) * 2, "as a DTensor")
    (F.softmax(y, 0) * whole(3)).sum().backward()
    expected = whole(7, 3).requires_grad_()
    (F.softmax(expected, 0) * whole(3)).sum().backward()
    assert_close(x.grad.full_tensor(), expected.grad, "gradient of a DTensor")
    z = distributed.distribute_tensor(whole(7, 3), mesh, twice, sizes=[(1, 0, 4, 2), None])
    assert_close(z.to_dtensor().full_tensor(), whole(7, 3), "chunks of other shards")
    assert_close(z.sort(0)[0].full_tensor(), whole(7, 3), "sorted")


def test_torchs_tensors_on_two_mesh_dims():
    processes(4).run(torchs_tensors_on_two_mesh_dims, mesh={})
