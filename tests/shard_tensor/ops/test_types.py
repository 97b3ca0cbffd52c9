"""The type checker inside of handlers: it follows each of them, on even shards along every dim, in both passes."""

from __future__ import annotations

import pytest

from neuronx_dist import spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Partial, ShardTensor, spmd_type
from tests.shard_tensor.support.cases import distributed, operands, tensors
from tests.shard_tensor.support.table import LOSSES, NORMALISE, SOFTMAX

CASES = [case for case in (*NORMALISE, *SOFTMAX, *LOSSES) if case.name != "local_response_norm"]  # it exchanges


@pytest.mark.parametrize("case", CASES, ids=str)
def test_handlers_under_the_checker(case):
    def rank():
        mesh = DeviceMesh.from_axes("dp")
        for dim, size in enumerate(case.shapes[0]):
            if size % 2:
                continue
            with spmd.SpmdTypeMode():
                given = [
                    x if i in case.plain else distributed(x, mesh, (dim if i == 0 else None,), "chunk")
                    for i, x in enumerate(operands(case))
                ]
                for x in given:
                    if not isinstance(x, ShardTensor):
                        spmd.assert_type(x, {"dp": spmd.I})
                try:
                    results = tensors(case.function(*given))
                except ValueError as error:
                    assert case.refusals and case.refusals in str(error)
                    continue
                for y in results:
                    expected = spmd_type(y.placements[0])
                    assert str(spmd.get_local_type(y.to_local())["dp"]) == str(expected), (dim, y.placements)
                if case.gradients:
                    sum(y.sum() for y in results).backward()
                    for x in given:
                        if isinstance(x, ShardTensor) and x.grad is not None:
                            assert not isinstance(x.grad.placements[0], Partial)
                            actual = spmd.get_local_type(x.grad.to_local())["dp"]
                            assert str(actual) == str(spmd_type(x.placements[0])), (dim, x.placements)

    threads.run(Mesh(2), rank)
