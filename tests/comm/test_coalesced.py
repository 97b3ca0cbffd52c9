"""Lists of tensors: what they give is what each tensor would give alone, and they travel together."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm
from neuronx_dist.comm import CommError
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.program.recorder import record as record_forward
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, SpmdTypeMode, V, assert_type
from tests.support.pool import processes

pytestmark = pytest.mark.slow

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def value(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + 8 * comm.rank("world")).reshape(shape).to(dtype)


def tensors(*more: torch.Tensor) -> list[torch.Tensor]:
    """Every dim divides by 2 and 4 ranks; uneven sizes, two dtypes mixed, strides, a dim of length 0."""
    wide = value(4, 12)
    return [value(4, 4), value(8, 4, dtype=BF16), wide.t()[:8, :4], value(4, 0), value(12, 4, 3), *more]


OPTIONS = {
    "all_reduce": [{}, dict(op="max"), dict(op="min"), dict(reduce_dtype=F32), dict(reduce_dtype=torch.float64)],
    "all_gather": [{}, dict(dim=1), dict(dim=-1)],
    "reduce_scatter": [{}, dict(dim=1), dict(op="max"), dict(dim=-2, reduce_dtype=F32)],
}


def same(found: Any, expected: list[torch.Tensor], what: object) -> None:
    assert isinstance(found, list) and len(found) == len(expected), what
    for x, y in zip(found, expected):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y), (what, x, y)


def as_each_alone(axis: Any) -> int:
    checked = 0
    for name, many in OPTIONS.items():
        verb = getattr(comm, name)
        scalars = [value(dtype=I64), value()] if name == "all_reduce" else [value(4, dtype=I64)]
        if name == "reduce_scatter":
            scalars = []
        for options in many:
            given = tensors(*scalars) if options.get("dim", 0) == 0 else tensors()
            before = [x.clone() for x in given]
            alone = [verb(x, axis, **options) for x in given]
            what = (name, options)
            same(verb(given, axis, **options), alone, what)
            same(verb(tuple(given), axis, **options), alone, what)
            handle = verb(given, axis, async_op=True, **options)
            same(handle.wait(), alone, what)
            assert handle.wait() is handle.wait()
            outs = [torch.full_like(x, 99) for x in alone]
            found = verb(given, axis, out=outs, **options)
            assert all(x is y for x, y in zip(found, outs))
            same(outs, alone, what)
            same(given, before, what)  # inputs are left alone
            if name == "all_reduce":
                found = verb(given, axis, out=given, async_op=True, **options).wait()
                assert all(x is y for x, y in zip(found, given))
                same(given, alone, what)
            checked += 1
    return checked


@pytest.mark.parametrize("axis", ["tp", ("dp", "cp"), "pp"])  # pp has one rank
def test_a_list_gives_what_each_tensor_gives(axis):
    assert threads.run(Mesh(4, tp=2), as_each_alone, axis) == [12] * 4


def test_the_same_on_gloo():
    assert processes(2).run(as_each_alone, "world", mesh=dict(tp=2)) == [12] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_group(device):
    with comm.as_rank(Mesh(2, tp=2), 1):
        x, y = torch.arange(4.0, device=device), torch.ones(2, 3, device=device)
        assert [tuple(z.shape) for z in comm.all_gather([x, y], "tp")] == [(8,), (4, 3)]
        assert [tuple(z.shape) for z in comm.reduce_scatter([x, y], "tp")] == [(2,), (1, 3)]
        if device == "cpu":
            same(comm.all_reduce([x, y], "tp"), [2 * x, 2 * y], "shapes")


def test_an_empty_list_communicates_nothing():
    with comm.as_rank(Mesh(2, tp=2), 0), comm.record() as calls:
        assert comm.all_reduce([], "tp") == [] and comm.all_gather((), "tp", async_op=True).wait() == []
    assert calls == []


def test_one_collective_for_each_dtype_on_the_wire():
    def work() -> list[comm.Call]:
        xs = [value(4), value(3, 2, dtype=BF16), value(), value(2, dtype=BF16)]
        with comm.record(waits=True) as calls:
            comm.all_reduce(xs, "tp")
            comm.all_reduce(xs, "tp", reduce_dtype=F32, op="sum", async_op=True).wait()
            comm.all_gather([value(4), value(3, 2)], "tp")
            comm.reduce_scatter([value(4), value(2, 2)], "tp")
        return calls

    expected = [
        comm.Call("all_reduce", "tp", "sum", (5,), F32, 20, 2),
        comm.Call("all_reduce", "tp", "sum", (8,), BF16, 16, 2),
        comm.Call("all_reduce", "tp", "sum", (13,), F32, 52, 2),
        comm.Call("wait:all_reduce", "tp", None, (13,), F32, 0, 2),
        comm.Call("all_gather", "tp", None, (10,), F32, 80, 2),
        comm.Call("reduce_scatter", "tp", "sum", (8,), F32, 32, 2),
    ]
    assert threads.run(Mesh(2, tp=2), work) == [expected] * 2


def test_what_does_not_fit_is_refused():
    with comm.as_rank(Mesh(2, tp=2), 0):
        xs = [torch.ones(2), torch.ones(3)]
        with pytest.raises(ValueError, match="all_reduce over tp: out has 1 tensors, but the input has 2"):
            comm.all_reduce(xs, "tp", out=[torch.ones(2)])
        with pytest.raises(ValueError, match=r"out has shape \(2,\), but the result has \(3,\)"):
            comm.all_reduce(xs, "tp", out=[torch.ones(2), torch.ones(2)])
        with pytest.raises(ValueError, match=r"reduce_scatter over tp.*\(3,\).*not divisible by 2"):
            comm.reduce_scatter(xs, "tp")
        with pytest.raises(ValueError, match=r"all_gather: dim 1 is out of range for a tensor of shape \(2,\)"):
            comm.all_gather(xs, "tp", dim=1)
        with pytest.raises(ValueError, match="op must be one of sum, max, min"):
            comm.all_reduce(xs, "tp", op="mean")


def test_ranks_that_differ_are_found():
    def work() -> None:
        comm.all_reduce([torch.ones(2 + comm.rank("tp")), torch.ones(3)], "tp")

    with pytest.raises(CommError, match="all_reduce"):
        threads.run(Mesh(2, tp=2), work, timeout=5)


def test_what_was_sent_is_not_held_until_the_wait():
    """Buckets are made of tensors that nobody else needs."""

    def work() -> None:
        parts = [torch.ones(4), torch.ones(2, dtype=BF16)]
        sent = [weakref.ref(x) for x in parts]
        handle = comm.reduce_scatter(parts, "tp", reduce_dtype=F32, async_op=True)
        del parts
        gc.collect()
        assert [ref() for ref in sent] == [None, None]
        handle.wait()

    threads.run(Mesh(2, tp=2), work)


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_verb_and_nothing_of_its_inside():
    xs = [torch.ones(2), torch.ones(4)]
    with comm.as_rank(Mesh(2, tp=2), 0), _Calls() as mode:
        comm.all_reduce(xs, "tp", op="max", out=xs)
        comm.all_gather(xs, axis="tp")
        comm.reduce_scatter(xs, "tp", async_op=True).wait()
    assert [(func, args[0] is xs, args[1]) for func, args, _ in mode.calls] == [
        (verb, True, "tp") for verb in (comm.all_reduce, comm.all_gather, comm.reduce_scatter)
    ]
    assert [kwargs for *_, kwargs in mode.calls] == [{"op": "max", "out": xs}, {}, {"async_op": True}]


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = comm.all_gather([x, y], "tp")
        return first.sum() + second.sum()


def test_the_recorder_keeps_it_as_one_call():
    with comm.as_rank(Mesh(2, tp=2), 0):
        graph = record_forward(_Model(), {"x": torch.ones(2), "y": torch.ones(3)}, []).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"][0] is comm.all_gather


def test_the_checker_judges_each_tensor():
    def typed(size: int, **types: Any) -> torch.Tensor:
        return assert_type(torch.ones(size), types)

    a, b, c = typed(4, dp=P, tp=S(0)), typed(3, dp=P, tp=I), typed(2, dp=V, tp=I)
    partial, whole = typed(4, dp=R, tp=P), typed(3, dp=R, tp=I)
    with comm.as_rank(Mesh(4, tp=2), 0), SpmdTypeMode(), torch.no_grad():
        first, second = comm.all_reduce([a, b], "dp")
        assert_type(first, {"dp": R, "tp": S(0)})
        assert_type(second, {"dp": R, "tp": I})
        comm.all_reduce([a, b], "dp", out=[a, b], async_op=True).wait()
        assert_type(b, {"dp": R, "tp": I})
        (gathered,) = comm.all_gather([c], "dp")
        assert_type(gathered, {"dp": R, "tp": I})
        with pytest.raises(SpmdTypeError, match=r"whole.*the same on all ranks of tp already"):
            comm.all_reduce([partial, whole], "tp")


def test_a_check_sees_one_event():
    backend = CheckBackend()
    with comm.as_rank(Mesh(2, tp=2), 0, backend):
        comm.all_reduce([torch.ones(4), torch.ones(3)], "tp")
        comm.reduce_scatter([torch.ones(4, 2), torch.ones(2)], "tp")
    assert [(event.verb, event.shape) for event in backend.events] == [
        ("all_reduce", (7,)),
        ("reduce_scatter", (2, 5)),
    ]


def large_ones(axis: str) -> None:
    """Tensors that travel alone on gloo, among small ones; into tensors of the caller, and beside them."""
    size, rank = comm.size(axis), comm.rank(axis)
    shapes = [(size, 40_000), (size, 3), (2 * size, 20_000, 2)]
    everybody = [
        [torch.arange(float(torch.Size(s).numel())).view(s) % 7 + r * 10.0 for s in shapes] for r in range(size)
    ]
    xs = [x.clone() for x in everybody[rank]]
    sums = [sum(parts) for parts in zip(*everybody)]
    for op, reduced in (("sum", sums), ("max", everybody[-1])):
        outs = [torch.zeros(shapes[0][0] // size, 40_000), None, torch.zeros(2, 20_000, 2)]
        expected = [x.chunk(size)[rank] for x in reduced]
        found = comm.reduce_scatter(xs, axis, op=op, out=outs)
        assert found[0] is outs[0] and found[2] is outs[2]
        same(found, expected, (op, "reduce_scatter"))
        same(comm.reduce_scatter(xs, axis, op=op, async_op=True).wait(), expected, (op, "reduce_scatter, new"))
        same(comm.all_reduce(xs, axis, op=op), list(reduced), (op, "all_reduce"))
    same(xs, everybody[rank], "what was sent")
    whole = [torch.zeros(size * s[0], *s[1:]) for s in shapes]
    gathered = [torch.cat(parts) for parts in zip(*everybody)]
    same(comm.all_gather(xs, axis), gathered, "all_gather")
    for x, buffer in zip(xs, whole):  # in place: this rank's own part is the input
        buffer.chunk(size)[rank].copy_(x)
    pieces = [buffer.chunk(size)[rank] for buffer in whole]
    found = comm.all_gather(pieces, axis, out=whole, async_op=True).wait()
    assert all(x is y for x, y in zip(found, whole))
    same(found, gathered, "all_gather in place")
    handle = comm.all_reduce(xs, axis, out=xs, async_op=True)
    assert all(x is y for x, y in zip(handle.wait(), xs))
    same(xs, sums, "all_reduce in place")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_tensors_of_a_list_on_threads(size: int) -> None:
    threads.run(Mesh(size, tp=size), large_ones, "tp")


@pytest.mark.parametrize("size", [2, 4])
def test_large_tensors_of_a_list_on_gloo(size: int) -> None:
    processes(size).run(large_ones, "tp", mesh=dict(tp=size))


def sum_in_rank_order() -> torch.Tensor:
    generator = torch.Generator().manual_seed(comm.rank("world"))
    x = torch.randn(comm.size("world"), 40_000, generator=generator)
    (piece,) = comm.reduce_scatter([x], "world")
    return comm.all_gather(piece, "world")


def test_sums_are_those_of_threads_to_the_bit() -> None:
    expected = threads.run(Mesh(4, tp=4), sum_in_rank_order)[0]
    assert all(torch.equal(found, expected) for found in processes(4).run(sum_in_rank_order, mesh=dict(tp=4)))
