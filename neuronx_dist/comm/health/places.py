"""Places of the ranks, which each leaves in the job's store: the rank that a collective waits for, and its line.

The watching thread of a rank writes the rank's place whenever it looks at the store, so that a collective pays nothing
for it. A process that is stopped writes no more: the place that it left last is read, and its age shows that the
process stands still, while a rank that runs elsewhere says where.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from ...call_site import TRANSPORT, call_in_words, line_of, owner_of
from .waiting import Wait, in_words, waits

__all__ = ["Missing", "Place", "Places", "description", "descriptions", "missing"]

_INSIDE = ", inside of "


class Place(NamedTuple):
    """Place of a rank, as its process left it."""

    beat: int  # number of the entry: equal in two reads, no thread of the process runs Python
    written: float  # `time.time()` of its host
    waits: bool  # for other ranks
    seconds: float  # that the rank had spent there
    text: str


class Places:
    """Writes this rank's place, and reads those of others; each call of `leave` and `read` asks the store.

    Args:
        store: store of the job, in which requests of other threads do not block these.
        interval: seconds between two calls of `leave`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, interval: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.span = 2 * interval + 0.5  # seconds in which a process that runs leaves its place again
        self._store = store
        self._beat = 0
        self._wait_number: int | None = None
        self._since = time.monotonic()

    def leave(self) -> None:
        """Writes where this rank is now."""
        self._beat += 1
        now = time.monotonic()
        number = max((wait[0] for wait in waits.copy().values()), default=None)
        if number != self._wait_number:
            self._wait_number, self._since = number, now
        text = " and ".join(descriptions()) if number is not None else _line_of_main_thread()
        place = Place(self._beat, time.time(), number is not None, now - self._since, text)
        self._store.set(_key(self.rank), json.dumps(place))

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Place]:
        """Returns the places of `ranks`, or of all; a rank that has left none is absent."""
        keys = {rank: _key(rank) for rank in (range(self.world_size) if ranks is None else ranks)}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Place(*json.loads(text)) for rank, text in zip(keys, self._store.multi_get([*keys.values()]))}

    def claim(self, what: str) -> bool:
        """Returns whether this rank is the first to claim the report of `what`."""
        return bool(self._store.add(f"reported/{what}", 1) == 1)


def descriptions() -> list[str]:
    """Describes the wait of each thread: verb, shape, dtype, axis, ranks, and the line of the user's code."""
    return [description(thread, wait) for thread, wait in waits.copy().items()]


def description(thread: int, wait: Wait) -> str:
    """Describes the wait of the thread with this identity, as `descriptions` does."""
    _, verb, x, group = wait
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and owner_of(frame.f_code.co_filename) != TRANSPORT:
        frame = frame.f_back  # inside of functions that the collective calls: torch, the standard library
    site = call_in_words(frame or innermost) if innermost is not None else "an unknown line"
    return group.describe(in_words(verb, x), site)


class Missing(NamedTuple):
    """The rank that others wait for; `key` is equal on all ranks that find the same."""

    rank: int
    text: str
    key: str


def missing(group: Iterable[int], before: dict[int, Place], now: dict[int, Place], waiter: int) -> Missing | None:
    """Finds the rank that a group waits for; None: all ranks that left a place wait for others.

    Ranks of the group come before others, which members of the group may wait for, and a process that stands still
    before one that runs elsewhere. Of the ranks outside of the group that run, it is the one that is longest there.

    Args:
        before, now: places read at least `Places.span` seconds apart.
        waiter: the rank that asks.
    """
    still = {rank for rank, place in now.items() if rank in before and before[rank].beat == place.beat}
    elsewhere = {rank for rank, place in now.items() if not place.waits} - still - {waiter}
    members = set(group)
    for found in (still & members, elsewhere & members, still):
        if found:
            first, *others = sorted(found)
            return _missing(first, now[first], first in still, others)
    return _missing(rank, now[rank], False) if (rank := _longest(elsewhere, now)) is not None else None


def _longest(ranks: Iterable[int], now: dict[int, Place]) -> int | None:
    return max(ranks, key=lambda rank: now[rank].seconds, default=None)


def _missing(rank: int, place: Place, is_still: bool, others: Sequence[int] = ()) -> Missing:
    age = max(0.0, time.time() - place.written)
    if is_still:
        key = f"{rank}/{place.beat}"
        text = (
            f"Rank {rank} stands still: its process has not run for {age:.3g} s (it is stopped, in a debugger, or its "
            f"disk or host does not answer); its last place: {place.text}"
        )
    else:
        key = f"{rank}/{place.text.partition(_INSIDE)[0]}"
        text = f"Rank {rank} has not come there: for {place.seconds + age:.3g} s it has been at {place.text}"
    return Missing(rank, f"{text}. Ranks {others} are missing, too" if others else text, key)


def _line_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _in_words(frame) if frame is not None else "an unknown line"


def _in_words(frame: FrameType) -> str:
    """Returns the user's line, and the innermost line where it is another one: of a library, of this package."""
    line, innermost = call_in_words(frame), line_of(frame)
    return line if line.startswith(innermost) else f"{line}{_INSIDE}{innermost} ({frame.f_code.co_name})"


def _key(rank: int) -> str:
    return f"place/{rank}"
