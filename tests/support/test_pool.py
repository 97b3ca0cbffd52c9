"""The pool of worker processes that other tests use: results by rank, and failures that are shown and survived."""

from __future__ import annotations

import os
import time

import pytest
import torch

from neuronx_dist import comm
from tests.support.pool import WorkerFailure, processes


def where(scale):
    return comm.current().rank, comm.rank("tp"), comm.rank("pp"), torch.full((2,), scale * comm.rank("dp"))


def test_results_come_by_rank():
    found = processes(4).run(where, 5.0, mesh=dict(tp=2))
    assert [place[:3] for place in found] == [(0, 0, 0), (1, 1, 0), (2, 0, 0), (3, 1, 0)]
    assert torch.equal(found[3][3], torch.full((2,), 5.0))
    assert [place[:3] for place in processes(2).run(where, 1.0, mesh=dict(pp=2))] == [(0, 0, 0), (1, 0, 1)]


def failing(rank):
    comm.barrier()
    if comm.rank("world") == rank:
        raise LookupError("no such thing")
    comm.barrier()


def dying():
    if comm.rank("world") == 1:
        os._exit(7)
    comm.barrier()


def stuck():
    time.sleep(30)


def size():
    return comm.size("world")


def test_failures_are_shown_and_the_workers_replaced():
    with pytest.raises(WorkerFailure, match="LookupError: no such thing") as error:
        processes(2).run(failing, 1)
    assert error.value.rank == 1 and error.value.kind == "LookupError"
    with pytest.raises(WorkerFailure, match="ended with exit code 7"):
        processes(2).run(dying)
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"no answer within 2 s from ranks \[0, 1\]") as error:
        processes(2).run(stuck, timeout=2.0)
    assert "in stuck" in str(error.value) and time.monotonic() - start < 10
    assert processes(2).run(size) == [2, 2]
    with pytest.raises(ValueError, match="1 to 4"):
        processes(5)
