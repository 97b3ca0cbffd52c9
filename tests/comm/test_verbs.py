"""Every verb on every backend: dims, dtypes, layouts, out=, asynchronous; what is refused."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.comm.verb_cases import CASES, on_every_rank
from tests.support.pool import processes

VERBS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [2, 3])
def test_values_on_threads(verb, size):
    assert threads.run(Mesh(size, tp=size), on_every_rank, verb, size) == [CASES] * size


@pytest.mark.each_value
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [2, 4])
def test_values_on_processes(verb, size):
    assert processes(size).run(on_every_rank, verb, size, mesh=dict(tp=size)) == [CASES] * size


def empty_tensors(size: int) -> None:
    for shape in [(0,), (0, 3), (size, 0)]:
        x = torch.empty(shape)
        assert comm.all_reduce(x, "world").shape == shape
        for dim in range(len(shape)):
            gathered = list(shape)
            gathered[dim] *= size
            assert list(comm.all_gather(x, "world", dim=dim).shape) == gathered
            assert list(comm.all_gather(x, "world", dim=dim, out=torch.empty(gathered)).shape) == gathered
            piece = list(shape)
            piece[dim] //= size
            if shape[dim] % size == 0:
                assert list(comm.reduce_scatter(x, "world", dim=dim).shape) == piece
                assert comm.all_to_all(x, "world", split_dim=dim, concat_dim=dim).shape == shape
        assert comm.broadcast(x, "world").shape == shape
        assert comm.permute(x, "world", [(0, 1)]).shape == shape


def test_empty_tensors():
    threads.run(Mesh(2, tp=2), empty_tensors, 2)
    processes(2).run(empty_tensors, 2)
    processes(4).run(empty_tensors, 4)


def reduce_dtypes(size: int) -> None:
    """256 + 1 is 256 in bf16; in fp32 it is not. The result has the input's dtype, or that of `out`."""
    rank = comm.rank("world")
    x = torch.full((size, 2), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    exact = 256.0 + (size - 1)
    rounded = torch.tensor(exact).bfloat16()
    for given in (x, x.t().contiguous().t()):
        wide = torch.empty(size, 2)
        found = comm.all_reduce(given, "world", reduce_dtype=torch.float32)
        assert found.dtype == torch.bfloat16 and (found == rounded).all()
        assert (comm.all_reduce(given, "world", reduce_dtype=torch.float32, out=wide) == exact).all()
        assert (comm.all_reduce(given, "world", reduce_dtype=torch.float32, async_op=True).wait() == rounded).all()
        piece = comm.reduce_scatter(given, "world", reduce_dtype=torch.float32)
        assert piece.dtype == torch.bfloat16 and piece.shape == (1, 2) and (piece == rounded).all()
        wide = torch.empty(1, 2)
        assert (comm.reduce_scatter(given, "world", reduce_dtype=torch.float32, out=wide) == exact).all()
    # a narrower reduce_dtype does not narrow
    fine = torch.full((size,), 1 + 2.0**-20, dtype=torch.float64)
    assert (comm.all_reduce(fine, "world", reduce_dtype=torch.float32) == size * (1 + 2.0**-20)).all()
    with comm.record() as calls:
        comm.all_reduce(x, "world", reduce_dtype=torch.float32)
        comm.all_reduce(x, "world", op="max", reduce_dtype=torch.float32)
        comm.all_reduce(fine, "world", reduce_dtype=torch.float32)
    assert [call.dtype for call in calls] == [torch.float32, torch.bfloat16, torch.float64]


def test_reduce_dtype_is_promoted():
    threads.run(Mesh(2), reduce_dtypes, 2)
    processes(2).run(reduce_dtypes, 2)


def objects(size: int) -> None:
    rank = comm.rank("world")
    assert comm.gather_objects({"rank": rank, 1: "x" * rank}) == [{"rank": r, 1: "x" * r} for r in range(size)]
    for src in range(size):
        assert comm.broadcast_object(("from", rank), src=src) == ("from", src)


def test_objects():
    threads.run(Mesh(3), objects, 3)
    processes(2).run(objects, 2)


def several_in_flight() -> None:
    """Collectives made of messages do not meet each other, whatever the order of the waits."""
    rank, size = comm.rank("world"), comm.size("world")
    xs = [torch.full((i + 1,), float(10 * i + rank)) for i in range(5)]
    gathers = [comm.all_gather(x, "world", async_op=True) for x in xs]
    sums = [comm.all_reduce(x, "world", async_op=True) for x in xs]
    scatters = [comm.reduce_scatter(x.repeat(size), "world", async_op=True) for x in xs]
    for i in reversed(range(5)):
        assert torch.equal(gathers[i].wait(), torch.cat([torch.full((i + 1,), float(10 * i + r)) for r in range(size)]))
        total = float(sum(10 * i + r for r in range(size)))
        assert torch.equal(sums[i].wait(), torch.full((i + 1,), total))
        assert torch.equal(scatters[i].wait(), torch.full((i + 1,), total))


def test_several_collectives_in_flight():
    threads.run(Mesh(3), several_in_flight)
    processes(2).run(several_in_flight)
    processes(4).run(several_in_flight)


def inputs_with_gradients() -> None:
    """Verbs are not differentiable: nothing they return or fill is part of a graph."""
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    for given in (x, y):
        out = torch.zeros(2)
        gathered = torch.zeros(4)
        for result in (
            comm.all_reduce(given, "world"),
            comm.all_reduce(given, "world", out=out),
            comm.broadcast(given, "world", out=out),
            comm.all_gather(given, "world", out=gathered),
            comm.reduce_scatter(given, "world"),
            comm.all_to_all(given, "world"),
        ):
            assert not result.requires_grad and result.grad_fn is None
    comm.all_reduce(x, "world", out=x)  # a parameter, in place
    assert x.is_leaf and x.requires_grad and x.tolist() == [2.0, 2.0]


def test_inputs_that_require_gradients():
    threads.run(Mesh(2), inputs_with_gradients)
    processes(2).run(inputs_with_gradients)


@pytest.mark.parametrize("tag", [-1, 1 << 20, (1 << 20) + 1])
def test_a_tag_that_is_not_a_users_is_refused(tag: int) -> None:
    """Larger tags are reserved for collectives that consist of messages."""
    x = torch.ones(2)
    with comm.as_rank(Mesh(2, tp=2), 0):
        with pytest.raises(ValueError, match=rf"send over tp: tag={tag} is out of range \(0..1048575\)"):
            comm.send(x, "tp", dst=1, tag=tag)
        with pytest.raises(ValueError, match=rf"recv over tp: tag={tag} is out of range \(0..1048575\)"):
            comm.recv(x, "tp", src=1, tag=tag)
        comm.send(x, "tp", dst=1, tag=(1 << 20) - 1)
        comm.recv(x, "tp", src=1, tag=(1 << 20) - 1)


@pytest.mark.parametrize(
    "call, parts",
    [
        (lambda: comm.reduce_scatter(torch.ones(3), "tp"), ["reduce_scatter over tp", "2 partitions", "(3,)"]),
        (lambda: comm.all_to_all(torch.ones(2, 3), "tp", split_dim=-1), ["all_to_all", "dim 1", "(2, 3)", "3 is not"]),
        (lambda: comm.all_gather(torch.ones(2), "tp", dim=1), ["all_gather", "dim 1", "(2,)"]),
        (lambda: comm.all_gather(torch.ones(()), "tp"), ["dim 0", "()"]),
        (lambda: comm.reduce_scatter(torch.ones(2, 2), "tp", dim=-3), ["dim -3"]),
        (lambda: comm.all_reduce(torch.ones(2), "tp", op="avg"), ["sum, max, min", "avg"]),
        (lambda: comm.broadcast(torch.ones(2), "tp", src=2), ["broadcast over tp", "src=2", "0..1"]),
        (lambda: comm.broadcast_object(1, "tp", src=-1), ["src=-1"]),
        (lambda: comm.send(torch.ones(2), "tp", dst=0), ["send", "dst=0", "itself"]),
        (lambda: comm.recv(torch.ones(2), "tp", src=5), ["recv", "src=5"]),
        (lambda: comm.recv(torch.ones(2, 3).t(), "tp", src=1), ["contiguous", "(3, 2)"]),
        (lambda: comm.permute(torch.ones(2), "tp", [(0, 1), (1, 1)]), ["permute", "at most once"]),
        (lambda: comm.permute(torch.ones(2), "tp", [(0, 2)]), ["0..1"]),
        (lambda: comm.all_reduce(torch.ones(2), "tq"), ["tq", "tp"]),
        (lambda: comm.all_reduce(torch.ones(2), "tp", out=torch.ones(2, 2)), ["out has shape (2, 2)", "(2,)"]),
        (lambda: comm.all_gather(torch.ones(2), "tp", out=torch.ones(2)), ["(2,)", "(4,)"]),
        (lambda: comm.reduce_scatter(torch.ones(4), "tp", out=torch.ones(4)), ["(4,)", "(2,)"]),
        (lambda: comm.all_to_all(torch.ones(4), "tp", out=torch.ones(1)), ["(1,)", "(4,)"]),
        (lambda: comm.broadcast(torch.ones(1), "tp", out=torch.ones(4)), ["(4,)", "(1,)"]),
    ],
)
def test_wrong_arguments_are_refused(call, parts):
    with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(ValueError) as error:
        call()
    assert all(part in str(error.value) for part in parts), str(error.value)


def in_standard_strides() -> None:
    """Shards of one position along the joined dim need no copy to be joined, but their result could not be viewed."""
    for dim, shape in enumerate([(1, 4, 3), (4, 1, 3), (4, 3, 1)]):
        x = torch.ones(shape)
        assert comm.all_gather(x, "world", dim=dim).is_contiguous()
        assert all(y.is_contiguous() for y in comm.all_gather([x, x], "world", dim=dim))
        assert comm.all_to_all(torch.ones(4, 4, 1), "world", split_dim=0, concat_dim=2).is_contiguous()


def test_joined_tensors_are_contiguous():
    threads.run(Mesh(2, tp=2), in_standard_strides)
