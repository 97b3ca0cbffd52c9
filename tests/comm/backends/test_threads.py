"""Ranks as threads: failures reach every rank, and ranks that disagree are told so."""

from __future__ import annotations

import random
import re
import threading
import time

import numpy
import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import CommDeadlock, CommError, CommTimeout, RemoteRankError
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh

TWO = Mesh(2, tp=2)


def fails(work, *, match, kind=CommError, mesh=TWO, timeout=20.0):
    with pytest.raises(kind, match=match) as error:
        threads.run(mesh, work, timeout=timeout)
    return error.value


def test_results_come_by_rank_and_each_rank_has_its_own_context():
    def work(factor):
        assert comm.is_initialized()
        return comm.current().rank * factor, comm.rank("tp"), comm.rank("pp")

    assert threads.run(Mesh(4, tp=2, pp=2), work, 10) == [(0, 0, 0), (10, 1, 0), (20, 0, 1), (30, 1, 1)]
    assert not comm.is_initialized()


@pytest.mark.parametrize(
    "mine, others, parts",
    [
        (lambda x: comm.all_reduce(x, "tp"), lambda x: comm.all_gather(x, "tp"), ["all_reduce", "all_gather"]),
        (lambda x: comm.all_reduce(x, "tp"), lambda x: comm.all_reduce(x[:1], "tp"), ["(2,)", "(1,)"]),
        (lambda x: comm.all_reduce(x, "tp"), lambda x: comm.all_reduce(x.double(), "tp"), ["float32", "float64"]),
        (lambda x: comm.all_reduce(x, "tp"), lambda x: comm.all_reduce(x, "tp", op="max"), ["'sum'", "'max'"]),
        (lambda x: comm.broadcast(x, "tp", src=0), lambda x: comm.broadcast(x, "tp", src=1), ["broadcast"]),
        (lambda x: comm.permute(x, "tp", [(0, 1)]), lambda x: comm.permute(x, "tp", [(1, 0)]), ["permute"]),
        (lambda x: comm.reduce_scatter(x, "tp"), lambda x: comm.all_to_all(x, "tp"), ["reduce_scatter", "all_to_all"]),
        (lambda x: comm.gather_objects(1, "tp"), lambda x: comm.all_reduce(x, "tp"), ["gather_objects"]),
    ],
)
def test_ranks_that_disagree_are_shown_both_sides(mine, others, parts):
    def work():
        (mine if comm.rank("tp") == 0 else others)(torch.ones(2))

    message = str(fails(work, match="the ranks disagree"))
    assert all(part in message for part in [*parts, "rank 0", "rank 1", "over tp", "test_threads.py"]), message


def test_a_message_of_another_shape_is_refused():
    def work():
        if comm.rank("tp") == 0:
            comm.send(torch.ones(3), "tp", dst=1)
        else:
            comm.recv(torch.ones(2), "tp", src=0)

    fails(work, match=r"recv over tp.*rank 0 sent \(\(3,\).*expected \(\(2,\)")


def test_the_first_failure_is_raised_as_it_was_and_ends_all_ranks():
    messages = []

    def work():
        if comm.current().rank == 2:
            raise KeyError("lost")
        try:
            comm.all_reduce(torch.ones(2), "world")
        except RemoteRankError as error:
            messages.append((error.rank, "KeyError: 'lost'" in str(error), "all_reduce over world" in str(error)))
            raise

    start = time.monotonic()
    error = fails(work, match="lost", kind=KeyError, mesh=Mesh(4))
    assert time.monotonic() - start < 5
    assert messages == [(2, True, True)] * 3
    assert "raised on rank 2" in error.__notes__[0] if hasattr(error, "__notes__") else True


@pytest.mark.parametrize("order", ["round-robin", 0, 1])
def test_ranks_that_all_wait_are_an_error_at_once_with_the_line_of_each(order):
    def work():
        if comm.rank("tp") == 0:
            comm.all_gather(torch.ones(2), "tp")
        elif comm.rank("tp") == 1:
            comm.recv(torch.ones(3), "tp", src=2)

    start = time.monotonic()
    with pytest.raises(CommDeadlock) as error:
        threads.run(Mesh(3, tp=3), work, order=order)
    assert time.monotonic() - start < 30  # the time-out is 60 s
    lines = str(error.value).splitlines()[1:]
    assert re.search(r"rank 0 waits in all_gather of \[2\] float32 over tp .*test_threads.py:\d+", lines[0]), lines
    assert re.search(r"rank 1 waits in recv of \[3\] float32 over tp .*test_threads.py:\d+", lines[1]), lines
    assert lines[2] == "  rank 2 has ended"


def test_a_rank_that_computes_for_too_long_is_a_timeout_on_the_others():
    def work():
        comm.barrier()
        if comm.rank("tp") == 0:
            time.sleep(1.0)
        comm.barrier()

    fails(work, match="rank 0 has neither ended nor waited for others within 0.2 s", kind=CommTimeout, timeout=0.2)


def test_orders_that_are_refused():
    with pytest.raises(ValueError, match="order='sideways': it is \"round-robin\", or an integer"):
        threads.run(TWO, lambda: None, order="sideways")


def test_ranks_draw_as_processes_do_whatever_the_order():
    """Draws of torch, Python and numpy, with waits between them: on each rank as if it ran alone."""

    def draw(number):
        return torch.rand(number + 1).tolist(), random.random(), numpy.random.normal()

    def alone(rank):
        torch.manual_seed(0 if rank < 2 else rank)
        random.seed(rank)
        numpy.random.seed(rank)
        return [draw(number) for number in range(4)]

    def together():
        rank = comm.rank("world")
        torch.manual_seed(0 if rank < 2 else rank)
        random.seed(rank)
        numpy.random.seed(rank)
        found = []
        for number in range(4):
            comm.barrier()
            found.append(draw(number))
        return found

    expected = [alone(rank) for rank in range(3)]
    for order in ("round-robin", 0, 1, 2):
        assert threads.run(Mesh(3), together, order=order) == expected


def test_all_ranks_begin_with_the_random_state_of_the_caller_which_goes_on_with_that_of_rank_0():
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    for drawn in threads.run(TWO, lambda: torch.rand(2)):
        assert torch.equal(drawn, expected[0])
    assert torch.equal(torch.rand(2), expected[1])


def test_one_rank_runs_at_a_time_and_seeds_give_other_orders():
    def trace(order):
        inside, places = [], []

        def work():
            for step in range(4):
                inside.append(comm.rank("world"))
                places.append((comm.rank("world"), step))
                time.sleep(0)
                assert inside.pop() == comm.rank("world") and not inside
                comm.barrier()

        threads.run(Mesh(4), work, order=order)
        return places

    assert trace("round-robin") == trace("round-robin")
    traces = [trace(seed) for seed in range(8)]
    assert traces == [trace(seed) for seed in range(8)]
    assert len({tuple(trace) for trace in traces}) > 4


def test_a_random_order_finds_a_race_that_the_usual_order_hides():
    """Rank 0 writes, sends a message and writes again; rank 1 reads where it may see either."""

    def work():
        if comm.rank("tp") == 0:
            shared.append(1)
            comm.send(torch.ones(1), "tp", dst=1)
            shared.append(2)
            return None
        comm.recv(torch.ones(1), "tp", src=0)
        return len(shared)

    seen = set()
    for order in ("round-robin", *range(20)):
        shared = []
        seen.add((order == "round-robin", threads.run(TWO, work, order=order)[1]))
    assert {count for usual, count in seen if usual} == {2}
    assert {count for usual, count in seen if not usual} == {1, 2}


def test_no_thread_is_left_behind():
    before = threading.active_count()
    fails(lambda: comm.all_reduce(torch.ones(comm.rank("tp") + 1), "tp"), match="disagree")
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_sums_are_in_rank_order_and_the_same_on_every_rank():
    def work():
        generator = torch.Generator().manual_seed(comm.rank("tp"))
        return comm.all_reduce(torch.randn(1000, generator=generator), "tp")

    first, second = threads.run(Mesh(4, tp=4), work), threads.run(Mesh(4, tp=4), work)
    for found in (*first, *second):
        assert torch.equal(found, first[0])


def test_what_was_sent_may_be_overwritten_at_once():
    def work():
        rank, x = comm.rank("tp"), torch.full((2,), 1.0 + comm.rank("tp"))
        if rank == 0:
            comm.send(x, "tp", dst=1)
            x.zero_()
            comm.barrier("tp")  # rank 1 looks only now
            return None
        comm.barrier("tp")
        return comm.recv(torch.empty(2), "tp", src=0).tolist()

    assert threads.run(TWO, work) == [None, [1.0, 1.0]]


def test_groups_of_one_label_over_the_same_ranks_are_two():
    def work():
        one, other = (comm.new_group([[0, 1]], "pair") for _ in range(2))
        first = torch.tensor([1.0 + comm.rank("tp")])
        if comm.rank("tp") == 0:  # in the order of the program, and in another: they do not meet each other
            a, b = (comm.all_reduce(x, group, async_op=True) for x, group in ((first, one), (10 * first, other)))
        else:
            b, a = (comm.all_reduce(x, group, async_op=True) for x, group in ((10 * first, other), (first, one)))
        return a.wait().item(), b.wait().item()

    assert threads.run(TWO, work, timeout=5.0) == [(3.0, 30.0)] * 2


def test_a_context_of_ones_own():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        comm.communicator("tp")
    with comm.as_rank(Mesh(4, tp=2), 3) as context:
        assert context is comm.current() and comm.rank("tp") == 1 and comm.size(("dp", "cp")) == 2
        with comm.as_rank(Mesh(2, tp=2), 0):
            assert comm.rank("tp") == 0
        assert comm.rank("tp") == 1
        assert comm.communicator("tp") is comm.communicator("tp")
        assert repr(comm.communicator("tp")) == "ShapesCommunicator(axis='tp', ranks=[2, 3], rank=1)"
    assert not comm.is_initialized()
    with pytest.raises(ValueError, match="rank 4"), comm.as_rank(Mesh(4), 4):
        pass


def test_an_error_that_follows_from_a_deadlock_is_the_one_that_is_raised():
    def work():
        try:
            if comm.rank("tp"):
                comm.barrier()
        except CommDeadlock as error:
            raise KeyError("mine") from error

    assert isinstance(fails(work, match="mine", kind=KeyError).__cause__, CommDeadlock)
