"""Watch for failures: a rank that fails ends the job on all ranks, and each shows the first failure and its rank.

The first rank with an uncaught exception writes it to the job's store and waits a moment until the others have read it;
a watching thread on every rank reads the store twice a second, and in jobs of more than 100 ranks less often
(`interval`). A rank that is in a collective at that time gets the message as a `RemoteRankError`; every rank prints it,
and one that is stuck, or computes for long, is ended after a grace period. Of equal errors on all ranks one traceback
is printed; of Ctrl-C, one line.

A rank whose script ends by itself writes the reason into the store: `sys.exit` is replaced by a function that notes its
line. For the launcher a rank writes its error, or its `sys.exit`, into torchrun's error file.

The same thread leaves this rank's place in the store (`places.py`), prints which rank is missing where this rank waits
long for others (`slow_waits.py`), and ends the job after the hang timeout. The store is in one process, most often
rank 0: if this process stands still, so does the watching thread of every rank, and a second thread says so.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from ...call_site import USER, call_site, owner_of
from ..errors import RemoteRankError
from . import gloo_aborts
from .places import Place, Places, descriptions
from .slow_waits import SlowWaits

__all__ = ["HANG", "Failure", "FailureMonitor", "interval"]

HANG = 124  # exit code of ranks whose job hangs, as of timeout(1)

_SHORTEST, _LONGEST = 0.5, 8.0  # seconds between looks at the store
_REQUESTS = 200  # looks per second of all ranks together, as long as each looks at least every _LONGEST seconds
_GRACE = 5.0  # seconds in which a rank may end by itself once all know of a failure
_ACKNOWLEDGE = 2.5  # seconds that the failed rank waits for the last reader, after that reader's turn to look
_INTERRUPTED = "interrupted (Ctrl-C)"
_NOBODY = -1  # the rank of a failure that no rank has reported: all ranks that are alive report being alive
_ENDED = "ended by itself: "
_HANGS = "the job hangs: "
_HINTS = {  # texts of torch's errors -> what their cause may be in a parallel model
    r"Target -?\d+ is out of bounds\.": "If the logits are a shard of the vocabulary, as the output of "
    "ColumnParallelLinear(.., gather_output=False), their loss is parallel_cross_entropy"
}
_LOST = "lost without a message: it was killed (out of memory?), its host is down, or it ended its script early"


def interval(world_size: int) -> float:
    """Returns the seconds between two looks of a rank at the store, which one host serves to all ranks."""
    return min(max(_SHORTEST, world_size / _REQUESTS), _LONGEST)


class Failure(NamedTuple):
    rank: int
    message: str


class FailureMonitor:
    """Reports this rank's uncaught exception to all other ranks, and theirs to this one.

    Args:
        store: the job's store (each call uses a prefix of its own).
        rank, world_size: this rank and the number of ranks.
        number: counts the initialisations in this process, so that an old failure is not read again.

    Attributes:
        duties: functions that the watching thread calls each time it looks at the store.
    """

    def __init__(self, store: Any, rank: int, world_size: int, number: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(f"neuronx_dist/failure/{number}", store)  # type: ignore[attr-defined]
        self.duties: list[Callable[[], None]] = []
        self._interval = interval(world_size)
        self._places: Places | None = None
        if store.has_extended_api():  # a FileStore would grow with every place
            self._places = Places(self._store, rank, world_size, self._interval)
        self._slow_waits = SlowWaits(rank, places=self._places, end=self._end_hang)
        self._turn = math.inf  # when the watching thread began its turn, which asks the store
        self._host_place: Place | None = None  # of rank 0, read last
        self._is_ending = False
        self._stop = threading.Event()
        self._seen: Failure | None = None
        self._acknowledged = False
        self._thread: threading.Thread | None = None
        self._previous_hook: Any = None
        self._previous_exit: Any = None
        self._has_raised = False
        self._ending = ""  # the last call of sys.exit, with its line

    def start(self) -> None:
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        self._previous_exit, sys.exit = sys.exit, self._exit_with_line
        self._thread = threading.Thread(target=self._watch, name="neuronx_dist-failure-monitor", daemon=True)
        self._thread.start()
        if self._places is not None and (self.rank or _launcher_has_store()):
            threading.Thread(target=self._guard, name="neuronx_dist-store-guard", daemon=True).start()
        # A thread that comes back from C++ when Python is taken down aborts the process: "terminate called".
        atexit.register(self._end)
        gloo_aborts.install(self.rank, self.report)

    def stop(self) -> None:
        """Ends the watch (at destroy_model_parallel)."""
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        if sys.exit == self._exit_with_line:
            sys.exit = self._previous_exit
        self._end_watch()
        atexit.unregister(self._end)
        gloo_aborts.uninstall()

    def _end_watch(self) -> None:
        self._stop.set()
        if self._thread is not None:  # longer than a call of the store takes on a busy machine, if the store lives
            self._thread.join(timeout=10 * _SHORTEST)

    def _end(self) -> None:
        """Ends the watch when Python ends; without an exception, the others may wait for this rank."""
        self._end_watch()
        if self._has_raised:
            return
        with suppress(RuntimeError):
            self._store.set(f"ended/{self.rank}", self._ending or "its script ended while others wait for it")
        if self._ending:
            _write_for_launcher(self._ending)

    def _exit_with_line(self, status: Any = None, /) -> NoReturn:
        self._ending = f"sys.exit({status!r:.200}) at {call_site()}"
        self._previous_exit(status)
        raise SystemExit(status)  # somebody else's function has returned

    def first_failure(self, wait: float = 2.0) -> Failure | None:
        """Returns the first failure of the job, or None if no rank reports one within `wait` seconds."""
        deadline = time.monotonic() + wait
        while True:
            failure = self._read()
            if failure is not None or time.monotonic() >= deadline:
                return failure
            time.sleep(0.1 * self._interval)

    def find_lost(self) -> Failure | None:
        """Returns the first failure of the job; if no rank reports one, the first rank that no longer answers.

        The watching thread of every other rank answers that it is alive. None: all are alive, and none has failed.
        """
        try:
            self._store.compare_set("first", "", json.dumps({"rank": _NOBODY, "message": ""}))
            self._acknowledge()
            deadline = time.monotonic() + self._interval + _ACKNOWLEDGE
            while (failure := self.first_failure(0.0)) is None and time.monotonic() < deadline:
                time.sleep(0.1 * self._interval)
            missing = self.world_size - self._store.add("acknowledged", 0)
            if failure is None and missing:
                more = f" (and {missing - 1} more)" if missing > 1 else ""
                rank = self._first_missing()
                ended = self._store.check([f"ended/{rank}"])
                why = _ENDED + self._store.get(f"ended/{rank}").decode() if ended else _LOST
                text = json.dumps({"rank": rank, "message": why + more})
                self._store.compare_set("lost", "", text)
            return failure or self._read()
        except RuntimeError:
            return self._seen or Failure(0, f"{_LOST}. The job's store is lost with it")

    def _first_missing(self) -> int:
        """Returns the lowest rank that has not answered."""
        there, missing = 0, self.world_size  # all ranks below the one have answered, not all below the other
        while there + 1 < missing:
            middle = (there + missing) // 2
            is_there = self._store.check([f"acknowledged/{rank}" for rank in range(there, middle)])
            there, missing = (middle, missing) if is_there else (there, middle)
        return there

    def report(self, error: BaseException) -> None:
        """Publishes `error` as the first failure, unless there is one already, and lets the others read it."""
        if not isinstance(error, RemoteRankError) and self._publish(_in_words(error)) is None:
            return  # the store is gone: nobody is left to read it
        self._acknowledge()
        deadline = time.monotonic() + self._interval + _ACKNOWLEDGE
        while time.monotonic() < deadline:
            try:
                if self._store.add("acknowledged", 0) >= self.world_size:
                    return
            except RuntimeError:
                return
            time.sleep(0.1 * self._interval)  # after a failure all ranks reach this line

    def _publish(self, message: str, rank: int | None = None) -> Failure | None:
        """Writes a failure of `rank` (None: this one), unless there is one, and returns the first; None: no store."""
        text = json.dumps({"rank": self.rank if rank is None else rank, "message": message})
        try:
            first = Failure(**json.loads(self._store.compare_set("first", "", text)))
            if first.rank == _NOBODY:
                first = Failure(**json.loads(self._store.compare_set("lost", "", text)))
        except RuntimeError:
            return None
        return first

    def _excepthook(self, kind: Any, error: BaseException, traceback: Any) -> None:
        while self._is_ending:  # the watching thread ends the process
            time.sleep(_SHORTEST)
        self._has_raised = True
        message = _in_words(error)
        is_consequence = isinstance(error, RemoteRankError)
        first = None if is_consequence else self._publish(message)
        if not is_consequence:
            _write_for_launcher(message.partition("\n")[0])
        if is_consequence:  # the fault is not in this rank's line
            self._say(f"RemoteRankError: {error}")
        elif isinstance(error, KeyboardInterrupt):
            if first is None or first.rank == self.rank or not first.message.startswith(_INTERRUPTED):
                self._say(message)  # else the ranks were interrupted together
        elif first is not None and first.rank != self.rank and first.message == message:
            self._say(f"{type(error).__name__}, as on rank {first.rank}")
        else:
            self._previous_hook(kind, error, traceback)
            sys.stderr.flush()
            if hint := _hint(error):
                self._say(hint)
        self._stop.set()
        self.report(error)

    def _read(self) -> Failure | None:
        if self._seen is None:
            try:
                if self._store.check(["first"]):
                    first = Failure(**json.loads(self._store.get("first")))
                    if first.rank == _NOBODY:
                        self._acknowledge()
                        if not self._store.check(["lost"]):
                            return None
                        first = Failure(**json.loads(self._store.get("lost")))
                    self._seen = first
            except RuntimeError:  # the store's host has gone; collectives will report it
                return None
        return self._seen

    def _acknowledge(self) -> None:
        if self._acknowledged:
            return
        self._acknowledged = True
        with suppress(RuntimeError):
            self._store.set(f"acknowledged/{self.rank}", "")
            self._store.add("acknowledged", 1)

    def _watch(self) -> None:
        # Each rank looks at another time, so that the requests do not arrive at once.
        next_look = time.monotonic() + self._interval * (self.rank + 1) / self.world_size
        while not self._stop.wait(min(_SHORTEST, self._slow_waits.shortest or _SHORTEST)):
            self._turn = time.monotonic()
            with suppress(RuntimeError):  # the store's host has gone
                self._slow_waits.look()
            if time.monotonic() >= next_look:
                next_look += self._interval
                failure = self._read()
                if failure is not None:
                    self._turn = math.inf
                    self._end_after(failure)
                    return
                with suppress(RuntimeError):
                    self._leave_place()
                    for duty in self.duties:
                        duty()
            self._turn = math.inf

    def _leave_place(self) -> None:
        if self._places is not None:
            self._places.leave()
            if self.rank and not _launcher_has_store():
                self._host_place = self._places.read([0]).get(0)

    def _end_after(self, failure: Failure) -> None:
        """Ends this rank after the first failure of the job, if it does not end by itself."""
        if failure.message.startswith(_HANGS):
            self._is_ending = True
            self._acknowledge()
            _end_process(HANG)
        if failure.rank == self.rank:
            return
        # Printed before it is acknowledged: a launcher ends the others as soon as the failed rank has gone.
        said = f"rank {failure.rank} failed first: {failure.message}"
        if not failure.message.startswith((_LOST, _ENDED)):  # for lost ranks a collective prints one line
            self._say(said)
        self._acknowledge()
        grace = self._interval + _GRACE
        if self._stop.wait(grace):
            return
        if failure.message.startswith((_LOST, _ENDED)):
            self._say(said)
        self._say(f"this rank did not exit within {grace:g} s and is terminated now")
        os._exit(1)

    def _end_hang(self, rank: int, message: str) -> None:
        """Ends all ranks that run, since `rank` is missing for longer than the hang timeout; not after a failure."""
        if self._read() is not None:
            return
        self._is_ending, self._turn = True, math.inf
        _write_for_launcher(message)
        self._publish(_HANGS + message, rank)
        self._acknowledge()
        deadline = time.monotonic() + self._interval + _ACKNOWLEDGE
        with suppress(RuntimeError):
            while self._store.add("acknowledged", 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.1 * self._interval)
        _end_process(HANG)

    def _guard(self) -> None:
        """Reports that the job's store does not answer the watching thread, while threads wait for other ranks."""
        slow, reported = self._slow_waits, math.inf  # the turn that was reported
        resumed = looked = time.monotonic()
        while not self._stop.wait(_SHORTEST):
            now, turn = time.monotonic(), self._turn
            if now - looked > 10 * _SHORTEST:  # this process was stopped itself
                resumed = now
            looked = now
            silent = now - max(turn, resumed)
            if not slow.shortest or silent < slow.shortest or not (waiting := " and ".join(descriptions())):
                continue
            rest = f"answered for {silent:.3g} s (it is stopped, in a debugger, or its host does not answer)"
            if _launcher_has_store():
                text = f"The launcher stands still: the job's store, which is in its process, has not {rest}"
            else:
                last = f"; its last place: {self._host_place.text}" if self._host_place is not None else ""
                text = f"Rank 0 stands still: the job's store, which is in its process, has not {rest}{last}"
            if slow.hang_timeout and silent >= slow.hang_timeout:
                self._is_ending = True
                limit = f"the hang timeout is {slow.hang_timeout:g} s"
                _write_for_launcher(f"{text}; rank {self.rank} waits in {waiting}, and {limit}")
                _end_process(HANG)
            if slow.seconds and silent >= slow.seconds and reported != turn:
                reported = turn
                self._say(f"has been waiting in {waiting}. {text}")

    def _say(self, text: str) -> None:
        print(f"[rank {self.rank}] {text}", file=sys.stderr, flush=True)


def _in_words(error: BaseException) -> str:
    """The error as a message; of Ctrl-C, the line of the user's code that was running."""
    if not isinstance(error, KeyboardInterrupt):
        return f"{type(error).__name__}: {error} {_hint(error)}".rstrip()
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in walk_tb(error.__traceback__)
        if owner_of(frame.f_code.co_filename) == USER
    ]
    return f"{_INTERRUPTED} at {lines[-1]}" if lines else _INTERRUPTED


def _hint(error: BaseException) -> str:
    """Returns the likely cause of an error that torch raises in a parallel model; "" if there is none."""
    return next((hint for text, hint in _HINTS.items() if re.fullmatch(text, str(error))), "")


def _write_for_launcher(message: str) -> None:
    """Writes torchrun's error file, which the launcher reads if this rank's exit code is not 0."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if file and not os.path.exists(file):  # else torch's `record` has written it
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _launcher_has_store() -> bool:
    """Returns whether the job's store is in the process of torchrun, and not in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _end_process(code: int) -> NoReturn:
    """Ends the process, whose main thread may wait for ever."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
