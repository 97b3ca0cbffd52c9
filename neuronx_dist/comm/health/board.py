"""Texts that ranks publish under keys and others read, without a collective, so that no rank has to take part.

A collective waits for ever for a rank that does not call it. Here a rank that has published nothing can be asked, and
another thread answers for it: in jobs of torch.distributed the thread that watches for failures, where ranks are
threads the thread that asks.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import CommTimeout, RemoteRankError
from .failure import FailureMonitor
from .waiting import noted

__all__ = ["Board", "StoreBoard"]

_PATIENCE = 1.0  # seconds before silent ranks are asked, and between two questions
_LONGEST_PAUSE = 0.02  # seconds between two looks


class Board(ABC):
    """Texts by topic, number and rank.

    Args:
        rank: this one.
        timeout: seconds to wait for the texts of others.

    Attributes:
        answers: functions by topic: this rank's text under a number that it has not posted; None: no text yet.
            Called in any thread.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.answers: dict[str, Callable[[int], str | None]] = {}
        self._numbers: dict[str, int] = {}

    def exchange(self, topic: str, number: int, text: str, ranks: Sequence[int], what: str) -> dict[int, str]:
        """Publishes `text`, and returns the texts of `ranks`, this one included, under the same topic and number.

        Args:
            topic, number: numbers of a topic rise. The texts under the previous number are deleted: all their readers
                have arrived here.
            what: subject of the exchange, for messages.

        Raises:
            CommTimeout: a rank publishes nothing.
            RemoteRankError: another rank failed meanwhile.
        """
        self._post(topic, number, text)
        texts = {self.rank: text}
        begin = asked = time.monotonic()
        with noted(what):
            while True:
                texts.update((rank, said) for rank in ranks if (said := self._read(topic, number, rank)) is not None)
                missing = [rank for rank in ranks if rank not in texts]
                if not missing:
                    break
                now = time.monotonic()
                if now - begin >= self.timeout:
                    raise CommTimeout(f"{what}: ranks {missing} did not reach it within {self.timeout:g} s")
                if now - asked >= _PATIENCE:
                    asked = now
                    self._ask(topic, number, what)
                self._pause(what, min((now - begin) / 10, _LONGEST_PAUSE))
        if topic in self._numbers:
            self._forget(topic, self._numbers[topic])
        self._numbers[topic] = number
        return {rank: texts[rank] for rank in sorted(texts)}

    def exchange_values(self, topic: str, value: Any, ranks: Sequence[int], what: str = "") -> dict[int, Any]:
        """Publishes a value of JSON's types; returns those of `ranks` in the call of the same number for `topic`."""
        number = self._numbers.get(topic, -1) + 1
        texts = self.exchange(topic, number, json.dumps(value), ranks, what or f"comparing {topic}")
        return {rank: json.loads(texts[rank]) for rank in ranks}

    @abstractmethod
    def _post(self, topic: str, number: int, text: str) -> None: ...

    @abstractmethod
    def _read(self, topic: str, number: int, rank: int) -> str | None: ...

    @abstractmethod
    def _forget(self, topic: str, number: int) -> None: ...

    @abstractmethod
    def _pause(self, what: str, seconds: float) -> None: ...

    @abstractmethod
    def _ask(self, topic: str, number: int, what: str) -> None:
        """Asks the ranks that have published nothing."""


class StoreBoard(Board):
    """Board in the key-value store of a job.

    Args:
        number: index of the mesh among the meshes of this job, equal on all ranks.
        monitor: knows whether another rank has failed, and has the thread that answers for this rank; None: no thread.
    """

    def __init__(
        self, store: Any, rank: int, number: int, *, timeout: float = 600.0, monitor: FailureMonitor | None = None
    ) -> None:
        super().__init__(rank, timeout)
        self._store = dist.PrefixStore(f"neuronx_dist/board/{number}", store)  # type: ignore[attr-defined]
        self._monitor = monitor
        self._count = 0  # number of questions that this rank has seen
        self._open: dict[str, int] = {}  # numbers that this rank is asked for, by topic
        if monitor is not None:
            monitor.duties.append(self.answer)

    def answer(self) -> None:
        """Answers questions of others for this rank; called now and then, in a thread that waits for no rank."""
        if not self.answers:
            return
        count = self._store.add("questions", 0)
        if count != self._count:
            self._count = count
            asked = [topic for topic in [*self.answers] if self._store.check([f"question/{topic}"])]
            self._open.update((topic, int(self._store.get(f"question/{topic}"))) for topic in asked)
        for topic, number in [*self._open.items()]:
            text = self.answers[topic](number)
            if text is not None:
                self._post(topic, number, text)
                del self._open[topic]

    def _post(self, topic: str, number: int, text: str) -> None:
        self._store.set(self._key(topic, number, self.rank), text)

    def _read(self, topic: str, number: int, rank: int) -> str | None:
        key = self._key(topic, number, rank)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _forget(self, topic: str, number: int) -> None:
        self._store.delete_key(self._key(topic, number, self.rank))

    def _pause(self, what: str, seconds: float) -> None:
        time.sleep(seconds)

    def _ask(self, topic: str, number: int, what: str) -> None:
        self._store.set(f"question/{topic}", str(number))
        self._store.add("questions", 1)
        failure = self._monitor.first_failure(0.0) if self._monitor is not None else None
        if failure is not None and failure.rank != self.rank:
            raise RemoteRankError(
                f"rank {failure.rank} failed first: {failure.message} (met in {what})", rank=failure.rank
            )

    @staticmethod
    def _key(topic: str, number: int, rank: int) -> str:
        return f"{topic}/{number}/{rank}"
