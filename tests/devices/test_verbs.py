"""Every verb on imitated groups, whole and with methods taken away, gives what it gives everywhere."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from tests.comm.test_exchange import DTYPES, every_pair
from tests.comm.verb_cases import CASES, on_every_rank
from tests.support.pool import processes

pytestmark = pytest.mark.process

VERBS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"]
WITHOUT = {
    "allreduce": ["all_reduce"],
    "_reduce_scatter_base": ["reduce_scatter"],
    "alltoall_base": ["all_to_all"],
    "broadcast": ["broadcast", "permute"],
    "allgather": [],  # objects
    "_allgather_base": ["all_gather"],
    "allreduce _reduce_scatter_base alltoall_base broadcast allgather": ["all_reduce", "reduce_scatter", "broadcast"],
}


def verbs(names: list[str], size: int) -> list[int]:
    """Runs the cases of the verbs on this rank, then exchanges and objects; returns how many each checked."""
    counts = [on_every_rank(verb, size) for verb in names]
    assert comm.gather_objects(("of", comm.rank("world")), "world") == [("of", rank) for rank in range(size)]
    assert comm.broadcast_object("b" * comm.rank("world"), src=size - 1) == "b" * (size - 1)
    comm.barrier()
    return [*counts, every_pair(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["neuron", "neuron_single", "tpu_dist"])
def test_values(backend: str, size: int) -> None:
    names = VERBS if size == 2 else ["permute"]
    assert processes(size).run(verbs, names, size, backend=backend) == [[CASES] * len(names) + [4 * len(DTYPES)]] * size


@pytest.mark.parametrize("missing, affected", WITHOUT.items())
def test_values_without(missing: str, affected: list[str]) -> None:
    results = processes(2).run(verbs, affected, 2, backend=f"neuron without {missing}")
    assert results == [[CASES] * len(affected) + [4 * len(DTYPES)]] * 2


# --- messages ---------------------------------------------------------------------------------------------------------


def ring_of_messages() -> str:
    with pytest.raises(comm.CommError) as caught:
        comm.send(torch.ones(2), "world", dst=1 - comm.rank("world"))
    pair = comm.new_group([[0, 1]], "pair")
    assert pair is not None
    other = 1 - pair.rank
    out = torch.empty(3)
    for step in range(3):  # both ways at once, the receive posted first on one side
        x, handles = torch.full((3,), float(10 * step + pair.rank)), []
        if pair.rank:
            handles.append(comm.recv(out, pair, src=other, async_op=True))
        handles.append(comm.send(x, pair, dst=other, async_op=True))
        if not pair.rank:
            handles.append(comm.recv(out, pair, src=other, async_op=True))
        for handle in handles:
            handle.wait()
        assert torch.equal(out, torch.full((3,), float(10 * step + other)))
    return str(caught.value)


@pytest.mark.parametrize("backend", ["neuron", "tpu_dist"])
def test_messages_need_a_group_of_two_ranks(backend: str) -> None:
    for text in processes(2).run(ring_of_messages, backend=backend):
        assert f"backend {backend} has no send: messages between two ranks need point-to-point calls" in text
        assert "comm.permute" in text and "lost" not in text
