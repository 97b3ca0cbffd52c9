"""Verbs under a TorchFunctionMode: they arrive whole, as they were called, and cost nothing where there is none."""

from __future__ import annotations

import math
import time
import timeit
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, has_torch_function_unary

from neuronx_dist import Mesh, comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.program.recorder import record as record_forward
from neuronx_dist.program.recording import TracingError

X = torch.ones(4, 2)


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


OUT = torch.empty(4, 2)
CALLS = [
    (lambda: comm.all_reduce(X, "tp"), comm.all_reduce, (X, "tp"), {}),
    (lambda: comm.all_reduce(X, axis="tp", op="max"), comm.all_reduce, (X, "tp"), {"op": "max"}),
    (
        lambda: comm.all_reduce(X, ("dp", "cp"), reduce_dtype=torch.float64, out=OUT, async_op=True).wait(),
        comm.all_reduce,
        (X, ("dp", "cp")),
        {"reduce_dtype": torch.float64, "out": OUT, "async_op": True},
    ),
    (lambda: comm.all_gather(X, "tp", dim=1), comm.all_gather, (X, "tp"), {"dim": 1}),
    (lambda: comm.all_gather(X, "tp", dim=0), comm.all_gather, (X, "tp"), {}),
    (lambda: comm.reduce_scatter(X, "tp", op="min"), comm.reduce_scatter, (X, "tp"), {"op": "min"}),
    (lambda: comm.all_to_all(X, "tp", split_dim=1), comm.all_to_all, (X, "tp"), {"split_dim": 1}),
    (lambda: comm.permute(X, "tp", [(0, 1)]), comm.permute, (X, "tp", [(0, 1)]), {}),
    (lambda: comm.broadcast(X, "tp", src=1), comm.broadcast, (X, "tp"), {"src": 1}),
    (lambda: comm.send(X, "tp", dst=1), comm.send, (X, "tp"), {"dst": 1}),
    (lambda: comm.recv(OUT, "tp", src=1, tag=2), comm.recv, (OUT, "tp"), {"src": 1, "tag": 2}),
    (lambda: comm.all_reduce(X, "pp"), comm.all_reduce, (X, "pp"), {}),  # an axis of one rank
]


@pytest.mark.parametrize("call, verb, args, keywords", CALLS)
def test_a_mode_sees_the_verb_and_nothing_of_its_inside(call, verb, args, keywords):
    with comm.as_rank(Mesh(4, tp=2), 0):
        expected = call()
        with _Calls() as mode:
            found = call()
    ((seen, seen_args, seen_keywords),) = mode.calls
    assert seen is verb
    assert seen_args[0] is args[0] and seen_args[1:] == args[1:]
    assert seen_keywords.keys() == keywords.keys()
    assert all(seen_keywords[key] is value or seen_keywords[key] == value for key, value in keywords.items())
    assert found.shape == expected.shape and found.dtype == expected.dtype


def under_a_mode() -> None:
    rank = comm.rank("tp")
    x = torch.full((2,), float(rank))
    with _Calls() as mode:
        assert torch.equal(comm.all_reduce(x, "tp"), torch.ones(2))
        assert comm.all_gather(x, "tp", async_op=True).wait().tolist() == [0.0, 0.0, 1.0, 1.0]
        comm.all_reduce(x, "tp", out=x)
        assert x.tolist() == [1.0, 1.0]
    assert [func for func, _, _ in mode.calls if func in (comm.all_reduce, comm.all_gather)] == [
        comm.all_reduce,
        comm.all_gather,
        comm.all_reduce,
    ]


def test_values_under_a_mode_are_those_without():
    threads.run(Mesh(2, tp=2), under_a_mode)


class _Tagged(torch.Tensor):
    pass


def test_subclasses_keep_their_class():
    with comm.as_rank(Mesh(2, tp=2), 0):
        x = X.as_subclass(_Tagged)
        assert type(comm.all_reduce(x, "tp")) is _Tagged and type(comm.all_reduce(X, "tp")) is torch.Tensor
        assert comm.all_gather(x, "tp", async_op=True).wait().shape == (8, 2)
        assert type(comm.all_reduce(nn.Parameter(X), "tp")) is torch.Tensor
        with torch.device("meta"):  # a mode of torch's own
            assert comm.all_gather(X, "tp", dim=1).device.type == "cpu"


class _Sums(nn.Module):
    def __init__(self, asynchronous: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.asynchronous = asynchronous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = comm.all_reduce(y, "tp", async_op=True).wait() if self.asynchronous else comm.all_reduce(y, "tp", op="max")
        return y + 1


def test_the_recorder_of_pipelines_records_a_verb_as_one_call():
    """The verb's body is not recorded: on the recorder's backend it does not communicate."""
    with comm.as_rank(Mesh(2, tp=2), 0):
        recording = record_forward(_Sums(), {"x": X})
    targets = [node.target for node in recording.graph.nodes if node.op in ("call_function", "call_module")]
    assert targets[:2] == ["linear", comm.all_reduce] and len(targets) == 3
    (node,) = [node for node in recording.graph.nodes if node.target is comm.all_reduce]
    assert node.args[1:] == ("tp",) and node.kwargs == {"op": "max"}


def test_the_recorder_refuses_an_asynchronous_verb():
    with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(TracingError, match="cannot be recorded"):
        record_forward(_Sums(asynchronous=True), {"x": X})


def test_a_handle_tells_its_result():
    with comm.as_rank(Mesh(2, tp=2), 0):
        received: list[torch.Tensor] = []
        handle = comm.all_gather(X, "tp", dim=1, async_op=True)
        handle.then(received.append)
        assert not received
        result = handle.wait()
        assert handle.wait() is result and len(received) == 1 and received[0] is result
        handle.then(received.append)  # late
        assert len(received) == 2 and received[1] is result


def test_without_a_mode_the_look_costs_less_than_a_tenth_of_a_microsecond():
    def nothing(x: torch.Tensor) -> None:
        pass

    def looks(x: torch.Tensor) -> None:
        if has_torch_function_unary(x):
            return

    # In turns and short pieces, in seconds of CPU: the best piece is one that nothing else on the machine slowed down.
    count, best = 10_000, {nothing: math.inf, looks: math.inf}
    for _ in range(50):
        for function in best:
            seconds = timeit.timeit(partial(function, X), timer=time.thread_time, number=count)
            best[function] = min(best[function], seconds)
    assert (best[looks] - best[nothing]) / count < 0.1e-6
