"""NEURONX_DIST_DEBUG=collectives on real processes: ranks that part ways stop, and each says both call sites."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import agreement as debug
from neuronx_dist.comm.backends.c10d import C10dCommunicator
from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.comm.test_verbs import on_every_rank
from tests.support.pool import WorkerFailure, processes

THIS = Path(__file__).name
TIMEOUT = 0.5
X = (4, 6)


def watched(function, *args, **mesh):
    """Runs `function` in this process's rank with the watch on; the ranks that raise tell their message."""
    os.environ[debug.VARIABLE], os.environ[debug.TIMEOUT_VARIABLE] = "collectives", str(TIMEOUT)
    try:
        initialize_model_parallel(**mesh)
    finally:
        del os.environ[debug.VARIABLE], os.environ[debug.TIMEOUT_VARIABLE]
    try:
        return function(*args)
    except comm.CommError as error:
        return type(error).__name__, str(error)


def told(function, *args, size=2, mesh=None):
    """What each rank was told. The workers are not used again: after a parting their connections are of no use."""
    try:
        processes(size).run(_raising, function, args, mesh or {}, initialize=False, timeout=30)
    except WorkerFailure as failure:
        return str(failure)
    raise AssertionError("nothing was noticed")


def _raising(function, args, mesh):
    found = watched(function, *args, **mesh)
    time.sleep(2 * TIMEOUT)  # the other rank is to find out by itself
    raise RuntimeError(f"rank {comm.rank('world')} was told: {found}")


def line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if f"# {text}" in line)


def both_sites(message, one, other):
    places = {f"{THIS}:{line_of(one)}", f"{THIS}:{line_of(other)}"}
    told_by = [part for part in re.split(r"--- rank \d of \d", message) if "was told" in part]
    assert len(told_by) == 2, message
    for part in told_by:
        found = set(re.findall(rf"{THIS}:\d+", part.split("RuntimeError: rank")[1]))
        assert places <= found, (places, found, part)


def other_verb():
    x = torch.ones(X)
    comm.all_reduce(x, "tp")  # both
    if comm.rank("tp") == 0:
        comm.all_gather(x, "tp")  # verb: one
    else:
        comm.all_reduce(x, "tp")  # verb: other


def test_another_verb():
    message = told(other_verb, mesh={"tensor_model_parallel_size": 2})
    both_sites(message, "verb: one", "verb: other")
    assert "the ranks disagree about collective number 1 of tp (ranks [0, 1])" in message
    assert "rank 0: all_gather of [4, 6] float32 over tp" in message
    assert "rank 1: all_reduce(sum) of [4, 6] float32 over tp" in message


def other_shape(how):
    rows = 4 if comm.rank("tp") == 0 else 5
    if how == "shape":
        comm.all_reduce(torch.ones(rows, 6), "tp")  # shape
    elif how == "dtype":
        comm.all_reduce(torch.ones(4, dtype=torch.float32 if rows == 4 else torch.float64), "tp")  # dtype
    elif how == "op":
        comm.all_reduce(torch.ones(4), "tp", op="max" if rows == 4 else "sum")  # op
    else:
        comm.broadcast(torch.ones(4), "tp", src=rows % 2)  # src


@pytest.mark.parametrize("how, texts", [
    ("shape", ["of [4, 6] float32", "of [5, 6] float32"]),
    ("dtype", ["of [4] float32", "of [4] float64"]),
    ("op", ["all_reduce(max)", "all_reduce(sum)"]),
    ("src", ["broadcast(src=0)", "broadcast(src=1)"]),
])  # fmt: skip
def test_another_shape_dtype_operation_or_source(how, texts):
    message = told(other_shape, how, mesh={"tensor_model_parallel_size": 2})
    both_sites(message, how, how)
    assert all(text in message for text in texts), message


def missing():
    x = torch.ones(X)
    comm.all_reduce(x, "tp")
    if comm.rank("tp") == 1:
        comm.all_reduce(x, "world", op="max")  # missing: there
        return
    comm.reduce_scatter(x, "tp")  # missing: here
    comm.all_reduce(x, "world", op="max")


def test_a_rank_that_misses_a_collective():
    """Rank 1 is in the next one already, over other ranks: both wait, and say for what."""
    started = time.monotonic()
    message = told(missing, size=4, mesh={"tensor_model_parallel_size": 2})
    assert time.monotonic() - started < 25
    assert "CommTimeout" in message
    there, here = line_of("missing: there"), line_of("missing: here")
    assert re.search(
        r"rank 1 did not come within 0.5 s; the last that it began: all_reduce\(max\) of \[4, 6\] float32 over world "
        rf"at \S+{THIS}:{there}\\n +rank 0: reduce_scatter\(sum\) of \[2, 2, 6\] float32 over tp at "
        rf"\S+{THIS}:{here}",
        message,
    ), message


def message_without_its_other_side(how):
    x = torch.ones(X)
    rank = comm.rank("pp")
    if rank == 0:
        comm.send(x, "pp", dst=1, tag=1)  # send: one
    elif how == "nothing":
        comm.all_reduce(x, "world")  # send: nothing
    elif how == "tag":
        comm.recv(x, "pp", src=0, tag=2)  # send: tag
    else:
        comm.recv(torch.ones(6, 4), "pp", src=0, tag=1)  # send: shape


@pytest.mark.parametrize("how", ["nothing", "tag", "shape"])
def test_a_send_without_its_receive(how):
    message = told(message_without_its_other_side, how, mesh={"pipeline_model_parallel_size": 2})
    both_sites(message, "send: one", f"send: {how}")
    if how == "shape":
        assert "send and recv do not fit each other" in message and "of [6, 4] float32 from rank 0" in message
    else:
        assert "there is no recv for this send: rank 1 did not come within 0.5 s" in message
        assert "rank 0: send(tag 1) of [4, 6] float32 to rank 1 over pp" in message


def right():
    """All verbs, values and all."""
    for axis in ("tp", "world"):
        assert type(comm.communicator(axis)) is debug.Watched
    assert type(comm.communicator("dp")) is not debug.Watched  # of one rank
    size = comm.size("world")
    for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "send"):
        assert on_every_rank(verb, size) > 0
    assert comm.gather_objects(comm.rank("world")) == list(range(size))
    group = comm.new_group([list(range(size))[::-1]], "mine")
    assert group is not None and torch.equal(comm.all_reduce(torch.ones(2), group), torch.full((2,), float(size)))
    comm.barrier()
    return "done"


def right_on_tp():
    assert watched(right, tensor_model_parallel_size=2) == "done"


def test_a_right_program_gives_the_values_that_it_gives_without():
    processes(2).run(right_on_tp, initialize=False)


def initialised_twice():
    comm.all_reduce(torch.ones(2), "world")
    destroy_model_parallel()
    return watched(lambda: comm.all_reduce(torch.ones(2), "world").tolist())


def test_what_an_earlier_mesh_posted_is_not_read_again():
    assert processes(2).run(watched, initialised_twice, initialize=False) == [[2.0, 2.0]] * 2


def off():
    assert debug.VARIABLE not in os.environ
    return type(comm.communicator("world")) is C10dCommunicator


def test_off_nothing_is_watched():
    assert processes(2).run(off) == [True, True]


@pytest.mark.parametrize("value, seconds, match", [
    ("collective", "1", "there is no collective; use collectives"),
    ("collectives", "soon", "'soon' is not a number of seconds"),
])  # fmt: skip
def test_words_that_mean_nothing_are_refused(monkeypatch, value, seconds, match):
    monkeypatch.setenv(debug.VARIABLE, value)
    monkeypatch.setenv(debug.TIMEOUT_VARIABLE, seconds)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=match):
        debug.desk()
