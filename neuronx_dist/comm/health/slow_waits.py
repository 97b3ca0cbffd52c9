"""Long waits of this rank's threads, seen from another thread: a line on stderr, or the end of a job that hangs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import ALL_RANKS
from .places import Missing, Place, Places, description, missing
from .waiting import waits

__all__ = ["HANG_VARIABLE", "SlowWaits", "seconds_of"]

VARIABLE = "NEURONX_DIST_DEBUG_WAIT"
HANG_VARIABLE = "NEURONX_DIST_HANG_TIMEOUT"
_SECONDS = 20.0
_MOST = 3  # other waits that a line names


def seconds_of(variable: str, default: float) -> float:
    """Returns the seconds in an environment variable.

    Raises:
        ValueError: the text is no number, or a negative one.
    """
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # nan, too
        raise ValueError(f"{variable}={text!r} is not a number of seconds")
    return seconds


@dataclass
class _Seen:
    """A wait of a thread, since it was first seen."""

    number: int
    since: float
    places: dict[int, Place] = field(default_factory=dict)  # of all ranks, read at `read_at`
    read_at: float | None = None
    is_reported: bool = False


class SlowWaits:
    """Reports that a wait takes longer than `seconds`: which rank is missing, and where that rank is.

    A job has one such line for each missing rank and line of the user's code. If no rank is missing, since all wait,
    each reports its wait, once for each line of the user's code.

    Args:
        seconds: None: the value of the environment variable NEURONX_DIST_DEBUG_WAIT, or 20; 0: never report.
        hang_timeout: seconds after which `end` is called; None: the value of NEURONX_DIST_HANG_TIMEOUT, which
            `neuronx-dist run --hang-timeout` sets; 0: never.
        places: where the ranks are; None: unknown.
        end: receives the rank that is missing, this rank if none is, and a message.

    Raises:
        ValueError: an environment variable is no number.
    """

    def __init__(
        self,
        rank: int,
        seconds: float | None = None,
        hang_timeout: float | None = None,
        places: Places | None = None,
        end: Callable[[int, str], None] = lambda rank, message: None,
    ) -> None:
        self.rank = rank
        self.seconds = seconds_of(VARIABLE, _SECONDS) if seconds is None else seconds
        self.hang_timeout = seconds_of(HANG_VARIABLE, 0) if hang_timeout is None else hang_timeout
        self.shortest = min(filter(None, [self.seconds, self.hang_timeout]), default=0.0)
        self._places = places
        self._end = end
        self._seen: dict[int, _Seen] = {}  # by thread
        self._said: set[str] = set()

    def look(self) -> None:
        """Looks at all waits; called now and then, from a thread that waits for no rank."""
        now = time.monotonic()
        for thread, wait in waits.copy().items():
            seen = self._seen.get(thread)
            if seen is None or seen.number != wait[0]:
                seen = self._seen[thread] = _Seen(wait[0], now)
            age = now - seen.since
            span = 0.0 if self._places is None else self._places.span
            if not self.shortest or age < self.shortest - span:
                continue
            if self._places is not None and seen.read_at is None:
                seen.places, seen.read_at = self._places.read(), now
            if age < self.shortest or (seen.read_at is not None and now - seen.read_at < span):
                continue
            if self.hang_timeout and age >= self.hang_timeout:
                self._end_job(description(thread, wait), wait[3].ranks, seen, age)
            elif self.seconds and age >= self.seconds and not seen.is_reported:
                seen.is_reported = True
                self._report(description(thread, wait), wait[3].ranks, seen, age)

    def _report(self, text: str, ranks: Sequence[int], seen: _Seen, age: float) -> None:
        begin = f"[rank {self.rank}] has been waiting for {age:.3g} s in {text}. "
        found, others = self._look_for(text, ranks, seen)
        if found is not None:
            if self._places is None or self._places.claim(found.key):
                print(begin + found.text, file=sys.stderr, flush=True)
        elif text not in self._said:
            self._said.add(text)
            print(
                f"{begin}Some rank of the group has not come there: it is slow, or it has called another collective. "
                f"{others}{ALL_RANKS}. With NEURONX_DIST_DEBUG=collectives in the environment of all ranks an error "
                "names the other side",
                file=sys.stderr,
                flush=True,
            )

    def _end_job(self, text: str, ranks: Sequence[int], seen: _Seen, age: float) -> None:
        found, others = self._look_for(text, ranks, seen)
        waiting = f"rank {self.rank} has been waiting for {age:.3g} s in {text}"
        limit = f"the hang timeout is {self.hang_timeout:g} s"
        if found is None:
            if self._places is None:
                who = ""
            elif unseen := sorted({*range(self._places.world_size)} - {*self._places.read()}):
                who = f", and rank {unseen[0]} has not been seen yet: its process starts, or is stopped"
            else:
                who = f", and no rank is missing: all wait. {others}".rstrip(". ")
            self._end(self.rank, f"{waiting}{who}; {limit}")
        else:
            self._end(found.rank, f"{found.text}; {waiting}, and {limit}")

    def _look_for(self, text: str, ranks: Sequence[int], seen: _Seen) -> tuple[Missing | None, str]:
        """Returns the missing rank, and a sentence about ranks of the group that wait elsewhere."""
        if self._places is None:
            return None, ""
        now = self._places.read()
        found = missing(ranks, seen.places, now, self.rank)
        others = [rank for rank in ranks if rank in now and now[rank].waits and rank != self.rank]
        words = [f"Rank {rank} waits in {now[rank].text}. " for rank in others[:_MOST]]
        return found, "".join(words)
