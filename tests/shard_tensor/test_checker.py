"""The type checker inside of handlers: types of local tensors, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, distribute_tensor, sharded
from neuronx_dist.spmd import I, S, SpmdTypeError
from tests.shard_tensor.test_handlers import _handlers_as_they_were  # noqa: F401 - a fixture


def on_dp(function, count=2):
    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode():
            return function(mesh)

    return threads.run(Mesh(count), rank)


def type_of(x):
    return spmd.get_local_type(x)["dp"]


def test_types_of_a_linear_layer():
    def step(mesh):
        x = distribute_tensor(torch.ones(4, 3, requires_grad=True), mesh, [Shard(0)], src=None)
        w = distribute_tensor(torch.ones(2, 3, requires_grad=True), mesh, src=None)
        y = F.linear(x, w)
        loss = y.square().mean()
        loss.backward()
        return [type_of(each.to_local()) for each in (x, w, y, loss, w.grad, x.grad)]

    assert on_dp(step) == [[S(0), I, S(0), I, I, S(0)]] * 2


def test_a_handler_that_forgets_a_reduction_is_reported():
    @sharded(torch.dot)
    def dot(func, types, args, kwargs):
        x, y = args
        return ShardTensor.from_local(func(x.to_local(), y.to_local()), x.device_mesh, [Replicate()])

    def step(mesh):
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src=None)
        return torch.dot(x, x)

    with pytest.raises(SpmdTypeError, match="P"):
        on_dp(step)
