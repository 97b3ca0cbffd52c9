"""Places of ranks in the job's store, and the verdict of which rank is missing."""

from __future__ import annotations

import inspect
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm.health import failure, places, slow_waits
from neuronx_dist.comm.health.failure import HANG, FailureMonitor
from neuronx_dist.comm.health.places import Place, Places, missing
from neuronx_dist.comm.health.slow_waits import SlowWaits
from neuronx_dist.comm.health.waiting import noted
from neuronx_dist.mesh import Mesh


def line(text: str) -> str:
    module = inspect.getmodule(inspect.currentframe())
    number = next(n for n, code in enumerate(inspect.getsource(module).splitlines(), 1) if text in code)
    return f"test_places.py:{number}"


def test_a_rank_leaves_its_line_and_whether_it_waits():
    store = dist.HashStore()
    here = Places(store, 1, 3, 0.5)
    here.leave()  # not in a collective
    running = here.read()
    with noted("the copy of a file"):
        here.leave()  # in one
    waiting = here.read([1])
    assert [*running] == [*waiting] == [1] and here.read([0, 2]) == {}
    assert line("here.leave()  # not in") in running[1].text and not running[1].waits and running[1].beat == 1
    assert waiting[1].text.startswith("the copy of a file at ") and line("here.leave()  # in one") in waiting[1].text
    assert waiting[1].waits and waiting[1].beat == 2
    assert abs(running[1].written - time.time()) < 60 and 0 <= running[1].seconds < 60


def test_a_place_names_the_user_s_line_and_the_line_inside_of_a_library():
    store, done = dist.HashStore(), threading.Event()
    here = Places(store, 0, 1, 0.5)

    def leave() -> None:
        time.sleep(0.05)  # the main thread waits by then
        here.leave()
        done.set()

    thread = threading.Thread(target=leave)
    thread.start()
    done.wait(20)  # in threading.py
    thread.join()
    text = here.read()[0].text
    assert re.fullmatch(rf".*{line('# in threading.py')}, inside of .*threading\.py:\d+ \(wait\)", text), text


def test_seconds_are_counted_from_the_last_collective(monkeypatch):
    now = 5.0
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    here = Places(dist.HashStore(), 0, 1, 0.5)
    for more, wait, seconds in [(2, None, 2), (3, None, 5), (4, "a", 0), (1, "a", 1), (1, None, 0), (7, None, 7)]:
        now += more
        if wait is not None:
            monkeypatch.setattr(places, "waits", {7: (3, wait, None, SimpleNamespace(describe=lambda *words: ""))})
        else:
            monkeypatch.setattr(places, "waits", {})
        here.leave()
        assert here.read()[0].seconds == seconds


RUNS, WAITS = False, True
# before and now: (beat, waits, seconds) of each rank; the asking rank is 0, of the group [0, 1].
CASES = {
    "the member that is stopped": ([(1, WAITS, 5), (7, RUNS, 1)], [(3, WAITS, 6), (7, RUNS, 1)], 1, "stands still"),
    "stopped in a collective": ([(1, WAITS, 5), (7, WAITS, 1)], [(3, WAITS, 6), (7, WAITS, 1)], 1, "stands still"),
    "the member that runs": ([(1, WAITS, 5), (7, RUNS, 1)], [(3, WAITS, 6), (9, RUNS, 2)], 1, "has not come there"),
    "before a rank outside": (
        [(1, WAITS, 5), (7, RUNS, 1), (7, RUNS, 1)],
        [(3, WAITS, 6), (9, RUNS, 2), (7, RUNS, 1)],
        1,
        "has not come there",
    ),
    "the rank for which a member waits": (
        [(1, WAITS, 5), (7, WAITS, 1), (7, RUNS, 1), (7, RUNS, 9)],
        [(3, WAITS, 6), (9, WAITS, 2), (7, RUNS, 1), (9, RUNS, 9)],
        2,
        "stands still",
    ),
    "the one that is longest elsewhere": (
        [(1, WAITS, 5), (7, WAITS, 1), (7, RUNS, 1), (7, RUNS, 9)],
        [(3, WAITS, 6), (9, WAITS, 2), (8, RUNS, 1), (9, RUNS, 9)],
        3,
        "has not come there",
    ),
    "none: all wait": ([(1, WAITS, 5), (7, WAITS, 1)], [(3, WAITS, 6), (9, WAITS, 2)], None, ""),
    "a rank that has just come is not still": ([(1, WAITS, 5)], [(3, WAITS, 6), (1, WAITS, 0)], None, ""),
    "the asking rank runs again": ([(1, WAITS, 5), (7, WAITS, 1)], [(3, RUNS, 0), (9, WAITS, 2)], None, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_which_rank_is_missing(case: str):
    before, now, rank, words = CASES[case]

    def of(entries):
        return {r: Place(beat, time.time() - 4, waits, s, f"x.py:{r}") for r, (beat, waits, s) in enumerate(entries)}

    found = missing([0, 1], of(before), of(now), waiter=0)
    assert (found and found.rank) == rank
    if rank is not None:
        seconds = 4 if words == "stands still" else 4 + now[rank][2]
        assert found.text.startswith(f"Rank {rank} {words}") and found.text.endswith(f"x.py:{rank}"), found.text
        assert f" for {seconds:.3g} s" in found.text, found.text


def test_several_missing_members_are_one_line():
    now = {rank: Place(2, time.time(), rank == 0, 3.0, f"x.py:{rank}") for rank in range(3)}
    found = missing([0, 1, 2], {}, now, 0)
    assert found.rank == 1 and found.text.endswith("x.py:1. Ranks [2] are missing, too")


def looked(watch: SlowWaits, clock: list[float], seconds: float) -> None:
    for _ in range(int(seconds / 0.5)):
        watch.look()
        clock[0] += 0.5


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    for module in (slow_waits, places):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


def test_one_rank_reports_the_missing_one(clock, capsys):
    """Two ranks wait for the third, in two lines of the user's code."""
    store = dist.HashStore()
    everywhere = [Places(store, rank, 3, 0.5) for rank in range(3)]
    watches = [SlowWaits(rank, 5, 0, everywhere[rank]) for rank in range(2)]
    everywhere[2].leave()  # and never again
    for watch in watches:
        with noted(f"rank {watch.rank}'s exchange"):
            for _ in range(12):
                for place in everywhere[:2]:
                    place.leave()
                looked(watch, clock, 0.5)
    text = capsys.readouterr().err
    assert text.startswith("[rank 0] has been waiting for 5 s in rank 0's exchange at ") and text.count("\n") == 1
    assert "Rank 2 stands still" in text and "NEURONX_DIST_DEBUG" not in text
    assert f"its last place: {__file__}" in text and line("and never again") in text


def test_where_the_others_wait_is_said_if_no_rank_is_missing(clock, capsys):
    store = dist.HashStore()
    here, other = (Places(store, rank, 2, 0.5) for rank in range(2))
    watch = SlowWaits(0, 5, 0, here)

    def program() -> None:
        if comm.rank("tp") == 0:
            handle = comm.all_reduce(torch.ones(2), "tp", async_op=True)
            begun.set()
            handle.wait()
        else:
            assert begun.wait(20)
            while not places.waits:
                time.sleep(0.01)
            for _ in range(12):
                here.leave()
                other.leave()
                looked(watch, clock, 0.5)
            comm.all_reduce(torch.ones(2), "tp")

    begun = threading.Event()
    comm.threads.run(Mesh(2, tp=2), program)
    text = capsys.readouterr().err
    assert "Some rank of the group has not come there" in text and text.count("\n") == 1
    assert "Rank 1 waits in all_reduce of [2] float32 over tp (ranks [0, 1], seen from rank 0)" in text, text


@pytest.mark.parametrize("rank_1", ["elsewhere", "waits", "unseen"])
def test_a_wait_beyond_the_hang_timeout_ends_the_job(clock, capsys, rank_1):
    ended: list[tuple[int, str]] = []
    here = Places(dist.HashStore(), 0, 1, 0.5)
    watch = SlowWaits(3, 0, 5, here, lambda *words: ended.append(words))
    assert watch.shortest == 5
    with noted("an exchange"):
        for _ in range(10):
            if rank_1 != "elsewhere":
                here.leave()
            looked(watch, clock, 0.5)
        assert not ended
        if rank_1 != "unseen":
            here._store.set("place/1", json.dumps([1, time.time(), rank_1 == "waits", 9.0, "y.py:2"]))
        here.world_size = 2
        looked(watch, clock, 0.5)
    ((rank, text),) = ended
    if rank_1 == "elsewhere":
        assert rank == 1 and re.fullmatch(
            r"Rank 1 has not come there: for 9 s it has been at y.py:2; rank 3 has been waiting for 5 s in an exchange "
            r"at \S+.*, and the hang timeout is 5 s",
            text,
        )
    else:
        assert rank == 3 and text.startswith("rank 3 has been waiting for 5 s in an exchange at ")
        waiting = "no rank is missing: all wait"
        unseen = "rank 1 has not been seen yet: its process starts, or is stopped"
        assert text.endswith(f", and {waiting if rank_1 == 'waits' else unseen}; the hang timeout is 5 s"), text
    assert capsys.readouterr().err == ""


def test_the_hang_timeout_without_places_claims_nothing_of_other_ranks(clock):
    ended: list[tuple[int, str]] = []
    watch = SlowWaits(3, 0, 5, None, lambda *words: ended.append(words))
    with noted("an exchange"):
        looked(watch, clock, 5.5)
    ((rank, text),) = ended
    assert rank == 3 and "missing" not in text and text.endswith("; the hang timeout is 5 s")


def test_the_hang_timeout_is_that_of_the_environment(monkeypatch):
    assert SlowWaits(0).hang_timeout == 0 and SlowWaits(0).shortest == 20
    monkeypatch.setenv("NEURONX_DIST_HANG_TIMEOUT", "7")
    assert SlowWaits(0).hang_timeout == SlowWaits(0).shortest == 7 and SlowWaits(0, 0, 0).shortest == 0
    monkeypatch.setenv("NEURONX_DIST_HANG_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="NEURONX_DIST_HANG_TIMEOUT='soon' is not a number of seconds"):
        SlowWaits(0)


def test_a_failure_of_a_rank_is_not_replaced_by_a_hang(monkeypatch, tmp_path):
    ended: list[int] = []
    monkeypatch.setattr(failure, "_end_process", ended.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    store = dist.HashStore()
    monitor = FailureMonitor(store, 0, 1)
    FailureMonitor(store, 1, 1).report(ValueError("first"))
    monitor._end_hang(1, "Rank 1 stands still")
    assert not ended and not (tmp_path / "error.json").exists() and not monitor._is_ending
    assert monitor.first_failure(0.0) == (1, "ValueError: first")


class StoppedStore(dist.Store):
    """A store whose process is stopped, as soon as `stop` is set."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.stop, self.goes_on = inner, threading.Event(), threading.Event()

    def _forward(self, name, *args):
        if self.stop.is_set():
            self.goes_on.wait(60)
        return getattr(self.inner, name)(*args)

    def check(self, keys):
        return self._forward("check", keys)

    def get(self, key):
        return self._forward("get", key)

    def add(self, key, amount):
        return self._forward("add", key, amount)

    def set(self, key, value):
        return self._forward("set", key, value)

    def multi_get(self, keys):
        return self._forward("multi_get", keys)

    def has_extended_api(self):
        return True


@pytest.mark.parametrize("limit", [0, 0.8])
def test_a_store_that_does_not_answer_names_rank_0(monkeypatch, capsys, tmp_path, limit):
    ended: list[int] = []

    monkeypatch.setattr(failure, "_end_process", lambda code: (ended.append(code), monitor._stop.set()))
    monkeypatch.setenv("NEURONX_DIST_DEBUG_WAIT", "0" if limit else "0.8")
    monkeypatch.setenv("NEURONX_DIST_HANG_TIMEOUT", str(limit))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(failure, "_SHORTEST", 0.05)
    inner = dist.HashStore()
    Places(dist.PrefixStore("neuronx_dist/failure/0", inner), 0, 2, 0.5).leave()  # last place of rank 0
    store = StoppedStore(inner)
    monitor = FailureMonitor(store, 1, 2)
    monitor._interval = 0.05
    monitor.start()
    text = ""
    try:
        deadline = time.monotonic() + 30
        while monitor._host_place is None and time.monotonic() < deadline:
            time.sleep(0.02)
        store.stop.set()
        with noted("an exchange"):
            while not (ended or text) and time.monotonic() < deadline:
                time.sleep(0.02)
                text += capsys.readouterr().err
    finally:
        store.goes_on.set()
        monitor.stop()
    if limit:
        assert ended[0] == HANG and text == ""
        text = json.loads((tmp_path / "error.json").read_text())["message"]
        assert "; rank 1 waits in an exchange at " in text and text.endswith(", and the hang timeout is 0.8 s")
    else:
        assert not ended and text.startswith("[rank 1] has been waiting in an exchange at ")
    assert "Rank 0 stands still: the job's store, which is in its process, has not answered for 0." in text
    assert "its last place: " in text and line("# last place of rank 0") in text


def test_a_store_without_an_extended_api_holds_no_places(tmp_path):
    """A FileStore never forgets an entry."""
    assert FailureMonitor(dist.FileStore(str(tmp_path / "store"), 2), 0, 2)._places is None
    assert FailureMonitor(dist.HashStore(), 0, 2)._places is not None
