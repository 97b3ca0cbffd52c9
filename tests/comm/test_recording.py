"""Calls collected by `comm.record`: exactly which ones, with axis, shape, dtype and bytes."""

from __future__ import annotations

import threading

import torch

from neuronx_dist import comm
from neuronx_dist.comm import Call, recording
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.support.pool import processes


def one_of_each() -> list[Call]:
    x = torch.ones(4, 6)
    rank = comm.rank("tp")
    with comm.record() as calls:
        comm.all_reduce(x, "tp", op="max")
        comm.all_reduce(x.bfloat16(), "world", reduce_dtype=torch.float32)
        comm.all_gather(x, "tp", dim=1)
        comm.reduce_scatter(x.double(), ("dp", "cp"))
        comm.all_to_all(x.t(), ("pp", "tp"), split_dim=1)
        comm.permute(x, "tp", [(0, 1)])
        comm.broadcast(x.to(torch.int64), "pp", src=1)
        comm.send(x[rank], "tp", dst=1) if rank == 0 else comm.recv(x[rank].clone(), "tp", src=0)
        comm.barrier()
        comm.gather_objects(1)
    comm.all_reduce(x, "tp")  # no longer recorded
    return calls


F32, BF16, F64, I64 = torch.float32, torch.bfloat16, torch.float64, torch.int64


def expected(rank: int) -> list[Call]:
    return [
        Call("all_reduce", "tp", "max", (4, 6), F32, 96, 2),
        Call("all_reduce", "world", "sum", (4, 6), F32, 96, 4),
        Call("all_gather", "tp", None, (4, 6), F32, 192, 2),
        Call("all_to_all", "pp,tp", None, (6, 4), F32, 96, 4, messages=3),
        Call("permute", "tp", None, (4, 6), F32, 96, 2),
        Call("broadcast", "pp", None, (4, 6), I64, 192, 2),
        Call("send" if rank % 2 == 0 else "recv", "tp", None, (6,), F32, 24, 2, messages=1 - rank % 2),
    ]


def test_the_table_of_calls():
    mesh = Mesh(4, tp=2, pp=2)
    want = [expected(rank) for rank in range(4)]
    assert threads.run(mesh, one_of_each) == want
    assert processes(4).run(one_of_each, mesh=dict(tp=2, pp=2)) == want
    for rank in range(4):
        with comm.as_rank(mesh, rank):
            assert one_of_each() == want[rank]
    with comm.as_rank(Mesh(4, cp=2), 0):  # merged axes
        with comm.record() as calls:
            comm.reduce_scatter(torch.ones(4, 6, dtype=torch.float64), ("dp", "cp"))
        assert calls == [Call("reduce_scatter", "dp,cp", "sum", (4, 6), F64, 192, 4)]


def asynchronous() -> list[tuple[str, tuple[int, ...]]]:
    with comm.record(waits=True) as calls:
        first = comm.all_gather(torch.ones(2), "tp", async_op=True)
        second = comm.all_reduce(torch.ones(3), "tp", async_op=True)
        second.wait()
        first.wait()
        first.wait()
        comm.all_reduce(torch.ones(1), "tp")
    return [(call.verb, call.shape) for call in calls]


def test_waits_are_recorded_on_demand_once_each():
    want = [
        ("all_gather", (2,)),
        ("all_reduce", (3,)),
        ("wait:all_reduce", (3,)),
        ("wait:all_gather", (4,)),
        ("all_reduce", (1,)),
    ]
    assert threads.run(Mesh(2, tp=2), asynchronous) == [want] * 2
    assert processes(2).run(asynchronous, mesh=dict(tp=2)) == [want] * 2


class Listener:
    """A recorder of its own, which wants to know of ends too."""

    def __init__(self) -> None:
        self.rank = comm.rank("tp")
        self.calls: list[tuple[str, int]] = []

    def add(self, call: Call) -> None:
        self.calls.append((call.verb, call.bytes))


def test_who_is_attached_is_told_of_starts_and_of_ends():
    def work():
        recording.attach(listener := Listener())
        handle = comm.all_reduce(torch.ones(3), "tp", async_op=True)
        comm.broadcast(torch.ones(2), "tp")
        handle.wait()
        recording.detach(listener)
        comm.broadcast(torch.ones(2), "tp")
        return listener.calls

    want = [("all_reduce", 12), ("broadcast", 8), ("end:broadcast", 0), ("wait:all_reduce", 0)]
    assert threads.run(Mesh(2, tp=2), work) == [want] * 2


def a_message() -> list[str]:
    x, seen = torch.ones(2), []
    with comm.record(waits=True) as calls:
        if comm.rank("tp") == 0:
            handle = comm.send(x, "tp", dst=1, async_op=True)
        else:
            handle = comm.recv(x, "tp", src=0, async_op=True)
        handle.then(seen.append)
        assert not seen  # the result is there, but what it holds is not
        assert handle.wait() is x and handle.wait() is x
        handle.then(seen.append)
    assert len(seen) == 2 and all(call is x for call in seen)
    return [call.verb for call in calls]


def test_a_message_is_awaited_once_and_its_result_is_its_tensor():
    want = [["send", "wait:send"], ["recv", "wait:recv"]]
    assert threads.run(Mesh(2, tp=2), a_message) == want
    assert processes(2).run(a_message, mesh=dict(tp=2)) == want


def test_recorders_nest_and_see_their_own_rank_only():
    def work():
        with comm.record() as outer:
            comm.all_reduce(torch.ones(1), "tp")
            with comm.record() as inner:
                for _ in range(comm.rank("tp") + 1):
                    comm.send(torch.ones(1), "tp", dst=1 - comm.rank("tp"))
        return len(outer), len(inner)

    assert threads.run(Mesh(2, tp=2), work) == [(2, 1), (3, 2)]


def test_all_ranks_of_the_process():
    def work():
        comm.all_reduce(torch.ones(1), "tp")

    with comm.record(all_ranks=True) as calls_of_all:
        threads.run(Mesh(3, tp=3), work)
    assert len(calls_of_all) == 3


def test_another_thread_of_the_same_rank_is_recorded():
    """A backward pass on CUDA does this: the communicator was captured, and the thread has no context."""
    with comm.as_rank(Mesh(2, tp=2), 1):
        captured = comm.communicator("tp")
        with comm.record() as calls:
            thread = threading.Thread(target=lambda: comm.all_reduce(torch.ones(1), captured))
            thread.start()
            thread.join()
    assert [call.verb for call in calls] == ["all_reduce"]


def test_a_rank_that_stops_recording_does_not_disturb_the_others():
    """Recorders come and go on some ranks while others call: none of them misses a call."""

    def work():
        total = 0
        for _ in range(200):
            with comm.record() as calls:
                comm.send(torch.ones(1), "tp", dst=1 - comm.rank("tp"))
            total += len(calls)
        return total

    assert threads.run(Mesh(2, tp=2), work) == [200, 200]
