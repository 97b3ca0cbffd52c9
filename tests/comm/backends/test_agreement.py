"""NEURONX_DIST_DEBUG=collectives on real processes: ranks that part ways stop, and each says both call sites."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import call_agreement as debug
from neuronx_dist.comm.backends.c10d import C10dCommunicator
from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.comm.verb_cases import on_every_rank
from tests.support.pool import WorkerFailure, processes
from tests.support.reviewed import assert_reviewed, with_code_for_lines

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


def messages_of(function, *args, size=2, mesh=None):
    """Messages that each rank reported. The workers are not reused: their connections are broken after a parting."""
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
    message = messages_of(other_verb, mesh={"tensor_model_parallel_size": 2})
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
    message = messages_of(other_shape, how, mesh={"tensor_model_parallel_size": 2})
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
    message = messages_of(missing, size=4, mesh={"tensor_model_parallel_size": 2})
    assert time.monotonic() - started < 25
    assert "CommTimeout" in message
    there, here = line_of("missing: there"), line_of("missing: here")
    assert re.search(
        r"rank 1 did not reach this call within 0.5 s; its last collective was all_reduce\(max\) of "
        rf"\[4, 6\] float32 over world at \S+{THIS}:{there}\\n +rank 0: "
        rf"reduce_scatter\(sum\) of \[2, 2, 6\] float32 over tp at "
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
    message = messages_of(message_without_its_other_side, how, mesh={"pipeline_model_parallel_size": 2})
    both_sites(message, "send: one", f"send: {how}")
    if how == "shape":
        assert "send and recv do not match" in message and "of [6, 4] float32 from rank 0" in message
    else:
        assert "no recv matches this send: rank 1 did not reach this call within 0.5 s" in message
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
    ("collective", "1", "unknown value collective; use collectives"),
    ("collectives", "soon", "'soon' is not a number of seconds"),
])  # fmt: skip
def test_words_that_mean_nothing_are_refused(monkeypatch, value, seconds, match):
    monkeypatch.setenv(debug.VARIABLE, value)
    monkeypatch.setenv(debug.TIMEOUT_VARIABLE, seconds)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=match):
        debug.agreement_store()


# --- without processes: ranks are threads, which share a store


class Real:
    """The communicator that is watched: it notes what is started."""

    def __init__(self, rank: int, log: list) -> None:
        self.group, self.axis, self.ranks, self.rank = SimpleNamespace(group_name="g"), "tp", (4, 5), rank
        self.global_rank, self._monitor, self.log = self.ranks[rank], None, log

    def __getattr__(self, name: str) -> Any:
        def start(*args: Any) -> Any:
            self.log.append((name, args))
            return SimpleNamespace(wait=lambda: self.log.append(("wait", ())))

        return start


Y, Z = torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16)
STARTS = {
    "all_reduce(max) of [2, 3] float32 over tp": ("start_all_reduce", Y, "max"),
    "all_gather of [2] bfloat16 over tp": ("start_all_gather", Y, Z),
    "reduce_scatter(sum) of [2] bfloat16 over tp": ("start_reduce_scatter", Y, Z, "sum"),
    "all_to_all of [2] bfloat16 over tp": ("start_all_to_all", Y, Z),
    "permute([(0, 1)]) of [2] bfloat16 over tp": ("start_permute", Y, Z, ((0, 1),)),
    "broadcast(src=1) of [2, 3] float32 over tp": ("start_broadcast", Y, 1),
    "gather_objects over tp": ("gather_objects", "x"),
}


@pytest.fixture
def watched_pair(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    store = torch.distributed.HashStore()
    log: list[tuple[str, Any]] = []
    stores = [debug.AgreementStore(store, rank, 20.0) for rank in (4, 5)]
    return [debug.Watched(Real(index, log), store) for index, store in enumerate(stores)], stores, log


def together(*calls):
    """Each call in a thread of its own; what it gives, or the error in words with code for lines."""
    results: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            results[index] = calls[index]()
        except comm.CommError as error:
            results[index] = f"{type(error).__name__}: {with_code_for_lines(str(error), __file__)}"

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("words", STARTS)
def test_what_is_announced_and_then_started(watched_pair, words):
    pair, stores, log = watched_pair
    name, *args = STARTS[words]
    together(*(lambda communicator=communicator: getattr(communicator, name)(*args) for communicator in pair))
    assert [started for started, _ in log] == [name] * 2 and all(given == tuple(args) for _, given in log)
    operation, site = json.loads(stores[0].store.get("latest/4"))
    assert operation == words and THIS in site and json.loads(stores[1].store.get("g/0/1"))[0] == words
    for rank, step in enumerate(
        together(*(lambda communicator=communicator: getattr(communicator, name)(*args) for communicator in pair))
    ):
        assert not isinstance(step, str)
        assert not stores[0].store.check([f"g/0/{rank}"]) and stores[0].store.check(
            [f"g/1/{rank}"]
        )  # of the last alone


# What the two ranks start; what is not there does not come within 0.2 s.
PARTINGS = {
    "another verb": (
        lambda c: c.start_all_reduce(Y, "sum"),  # first
        lambda c: c.start_all_gather(Y, Z),  # second
    ),
    "nobody": (lambda c: c.start_all_reduce(Y, "sum"), lambda c: None),
    "a message of another shape": (lambda c: [c.start_send(Y, 1, 3)], lambda c: [c.start_recv(Z, 0, 3)]),
    "another tag": (lambda c: [c.start_send(Y, 1, 0)], lambda c: [c.start_recv(Y, 0, 3)]),
    "no send": (lambda c: None, lambda c: [c.start_recv(Y, 0, 0)]),
    "fitting messages": (
        lambda c: [c.start_send(Y, 1, 0), c.start_send(Z, 1, 0), c.start_recv(Z, 1, 0)],
        lambda c: [c.start_recv(Y, 0, 0), c.start_recv(Z, 0, 0), c.start_send(Z, 0, 0)],
    ),
}
LACKING = ("nobody", "another tag", "no send")


def test_partings_in_words(watched_pair):
    texts = {}
    pair, stores, log = watched_pair
    for name, calls in PARTINGS.items():
        stores[0].store = stores[1].store = torch.distributed.HashStore()
        for store in stores:
            store._counts.clear()
            store.timeout = 0.2 if name in LACKING else 20.0
        log.clear()
        started = together(
            *(
                lambda call=call, communicator=communicator: call(communicator)
                for call, communicator in zip(calls, pair)
            )
        )
        waits = [[*works] if isinstance(works, list) else [] for works in started]
        results = together(*(lambda works=works: [work.wait() for work in works] for works in waits))
        words = [one if isinstance(one, str) else other for one, other in zip(started, results)]
        left = [key for key in ("g/0-1/0/0/send", "g/0-1/0/0/recv", "g/1-0/0/0/send") if stores[0].store.check([key])]
        texts[name] = "\n".join([*map(str, words), f"{sorted(key for key, _ in log)} {left}"])
    assert_reviewed(Path(__file__).with_name("expected_agreement.txt"), texts)


def test_a_failure_of_another_rank_ends_the_wait(monkeypatch):
    failure = SimpleNamespace(rank=7, message="ValueError: lost")
    monitor: Any = SimpleNamespace(first_failure=lambda wait: failure if wait == 0.0 else 1 / 0)
    store = debug.AgreementStore(torch.distributed.HashStore(), 4, 60.0, monitor)
    with pytest.raises(comm.RemoteRankError) as error:
        store.wait_for("key", 5, lambda text: 1 / 0)
    assert str(error.value) == "rank 7 failed first: ValueError: lost" and error.value.rank == 7
    failure.rank, store.timeout = 4, 0.05  # its own
    with pytest.raises(ZeroDivisionError):
        store.wait_for("key", 5, lambda text: 1 / 0)


@pytest.mark.parametrize("words, size, gives", [
    ("", 2, False), (" , ", 2, False), ("collectives", 1, False), (" collectives ,", 2, True),
])  # fmt: skip
def test_when_there_is_a_store(monkeypatch, words, size, gives):
    monkeypatch.setenv(debug.VARIABLE, words)
    monkeypatch.delenv(debug.TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    job = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: job)
    monitor: Any = object()
    store = debug.agreement_store(monitor)
    assert (store is not None) == gives == (debug.watcher() is not None)
    if store is not None:
        assert (store.rank, store.timeout, store.monitor) == (1, 300.0, monitor)
        assert [store.count("a"), store.count("a"), store.count("b")] == [0, 1, 0]
        store.store.set("key", "x")
        assert job.get("neuronx_dist/debug/1/key") == b"x"  # and a mesh after this one has another prefix
        assert job.add("neuronx_dist/debug/connections/1", 0) == 2
