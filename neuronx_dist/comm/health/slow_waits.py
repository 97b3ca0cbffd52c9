"""Waits of this rank's threads, read from another thread; a line on stderr about a wait that takes long."""

from __future__ import annotations

import os
import sys
import time

from ...call_site import TRANSPORT, call_in_words, owner_of
from ..errors import ALL_RANKS
from .waiting import Wait, in_words, waits

__all__ = ["SlowWaits", "description_of", "descriptions", "seconds_of"]

VARIABLE = "NEURONX_DIST_DEBUG_WAIT"
_SECONDS = 20.0


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


def descriptions() -> list[str]:
    """Describes the wait of each thread: verb, shape, dtype, axis, ranks, and the line of the user's code."""
    return [_description(thread, wait) for thread, wait in waits.copy().items()]


def description_of(thread: int) -> str:
    """Describes the wait of the thread with this identity, as `descriptions` does."""
    wait = waits.get(thread)
    return "a function of its program" if wait is None else _description(thread, wait)


def _description(thread: int, wait: Wait) -> str:
    _, verb, x, group = wait
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and owner_of(frame.f_code.co_filename) != TRANSPORT:
        frame = frame.f_back  # inside of functions that the collective calls: torch, the standard library
    site = call_in_words(frame or innermost) if innermost is not None else "an unknown line"
    return group.describe(in_words(verb, x), site)


class SlowWaits:
    """Reports once, for each line of the user's code, that a wait there takes longer than `seconds`.

    Args:
        seconds: None: the value of the environment variable NEURONX_DIST_DEBUG_WAIT, or 20; 0: never report.

    Raises:
        ValueError: the environment variable is no number.
    """

    def __init__(self, rank: int, seconds: float | None = None) -> None:
        self.rank = rank
        self.seconds = seconds_of(VARIABLE, _SECONDS) if seconds is None else seconds
        self._since: dict[int, tuple[int, float]] = {}  # by thread: number of a wait, and when it was first seen
        self._said: set[str] = set()

    def look(self) -> None:
        """Looks at all waits; called now and then, from a thread that waits for no rank."""
        now = time.monotonic()
        for thread, wait in waits.copy().items():
            number, since = self._since.get(thread, (-1, now))
            if number != wait[0]:
                self._since[thread] = (wait[0], now)
            elif self.seconds and now - since >= self.seconds:
                text = _description(thread, wait)
                if text not in self._said:
                    self._said.add(text)
                    self._say(text, now - since)

    def _say(self, text: str, seconds: float) -> None:
        print(
            f"[rank {self.rank}] has been waiting for {seconds:.3g} s in {text}. Some rank of the group has not come "
            f"there: it is slow, or it has called another collective. {ALL_RANKS}. With "
            "NEURONX_DIST_DEBUG=collectives in the environment of all ranks an error names the other side",
            file=sys.stderr,
            flush=True,
        )
