"""DTensors: placements as types, and redistribution by the typed operators, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from neuronx_dist import spmd
from neuronx_dist.spmd import I, P, R, S, TensorSharding, V
from tests.support.pool import processes

WHOLE = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)


def test_placements_are_types():
    for placement, spmd_type in {Shard(1): S(1), Partial(): P, Partial("avg"): P("avg"), Replicate(): I}.items():
        assert spmd.dtensor_placement_to_spmd_type(placement) == spmd_type
        assert spmd.spmd_type_to_dtensor_placement(spmd_type) == placement
    assert spmd.dtensor_placement_to_spmd_type(Replicate(), Partial()) is R
    assert spmd.spmd_type_to_dtensor_placement(R) == Replicate()
    for wrong in (V, S(0, stride=2)):
        with pytest.raises(ValueError):
            spmd.spmd_type_to_dtensor_placement(wrong)
    with pytest.raises(ValueError):
        spmd.dtensor_placement_to_spmd_type(Partial("product"))


def every_redistribution():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = [*itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2)]
    for src, dst in itertools.product(placements, placements):
        x = distribute_tensor(WHOLE.clone(), mesh, src).requires_grad_()
        y = spmd.spmd_redistribute(x, src, dst)
        expected = x.detach().redistribute(mesh, dst)
        assert y.placements == tuple(dst) and torch.equal(y.to_local().detach(), expected.to_local()), (src, dst)
        y.backward(distribute_tensor(WHOLE * 3, mesh, dst))
        assert torch.equal(x.grad.full_tensor(), WHOLE * 3), (src, dst)
    partial = DTensor.from_local(WHOLE.clone(), mesh, [Partial(), Shard(0)])
    assert torch.equal(
        spmd.spmd_redistribute(partial, [Partial(), Shard(0)], [Replicate(), Shard(0)]).to_local(), 2 * WHOLE
    )
    x = distribute_tensor(WHOLE.clone(), mesh, [Shard(0), Shard(1)])
    by_names = spmd.spmd_redistribute(x, TensorSharding("a", "b"), TensorSharding(None, ("a", "b")))
    assert by_names.placements == (Shard(1), Shard(1)) and torch.equal(by_names.full_tensor(), WHOLE)
    try:
        spmd.spmd_redistribute(x, [Replicate(), Replicate()], [Shard(0), Shard(0)])
    except ValueError as error:
        return "not" in str(error)
    return False


@pytest.mark.process
@pytest.mark.slow
def test_values_and_gradients_are_those_of_dtensor():
    assert processes(4).run(every_redistribution) == [True] * 4
