"""`comm.exchange`: every pair of ranks, sizes of their own, on each backend; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import Call, CommError
from neuronx_dist.comm.backends import threads, xla
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from tests.comm.backends.test_agreement import messages_of, watched
from tests.support.pool import processes

DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def size_between(src: int, dst: int) -> int:
    """0, 2, 4 or 6 elements."""
    return 2 * ((src + 2 * dst) % 4)


def message(src: int, dst: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = size_between(src, dst)
    return (torch.arange(count) % 3 + 10 * src + dst).reshape(2, count // 2).to(dtype)


def every_pair(size: int) -> int:
    rank, done = comm.rank("world"), 0
    for dtype in DTYPES:
        expected = [message(src, rank, dtype) for src in range(size)]
        for transposed in (False, True):
            sends = [message(rank, dst, dtype) for dst in range(size)]
            if transposed:
                sends = [x.t().contiguous().t() for x in sends]
            before, versions = [x.clone() for x in sends], [x._version for x in sends]
            for async_op in (False, True):
                recvs = [torch.ones_like(x) for x in expected]
                result = comm.exchange(sends, recvs, "world", async_op=async_op)
                if async_op:
                    result = result.wait()
                assert all(x is y for x, y in zip(result, recvs))
                assert all(map(torch.equal, recvs, expected)), (dtype, recvs, expected)
                assert all(map(torch.equal, sends, before)) and [x._version for x in sends] == versions
                done += 1
    nothing = [torch.empty(0)] * size
    comm.exchange(nothing, nothing, "world")
    return done


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_on_threads(size: int) -> None:
    assert threads.run(Mesh(size), every_pair, size) == [4 * len(DTYPES)] * size


@pytest.mark.parametrize("size", [2, 4])
def test_values_on_processes(size: int) -> None:
    assert processes(size).run(every_pair, size) == [4 * len(DTYPES)] * size


def large(size: int) -> None:
    """Longer than what sockets buffer, in two exchanges under way at once."""
    rank, count = comm.rank("world"), 1 << 20
    sends = [torch.full((count,), float(10 * rank + dst)) for dst in range(size)]
    handles = [comm.exchange(sends, [torch.empty(count) for _ in sends], "world", async_op=True) for _ in range(2)]
    for handle in handles:
        assert all((x == 10 * src + rank).all() for src, x in enumerate(handle.wait()))


def test_large_messages() -> None:
    processes(2).run(large, 2)


def recorded() -> list[Call]:
    rank, size = comm.rank("tp"), comm.size("tp")
    with comm.record() as calls:
        comm.exchange([message(rank, dst) for dst in range(size)], [message(src, rank) for src in range(size)], "tp")
    return calls


def test_a_record_has_what_goes_to_other_ranks_or_comes_from_them() -> None:
    for rank, calls in enumerate(threads.run(Mesh(3, tp=3), recorded)):
        others = [other for other in range(3) if other != rank]
        sent = sum(size_between(rank, other) for other in others)
        received = sum(size_between(other, rank) for other in others)
        count = max(sent, received)
        messages = sum(size_between(rank, other) > 0 for other in others)
        assert calls == [Call("exchange", "tp", None, (count,), torch.float64, 8 * count, 3, messages)]
    with comm.as_rank(Mesh(3, tp=3), 1):
        assert recorded()[0].bytes == 8 * (2 + 2)  # to ranks 0 and 2; 4 come from rank 0
    assert threads.run(Mesh(1), recorded) == [[]]


def test_the_shapes_backend_gives_zeros() -> None:
    with comm.as_rank(Mesh(2, tp=2), 1):
        recvs = [torch.ones(3), torch.ones(2)]
        comm.exchange([torch.ones(1), torch.full((2,), 5.0)], recvs, "tp")
        assert recvs[0].tolist() == [0, 0, 0] and recvs[1].tolist() == [5, 5]


def test_one_empty_tensor_may_stand_for_many_ranks() -> None:
    def rank() -> list[list[float]]:
        index, nothing = comm.rank("tp"), torch.empty(0, 3)
        sends, recvs = [nothing] * 5, [nothing] * 5
        sends[(index + 1) % 5] = torch.full((1, 3), float(index))
        recvs[(index - 1) % 5] = torch.empty(1, 3)
        return [x.flatten().tolist() for x in comm.exchange(sends, recvs, "tp")]

    for index, received in enumerate(threads.run(Mesh(5, tp=5), rank)):
        before = (index - 1) % 5
        assert received == [[float(before)] * 3 if other == before else [] for other in range(5)]


X = torch.zeros(2)
REFUSED = {
    "entries": ([X], [X, X], "1 tensors to send and 2 to receive, but 2 ranks"),
    "dtype": ([X, X.double()], [X, X], r"sends\[1\] is torch.float64 on cpu, but sends\[0\] is torch.float32"),
    "contiguous": ([X, X], [X, torch.zeros(2, 2)[:, 0]], r"recvs\[1\] must be contiguous, got strides \(2,\)"),
    "own": ([X, X], [X[:1], X], r"sends\[0\] has 2 elements, but recvs\[0\] has 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    sends, recvs, match = REFUSED[what]
    with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(ValueError, match=match):
        comm.exchange(sends, recvs, "tp")


def unequal() -> None:
    rank = comm.rank("tp")
    sizes = [2, 3] if rank == 0 else [2, 2]  # rank 0 sends 3 to rank 1, which expects 2
    comm.exchange([torch.zeros(n) for n in sizes], [torch.zeros(2), torch.zeros(2)], "tp")


def test_threads_that_expect_other_sizes_all_raise_alike() -> None:
    messages = []

    def caught() -> None:
        with pytest.raises(CommError, match="rank 0 sends 3 elements to rank 1, which expects 2") as error:
            unequal()
        messages.append(str(error.value).partition("disagree")[2])

    threads.run(Mesh(2, tp=2), caught)
    assert len(set(messages)) == 1 and len(messages) == 2


def unequal_on_processes() -> None:
    if comm.rank("tp") == 0:
        comm.exchange([X[:0], torch.zeros(3)], [X[:0], X], "tp")
    else:
        comm.exchange([X, X[:0]], [X, X[:0]], "tp")


def test_debugging_names_both_sides() -> None:
    message = messages_of(unequal_on_processes, mesh={"tensor_model_parallel_size": 2})
    assert "send and recv do not match" in message and "of [3] float32" in message, message


def test_debugging_leaves_values_alone() -> None:
    processes(2).run(_watched, initialize=False)


def _watched() -> None:
    assert watched(lambda: every_pair(2), tensor_model_parallel_size=2) == 4 * len(DTYPES)


def test_a_check_has_an_event_with_the_sizes() -> None:
    backend = CheckBackend()
    with comm.as_rank(Mesh(2, tp=2), 0, backend):
        comm.exchange([X[:0], X], [X[:0], torch.zeros(3)], "tp")
    (event,) = backend.events
    assert (event.verb, event.dtype, event.sizes, event.awaited) == ("exchange", torch.float32, ((0, 2), (0, 3)), 2)


# --- XLA --------------------------------------------------------------------------------------------------------------


def permuted(monkeypatch: pytest.MonkeyPatch, rank: int, sent: list[int], received: list[int]) -> list[Any]:
    """Collective-permutes of an exchange among three XLA ranks: elements and pairs of each."""
    calls: list[Any] = []
    with comm.as_rank(Mesh(3, tp=3), rank, xla.XlaBackend()):
        communicator = comm.communicator("tp")

        def start_permute(out: torch.Tensor, x: torch.Tensor, pairs: Any) -> Any:
            assert out.shape == x.shape
            calls.append((x.numel(), pairs))
            return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(communicator, "start_permute", start_permute)
        comm.exchange([torch.zeros(n) for n in sent], [torch.zeros(n) for n in received], "tp")
    return calls


UP, DOWN = [(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]


def test_on_xla_equal_shards_are_the_same_permutes_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, sizes in enumerate([[0, 4, 0], [4, 0, 4], [0, 4, 0]]):  # halos of one width, none around the ends
        assert permuted(monkeypatch, rank, sizes, sizes) == [(4, UP), (4, DOWN)]


def test_on_xla_shards_that_are_not_equal_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CommError, match="sends 4 elements to the rank 1 above, and receives 3.*redistribute the tensor to shards"
    ):
        permuted(monkeypatch, 1, [0, 0, 4], [3, 0, 0])
