"""The verbs in compiled code, on real processes: values, order, records, and meshes that come and go."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.verbs.compiled import ordered_operator
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.support.pool import processes

BF16 = torch.bfloat16
VERBS = {
    "all_reduce": lambda x: comm.all_reduce(x, "tp"),
    "all_reduce max": lambda x: comm.all_reduce(x, "tp", op="max"),
    "all_reduce bf16": lambda x: comm.all_reduce(x.to(BF16), "tp", reduce_dtype=torch.float32),
    "all_reduce transposed": lambda x: comm.all_reduce(x.t(), "tp"),
    "all_reduce out": lambda x: (y := x * 2, comm.all_reduce(y, "tp", out=y))[0],
    "all_gather": lambda x: comm.all_gather(x, "tp"),
    "all_gather dim": lambda x: comm.all_gather(x, "tp", dim=-1),
    "reduce_scatter": lambda x: comm.reduce_scatter(x, "tp"),
    "reduce_scatter dim": lambda x: comm.reduce_scatter(x.to(BF16), "tp", dim=1, reduce_dtype=torch.float32),
    "all_to_all": lambda x: comm.all_to_all(x, "tp", split_dim=0, concat_dim=-1),
    "permute": lambda x: comm.permute(x, "tp", [(0, 1)]),
    "broadcast": lambda x: comm.broadcast(x, "tp", src=1),
    "async": lambda x: comm.all_reduce(x, "tp", async_op=True).wait() + x,
    "axis of one rank": lambda x: comm.all_reduce(x, "dp"),
}


def values():
    torch.compiler.reset()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank("tp")), dtype=torch.float64)
    for name, verb in VERBS.items():
        with comm.record() as eager:
            expected = verb(x)
        compiled = torch.compile(verb, backend="aot_eager", fullgraph=True)
        compiled(x)
        with comm.record() as calls:
            result = compiled(x)
        assert result.dtype == expected.dtype and result.stride() == expected.stride(), name
        assert torch.equal(result, expected), name
        assert calls == eager, name


def test_values_and_records_are_those_of_eager_code():
    processes(2).run(values, mesh=dict(tp=2))


def order():
    torch.compiler.reset()

    def function(x):
        comm.all_reduce(x * 2, "tp", op="max")  # nobody uses it, and other ranks wait for it
        piece = comm.reduce_scatter(x, "tp")
        y = comm.all_gather(x[:2], "tp", dim=1)
        return y.sum() + comm.all_reduce(piece, "tp").sum() * (comm.rank("tp") + 1)

    x = torch.randn(4, 6)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(x)
    with comm.record() as calls:
        compiled(x)
    return [call.verb for call in calls]


def test_no_collective_is_dropped_or_moved():
    expected = ["all_reduce", "reduce_scatter", "all_gather", "all_reduce"]
    assert processes(2).run(order, mesh=dict(tp=2)) == [expected] * 2


def meshes():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: comm.all_gather(x, "tp"), backend="aot_eager", fullgraph=True)
    x = torch.full((2,), float(comm.rank("world")))
    first = compiled(x)
    stale = comm.communicator("tp").key
    destroy_model_parallel()
    initialize_model_parallel()
    second = compiled(x)
    destroy_model_parallel()
    initialize_model_parallel(2)
    third = compiled(x)
    assert torch.equal(first, third) and first.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert torch.equal(second, x), "tp is 1 now"
    with pytest.raises(
        comm.CommError, match=r"all_gather over tp: .* a mesh that no longer exists.*torch.compiler.reset"
    ):
        torch.ops.neuronx_dist.all_gather(x, stale, 0)
    with pytest.raises(ValueError, match="3.*not divisible by 2|unable to create 2 partitions"):
        comm.reduce_scatter(torch.ones(3), "tp")


def test_code_follows_the_mesh():
    processes(2).run(meshes, mesh=dict(tp=2))


@pytest.mark.slow
def test_a_group_is_made_before_compiled_code():
    axis = ("cp", "tp")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: comm.all_reduce(x, axis), backend="aot_eager", fullgraph=True)
    with comm.as_rank(Mesh(2, tp=2), 0):
        with pytest.raises(Exception, match=r"before it runs|Observed exception"):
            compiled(torch.ones(2))
        comm.communicator(axis)
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_operator_without_result_is_not_dropped():
    seen: list[float] = []
    operator = ordered_operator(
        "look_for_a_test(Tensor x) -> ()", lambda x: seen.append(float(x.sum())), lambda x: None
    )
    torch.compiler.reset()

    def function(x):
        operator(x)
        return x * 2

    torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(3))
    assert seen == [3.0]
