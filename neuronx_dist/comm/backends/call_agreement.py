"""`NEURONX_DIST_DEBUG=collectives`: a job whose ranks start different collectives stops, and names both call sites.

Before a collective every rank writes the operation that it is about to start, and the line, into the job's store, and
waits for the other ranks of the group: if they announce another operation, or one does not announce any in time, it
raises an error with both call sites, and the collective does not begin. Sends and receives are compared when they are
awaited. Nothing is communicated over the groups themselves.

It costs some round trips to the store for each collective, and asynchronous ones wait at their start for the others to
start. Off, it costs nothing: communicators are not watched.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...call_site import call_site
from ...torch_internals.distributed import default_store
from ..base import DONE, WorkLike, Works
from ..errors import CommError, CommTimeout, RemoteRankError
from ..health.failure import FailureMonitor
from ..health.slow_waits import seconds_of
from ..health.waiting import Operand, in_words
from ..recording import shape_of
from .c10d import C10dCommunicator

__all__ = ["AgreementStore", "Watched", "agreement_store", "watcher"]

VARIABLE, TIMEOUT_VARIABLE = "NEURONX_DIST_DEBUG", "NEURONX_DIST_DEBUG_TIMEOUT"
_KNOWN = ("collectives",)
_TIMEOUT = 300.0  # seconds
_LONGEST_PAUSE = 0.02  # seconds between two looks at the store


def watcher(monitor: FailureMonitor | None = None) -> Callable[[C10dCommunicator], C10dCommunicator] | None:
    """Returns a `watch` for `C10dBackend` that makes communicators compare operations, if the environment says so."""
    store = agreement_store(monitor)
    return None if store is None else lambda real: Watched(real, store)


def agreement_store(monitor: FailureMonitor | None = None) -> AgreementStore | None:
    """Returns the store in which this rank announces its collectives; None unless the environment says so.

    Raises:
        ValueError: the environment variable contains an unknown word, or the time-out is no number.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    unknown = [word for word in words if word not in _KNOWN]
    if unknown:
        raise ValueError(f"{VARIABLE}={','.join(words)}: unknown value {', '.join(unknown)}; use {', '.join(_KNOWN)}")
    if "collectives" not in words or dist.get_world_size() == 1:
        return None
    timeout = seconds_of(TIMEOUT_VARIABLE, _TIMEOUT)
    return AgreementStore(default_store(), dist.get_rank(), timeout, monitor)


class AgreementStore:
    """Key-value store in which each rank announces the collective that it is about to start, and reads the others'.

    Args:
        store: the store of the job, of `init_process_group`.
        timeout: seconds to wait for another rank.
        monitor: knows whether another rank has failed meanwhile.
    """

    def __init__(self, store: Any, rank: int, timeout: float, monitor: FailureMonitor | None = None) -> None:
        number = store.add(f"neuronx_dist/debug/connections/{rank}", 1)  # entries of an earlier mesh are not read again
        self.store = dist.PrefixStore(f"neuronx_dist/debug/{number}", store)  # type: ignore[attr-defined]
        self.rank = rank
        self.timeout = timeout
        self.monitor = monitor
        self._counts: dict[str, int] = {}

    def count(self, key: str) -> int:
        """Returns 0, 1, 2 ... for each call with the same key."""
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return number

    def announce(self, key: str, operation: str) -> None:
        """Writes under `key` the operation that this rank is about to start, and its line, for the others to read."""
        text = json.dumps([operation, call_site()])
        self.store.set(key, text)
        self.store.set(f"latest/{self.rank}", text)

    def wait_for(self, key: str, rank: int, raise_timeout: Callable[[str], NoReturn]) -> list[str]:
        """Returns the announcement of `rank` under `key`: `[operation, call site]`.

        If there is none in time, `raise_timeout(text)` is called with the reason.

        Raises:
            RemoteRankError: another rank failed meanwhile.
        """
        deadline, pause = time.monotonic() + self.timeout, 0.0
        while not self.store.check([key]):
            if time.monotonic() >= deadline:
                raise_timeout(f"rank {rank} did not reach this call within {self.timeout:g} s; {self._latest(rank)}")
            failure = self.monitor.first_failure(0.0) if self.monitor is not None and pause == _LONGEST_PAUSE else None
            if failure is not None and failure.rank != self.rank:
                raise RemoteRankError(f"rank {failure.rank} failed first: {failure.message}", rank=failure.rank)
            time.sleep(pause)
            pause = min(pause + 0.0005, _LONGEST_PAUSE)
        announced: list[str] = json.loads(self.store.get(key))
        return announced

    def delete(self, key: str) -> None:
        """Deletes an announcement that all ranks have read."""
        self.store.delete_key(key)

    def _latest(self, rank: int) -> str:
        """Returns the last announcement of a rank, in words."""
        if not self.store.check([f"latest/{rank}"]):
            return "it has started no collective yet"
        operation, site = json.loads(self.store.get(f"latest/{rank}"))
        return f"its last collective was {operation} at {site}"


class Watched(C10dCommunicator):
    """Communicator that forwards to `real` once all ranks of the group are about to start the same operation."""

    def __init__(self, real: C10dCommunicator, store: AgreementStore) -> None:
        super().__init__(real.group, real.axis, real.ranks, real.global_rank, real._monitor)
        self.real = real
        self.store = store
        self._name = str(real.group.group_name)  # two axes with the same ranks may share a connection, and its order

    def _agree(self, verb: str, x: torch.Tensor | Operand | None, detail: str = "") -> None:
        """Waits until all ranks of the group announce this operation, then deletes the previous announcement."""
        number = self.store.count(self._name)
        operation = in_words(verb, x, detail) + f" over {self.axis}"
        self.store.announce(self._key(number, self.rank), operation)
        head = f"collective number {number} of {self.axis} (ranks {list(self.ranks)})"
        mine = f"rank {self.global_rank}: {operation} at {call_site()}"

        def raise_timeout(text: str) -> NoReturn:
            raise CommTimeout(f"{head}: {text}\n  {mine}")

        for index, rank in enumerate(self.ranks):
            if index == self.rank:
                continue
            other, site = self.store.wait_for(self._key(number, index), rank, raise_timeout)
            if other != operation:
                raise CommError(f"the ranks disagree about {head}:\n  {mine}\n  rank {rank}: {other} at {site}")
        if number:
            self.store.delete(self._key(number - 1, self.rank))

    def _key(self, number: int, index: int) -> str:
        return f"{self._name}/{number}/{index}"

    def _message(self, verb: str, x: torch.Tensor, peer: int, tag: int, start: Callable[[], WorkLike]) -> WorkLike:
        """Starts a send or a receive: announces it now, and compares it with the other side's at the wait."""
        src, dst = (self.rank, peer) if verb == "send" else (peer, self.rank)
        number = self.store.count(f"{self._name} {src} {dst} {tag} {verb}")
        key = f"{self._name}/{src}-{dst}/{tag}/{number}"
        other_verb = "recv" if verb == "send" else "send"
        detail = f"tag {tag}" if tag else ""
        sides = f"{'to' if verb == 'send' else 'from'} rank {self.ranks[peer]} over {self.axis}"
        operation = f"{in_words(verb, x, detail)} {sides}"
        self.store.announce(f"{key}/{verb}", operation)
        mine = f"rank {self.global_rank}: {operation} at {call_site()}"
        content = in_words("", x)

        def raise_timeout(text: str) -> NoReturn:
            raise CommTimeout(f"no {other_verb} matches this {verb}: {text}\n  {mine}")

        def compare() -> None:
            other, site = self.store.wait_for(f"{key}/{other_verb}", self.ranks[peer], raise_timeout)
            self.store.delete(f"{key}/{other_verb}")
            if content not in other:
                sent_or_received = f"rank {self.ranks[peer]}: {other} at {site}"
                raise CommError(f"send and recv do not match:\n  {mine}\n  {sent_or_received}")

        return _Compared(start(), compare)

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        self._agree("all_reduce", buffer, op)
        return self.real.start_all_reduce(buffer, op)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        self._agree("all_gather", x)
        return self.real.start_all_gather(gathered, x)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        self._agree("reduce_scatter", scattered, op)
        return self.real.start_reduce_scatter(out, scattered, op)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        self._agree("all_to_all", scattered)
        return self.real.start_all_to_all(gathered, scattered)

    def start_coalesced(
        self, verb: str, xs: Sequence[torch.Tensor], op: str, outs: Sequence[torch.Tensor | None]
    ) -> tuple[WorkLike, list[torch.Tensor]]:
        self._agree(verb, Operand(shape_of(xs), xs[0].dtype), "" if verb == "all_gather" else op)
        return self.real.start_coalesced(verb, xs, op, outs)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        self._agree("permute", x, str(list(pairs)))
        return self.real.start_permute(out, x, pairs)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        self._agree("broadcast", buffer, f"src={src}")
        return self.real.start_broadcast(buffer, src)

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        """Starts an exchange on all ranks; at the wait each pair compares the sizes that its two sides expect."""
        self._agree("exchange", Operand(len(sent), sent[0].dtype))
        works = [self.real.start_exchange(received, sent)]
        for verb, xs in (("send", sent), ("recv", received)):
            works += [self._message(verb, x, peer, 0, lambda: DONE) for peer, x in enumerate(xs) if x.numel()]
        return Works(works[::-1])

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return self._message("send", x, dst, tag, lambda: self.real.start_send(x, dst, tag))

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        return self._message("recv", out, src, tag, lambda: self.real.start_recv(out, src, tag))

    def gather_objects(self, obj: Any) -> list[Any]:
        self._agree("gather_objects", None)
        return self.real.gather_objects(obj)


class _Compared:
    """Work that is awaited once both sides have been compared."""

    def __init__(self, work: WorkLike, compare: Callable[[], None]) -> None:
        self._work = work
        self._compare = compare

    def wait(self) -> None:
        self._compare()
        self._work.wait()
