"""The failure watch and the word about long waits, without processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm.health import failure, slow_waits, waiting
from neuronx_dist.comm.health.failure import FailureMonitor
from neuronx_dist.comm.health.slow_waits import SlowWaits
from neuronx_dist.comm.health.waiting import in_words, noted, waits
from neuronx_dist.mesh import Mesh

pytestmark = pytest.mark.slow


def test_the_watch_ends_before_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nobody stops it: a thread in C++ that comes back later aborts the process."""
    at_exit: list[Any] = []
    monkeypatch.setattr(failure.atexit, "register", at_exit.append)
    monitor = FailureMonitor(CountingStore(), 0, 1)
    monitor.start()
    watch = next(t for t in threading.enumerate() if t.name == "neuronx_dist-failure-monitor" and t.is_alive())
    for function in at_exit:
        function()
    assert not watch.is_alive()
    monitor.stop()


def test_a_call_of_the_store_that_takes_long_is_awaited() -> None:
    """On a busy machine: the thread in the call aborts the process if Python has ended before it returns."""
    asked = threading.Event()

    class SlowStore(CountingStore):
        def check(self, keys: Any) -> bool:
            asked.set()
            time.sleep(1.5)
            return False

    store = SlowStore()  # a PrefixStore has no reference to the object in Python
    monitor = FailureMonitor(store, 0, 1)
    monitor.start()
    watch = next(t for t in threading.enumerate() if t.name == "neuronx_dist-failure-monitor" and t.is_alive())
    assert asked.wait(10.0)
    monitor.stop()
    assert not watch.is_alive()


class CountingStore(dist.Store):
    """Counts what a rank asks the job's store."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.times: list[float] = []

    def check(self, keys: Any) -> bool:
        self.times.append(time.monotonic())
        return self.inner.check(keys)

    def get(self, key: Any) -> bytes:
        return self.inner.get(key)

    def add(self, key: Any, amount: int) -> int:
        self.times.append(time.monotonic())
        return self.inner.add(key, amount)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return self.inner.compare_set(key, expected, desired)


@pytest.mark.parametrize("world_size, seconds", [(2, 0.5), (100, 0.5), (400, 2.0), (1600, 8.0), (10_000, 8.0)])
def test_the_interval_grows_with_the_world_and_stays_below_10_seconds(world_size, seconds):
    assert failure.interval(world_size) == seconds
    assert world_size / seconds <= max(200, world_size / 8)


def watched(world_size: int, ranks: list[int], seconds: float) -> list[float]:
    """Times at which these ranks ask the store, in seconds after they began to watch."""
    store, begin = CountingStore(), time.monotonic()
    monitors = [FailureMonitor(store, rank, world_size) for rank in ranks]
    for monitor in monitors:
        monitor.start()
    time.sleep(seconds)
    for monitor in monitors:
        monitor.stop()
    return [at - begin for at in store.times]


@pytest.mark.slow
def test_what_ranks_ask_the_store():
    """About 1 in 8 of 10,000 ranks asks in each second, and they do not ask at the same time."""
    assert 2 <= len(watched(2, [0], 2.0)) <= 4
    ranks = [*range(0, 10_000, 250)]  # 40 of them: 5 a second
    times = watched(10_000, ranks, 2.2)
    assert 5 <= len(times) <= 15, times
    assert len([at for at in times if at < 1.0]) <= 8


def test_ranks_that_end_ask_the_store_less_often_in_large_jobs(monkeypatch):
    """Ranks wait for the others to read the message: all ranks do, since the first failure ends them all."""
    clock = [0.0]
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(failure.time, "monotonic", lambda: clock[0])
    for world_size in (2, 10_000):
        store, begin = CountingStore(), clock[0]
        FailureMonitor(store, 3, world_size).report(comm.RemoteRankError("rank 0 failed first", rank=0))
        waited = clock[0] - begin
        assert failure.interval(world_size) <= waited <= 12
        assert len(store.times) <= 2 + 10 * waited / failure.interval(world_size)


@pytest.mark.parametrize("there", [[0], [0, 1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 4], [2, 3]])
def test_who_is_lost_is_found_by_who_is_there(there: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of five ranks are silent; two of the others ask."""
    monkeypatch.setattr(failure, "_ACKNOWLEDGE", 0.3)
    store = dist.HashStore()
    monitors = [FailureMonitor(store, rank, 5) for rank in there]
    for monitor in monitors[2:]:
        monitor.start()
    for monitor in monitors[:2]:
        monitor._interval = 0.5
    try:
        answers = pool(len(monitors[:2]), lambda i: monitors[i].find_lost())
    finally:
        for monitor in monitors[2:]:
            monitor.stop()
    lost = [rank for rank in range(5) if rank not in there]
    for answer in answers:
        assert answer.rank == lost[0] and answer.message.startswith("lost without a message")
        assert answer.message.endswith(f" (and {len(lost) - 1} more)") == (len(lost) > 1)


def pool(number: int, function: Any) -> list[Any]:
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(function, range(number)))


def test_a_rank_that_tells_its_failure_is_not_taken_for_lost() -> None:
    """Others notice that it closes its connections before it has come to its last words."""
    store = dist.HashStore()
    asks, fails = FailureMonitor(store, 0, 2), FailureMonitor(store, 1, 2)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asks.find_lost)
        while not store.check(["neuronx_dist/failure/0/first"]):
            time.sleep(0.01)
        fails.report(ValueError("the parrot is dead"))
        assert answer.result() == (1, "ValueError: the parrot is dead")


def test_nobody_is_lost() -> None:
    store = dist.HashStore()
    monitors = [FailureMonitor(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(FailureMonitor.find_lost, monitors)] == [None, None]


@pytest.mark.slow
def test_a_message_is_shown_at_any_size(capsys):
    """Rank 625 of 10,000 has its first look after half a second."""
    store = dist.HashStore()
    monitor = FailureMonitor(store, 625, 10_000)
    monitor.start()
    try:
        FailureMonitor(store, 3, 1).report(ValueError("the parrot is dead"))
        deadline = time.monotonic() + 8 + 2
        while not (text := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert text == "[rank 625] rank 3 failed first: ValueError: the parrot is dead\n"
    finally:
        monitor.stop()


def test_the_first_failure_stays_the_first():
    store = dist.HashStore()
    FailureMonitor(store, 1, 1).report(ValueError("first"))
    FailureMonitor(store, 0, 1).report(KeyError("second"))
    assert FailureMonitor(store, 2, 4).first_failure(0.0) == (1, "ValueError: first")


def test_a_consequence_is_not_reported_as_a_failure():
    store = dist.HashStore()
    FailureMonitor(store, 1, 1).report(comm.RemoteRankError("rank 0 failed first", rank=0))
    assert FailureMonitor(store, 2, 4).first_failure(0.0) is None


def test_a_long_wait_is_told_once_with_what_it_waits_for(capsys):
    watch, begun = SlowWaits(7, 0.05), threading.Event()

    def look(seconds: float) -> str:
        """Text reported within `seconds`; returned as soon as there is some."""
        deadline = time.monotonic() + seconds
        while not (text := capsys.readouterr().err) and time.monotonic() < deadline:
            watch.look()
            time.sleep(0.01)
        return text

    def program() -> tuple[str, str] | None:
        x = torch.ones(2, 3, dtype=torch.float64)
        if comm.rank("tp") == 0:
            handle = comm.all_reduce(x, "tp", async_op=True)
            begun.set()
            handle.wait()  # here it waits
            return None
        assert begun.wait(20)
        texts = look(20), look(0.2)
        comm.all_reduce(x, "tp")
        return texts

    _, (first, then) = comm.threads.run(Mesh(2, tp=2), program)
    line = next(n for n, code in enumerate(Path(__file__).read_text().splitlines(), 1) if "# here it waits" in code)
    assert first.startswith("[rank 7] has been waiting for 0.0") and first.count("\n") == 1
    assert "s in all_reduce of [2, 3] float64 over tp (ranks [0, 1], seen from rank 0) at " in first
    assert f"test_watch.py:{line}. Some rank" in first and "NEURONX_DIST_DEBUG=collectives" in first, first
    assert then == "" and not waits


def test_a_wait_that_follows_another_begins_anew(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(slow_waits, "time", SimpleNamespace(monotonic=lambda: now))
    watch = SlowWaits(0, 5)
    for _ in range(4):
        with noted("something else"):
            watch.look()
            now += 3
            watch.look()
    with noted("creating the group tp"):
        watch.look()
        now += 6
        watch.look()
    text = capsys.readouterr().err
    assert "something else" not in text and "in creating the group tp at " in text


def test_nothing_is_told_with_0_and_no_number_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("NEURONX_DIST_DEBUG_WAIT", "0")
    watch = SlowWaits(0)
    with noted("anything"):
        watch.look()
        watch.look()
    assert capsys.readouterr().err == ""
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("NEURONX_DIST_DEBUG_WAIT", text)
        with pytest.raises(ValueError, match=f"NEURONX_DIST_DEBUG_WAIT='{text}' is not a number of seconds"):
            SlowWaits(0)
    monkeypatch.delenv("NEURONX_DIST_DEBUG_WAIT")
    assert SlowWaits(0).seconds == 20


def test_operands_in_words():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert in_words("all_reduce", x, "sum") == "all_reduce(sum) of [2, 3] bfloat16"
    assert in_words("all_gather", [x, x]) == "all_gather of 2 tensors bfloat16"
    assert in_words("all_gather", []) == "all_gather of 0 tensors None"
    assert in_words("barrier", None) == "barrier"


def test_a_failed_rank_is_counted_once_and_waits_for_all(monkeypatch):
    """Until as many ranks as there are have read its message, and no longer."""
    clock = [0.0]
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(failure.time, "monotonic", lambda: clock[0])
    store = dist.HashStore()
    one, other = (FailureMonitor(store, rank, 2, 3) for rank in range(2))
    one.report(ValueError("lost"))
    assert clock[0] == pytest.approx(0.5 + 2.5, abs=0.1)
    assert store.get("neuronx_dist/failure/3/first") == b'{"rank": 0, "message": "ValueError: lost"}'
    one.report(ValueError("again"))
    assert store.add("neuronx_dist/failure/3/acknowledged", 0) == 1
    begin = clock[0]
    other.report(KeyError("later"))
    assert clock[0] == begin and store.add("neuronx_dist/failure/3/acknowledged", 0) == 2
    assert other.first_failure(0.0) == (0, "ValueError: lost") == FailureMonitor(store, 0, 2, 3).first_failure(0.0)
    begin = clock[0]
    assert FailureMonitor(store, 0, 2, 4).first_failure(1.0) is None and clock[0] - begin == pytest.approx(1.0, abs=0.1)


class GoneStore(CountingStore):
    """The host of the store has ended."""

    def check(self, keys):
        raise RuntimeError("gone")

    add = compare_set = get = check


def test_a_store_that_is_gone_is_nobody_to_tell():
    begin = time.monotonic()
    monitor = FailureMonitor(GoneStore(), 0, 2)
    monitor.report(ValueError("lost"))
    monitor.report(comm.RemoteRankError("rank 1 failed first", rank=1))
    assert monitor.first_failure(0.0) is None and time.monotonic() - begin < 2


def test_an_uncaught_exception_is_shown_and_told(monkeypatch):
    shown: list[Any] = []
    before = lambda *args: shown.append(args)  # noqa: E731
    monkeypatch.setattr(failure.sys, "excepthook", before)
    store = dist.HashStore()
    monitor = FailureMonitor(store, 0, 1)
    monitor.start()
    try:
        assert failure.sys.excepthook == monitor._excepthook
        error = ValueError("lost")
        failure.sys.excepthook(ValueError, error, None)
        assert shown == [(ValueError, error, None)]
        assert FailureMonitor(store, 1, 1).first_failure(0.0) == (0, "ValueError: lost")
    finally:
        monitor.stop()
    assert failure.sys.excepthook is before
    monkeypatch.setattr(failure.sys, "excepthook", other := print)
    monitor.stop()
    assert failure.sys.excepthook is other  # of somebody who came later


def test_a_rank_that_does_not_end_by_itself_is_ended(monkeypatch, capsys):
    ended: list[int] = []
    monkeypatch.setattr(failure, "_GRACE", 0.0)
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    store = dist.HashStore()
    monitor = FailureMonitor(store, 1, 2)
    monitor._interval = 0.02
    store.set("neuronx_dist/failure/0/first", '{"rank": 0, "message": "ValueError: lost"}')
    monitor.start()
    try:
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        monitor.stop()
    assert ended[0] == 1 and store.add("neuronx_dist/failure/0/acknowledged", 0) == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "[rank 1] rank 0 failed first: ValueError: lost"
    assert second == "[rank 1] this rank did not exit within 0.02 s and is terminated now"


def test_what_is_said_of_a_long_wait(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(slow_waits, "time", SimpleNamespace(monotonic=lambda: now))
    watch = SlowWaits(3, 5)
    with noted("creating the group tp"):
        watch.look()
        now += 4.999
        watch.look()
        assert capsys.readouterr().err == ""
        now += 0.001
        watch.look()
        watch.look()
    line = capsys.readouterr().err
    assert line.startswith("[rank 3] has been waiting for 5 s in creating the group tp at ")
    assert line.endswith(
        ". Some rank of the group has not come there: it is slow, or it has called another collective. All "
        "ranks of the group make this call, so that it cannot be inside of an `if rank == 0:`. With "
        "NEURONX_DIST_DEBUG=collectives in the environment of all ranks an error names the other side\n"
    )
    assert waiting.operand_of(torch.ones(2)) == ((2,), torch.float32) and waiting.operand_of([]) == (0, None)
    assert [slow_waits.seconds_of("NEURONX_DIST_NOTHING", 3.5), SlowWaits(0, 0).seconds] == [3.5, 0]
