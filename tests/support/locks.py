"""A lock that writes down what it sees when it is taken and released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["SeeingLock"]


class SeeingLock:
    """`seen` has what `look()` gave when the lock had been taken, and when it was about to be released, in turn."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._look = look
        self.seen: list[Any] = []

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.seen.append(self._look())

    def __exit__(self, *error: object) -> None:
        self.seen.append(self._look())
        self._lock.release()
