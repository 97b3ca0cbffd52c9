"""Ranks as threads of one process: real values, no processes. For fast tests and notebooks.

Collectives reduce in rank order, so that results are the same on every rank and in every run, and a collective in which
the ranks disagree (verb, shape, dtype) is an error that shows both sides.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ...mesh import Mesh
from ..base import DONE, Backend, Communicator, WorkLike
from ..context import Context, use
from ..errors import ALL_RANKS, CommError, CommTimeout, RemoteRankError
from ..health.board import Board
from ..health.places import description
from ..health.waiting import waits
from .process_generators import ProcessGenerators

__all__ = ["CommDeadlock", "ThreadsBackend", "ThreadsCommunicator", "run"]


class CommDeadlock(CommTimeout):
    """All ranks wait: each for a call that another one has not made. The message has the line of each."""


class _World:
    """State that the ranks share: whose turn it is, a table of posted values, and the first failure.

    One rank runs at a time. Where it waits for others it saves its random state and hands the turn on, to the next rank
    that can go on: so neither a race between ranks nor their shared random generators change a result.
    """

    def __init__(self, mesh: Mesh, timeout: float, order: int | None) -> None:
        self.size = mesh.world_size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.posted: dict[Hashable, dict[int, Any]] = {}
        self.reads: dict[Hashable, int] = {}
        self.boards: dict[int, _ThreadsBoard] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.moves = 0  # number of posts, and of turns but those in which a rank polls
        self._threads: dict[int, int] = {}  # by rank, the identity of the thread that runs it
        self._running: int | None = None
        self._since = time.monotonic()  # when that rank's turn began
        self._gates = [threading.Semaphore(0) for _ in range(self.size)]
        self._ready: dict[int, Callable[[], bool]] = {rank: lambda: True for rank in range(self.size)}  # of who waits
        self._generators = ProcessGenerators()
        self._random = [self._generators.state()] * self.size
        self._choice = None if order is None else random.Random(order)

    def begin(self) -> None:
        """Gives the first turn."""
        with self.changed:
            self._next(self.size - 1)

    def end(self) -> None:
        """Lets the caller go on with the random state of rank 0."""
        self._generators.restore(self._random[0])

    def enter(self, rank: int) -> None:
        """Waits for the rank's turn.

        Raises:
            CommTimeout: the rank whose turn it is has computed for the time-out, or stands still.
        """
        started = rank in self._threads
        self._threads[rank] = threading.get_ident()
        while not self._gates[rank].acquire(timeout=min(1.0, self.timeout)):
            if started and time.monotonic() - self._since >= self.timeout:
                self._ready.pop(rank, None)
                raise CommTimeout(
                    f"rank {self._running} has neither ended nor waited for others within {self.timeout:g} s; ranks as "
                    "threads run one at a time, and none may wait for another one but in a call of neuronx_dist.comm"
                )
        self._ready.pop(rank, None)
        self._generators.restore(self._random[rank])

    def leave(self, rank: int, ready: Callable[[], bool] | None) -> None:
        """Hands the turn on; the rank can go on when `ready()`. None: it has ended."""
        if self._running != rank:
            return  # it raised the time-out of `enter`
        self._random[rank] = self._generators.state()
        with self.changed:
            if ready is not None:
                self._ready[rank] = ready
            self._next(rank)

    def _next(self, rank: int) -> None:
        """Gives the turn to the next rank after `rank` that can go on, or to any of them if the order is random."""
        waiting = sorted(self._ready, key=lambda other: (other - rank - 1) % self.size)
        able = [other for other in waiting if self.failure is not None or self._ready[other]()]
        if waiting and not able:
            able = sorted(waiting)
            self.failure = able[0], CommDeadlock(self._deadlock(able))
        self._running = (self._choice.choice(able) if self._choice else able[0]) if able else None
        self._since = time.monotonic()
        if self._running is not None:
            self._gates[self._running].release()

    def _deadlock(self, waiting: Sequence[int]) -> str:
        lines = [f"no rank can go on: each waits for a call that another rank has not made. {ALL_RANKS}."]
        for rank in range(self.size):
            thread = self._threads[rank]
            place = description(thread, waits[thread]) if thread in waits else "a function of its program"
            lines.append(f"rank {rank} " + (f"waits in {place}" if rank in waiting else "has ended"))
        return "\n  ".join(lines)

    def give_way(self, rank: int) -> None:
        """Hands the turn on for once, if the order of ranks is random: another rank may come first."""
        if self._choice is not None and self._running == rank:
            self.leave(rank, lambda: True)
            self.enter(rank)

    def wait(self, rank: int, ready: Callable[[], bool], polls: bool = False) -> None:
        """Hands the turn of `rank` on until `ready()`, which looks at posts and moves.

        A thread that the rank has started may wait in its place.

        Args:
            polls: the rank asks again and again.
        """
        if self._running != rank:  # a second thread of a rank that waits
            with self.changed:
                self.changed.wait_for(lambda: ready() or self.failure is not None, self.timeout)
        elif not ready():
            self.leave(rank, ready)
            self.enter(rank)
            self.moves += not polls

    def post(self, key: Hashable, index: int, value: Any) -> None:
        with self.changed:
            self.posted.setdefault(key, {})[index] = value
            self.moved()
            self.changed.notify_all()

    def moved(self) -> None:
        """Notes that a rank did something for which others may wait."""
        self.moves += 1

    def collect(
        self, rank: int, key: Hashable, indices: Sequence[int], readers: int, what: Callable[[], str]
    ) -> list[Any]:
        """Waits until all `indices` have posted under `key`; the last of `readers` to read clears the table."""
        self.wait(rank, lambda: len(self.posted.get(key, ())) == len(indices))
        with self.changed:
            slots = self.posted.get(key, {})
            if len(slots) < len(indices):
                self.check(rank, what)
                missing = [index for index in indices if index not in slots]
                raise CommTimeout(
                    f"{what()} timed out after {self.timeout:g} s; missing: group indices {missing}. {ALL_RANKS}"
                )
            values = [slots[index] for index in indices]
            self.reads[key] = self.reads.get(key, 0) + 1
            if self.reads[key] == readers:
                del self.posted[key], self.reads[key]
            return values

    def check(self, rank: int, what: Callable[[], str]) -> None:
        """Raises RemoteRankError if a rank has failed; on that rank, if it was found to wait for ever, its error."""
        if self.failure is not None:
            failed, error = self.failure
            if failed == rank:
                raise error
            raise RemoteRankError(f"{what()}: rank {failed} failed first: {type(error).__name__}: {error}", rank=failed)

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            follows = self.failure is not None and self.failure[0] == rank  # from a deadlock that was found
            if (self.failure is None or follows) and not isinstance(error, RemoteRankError):
                self.failure = (rank, error)
            self.changed.notify_all()


class _Pending:
    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete

    def wait(self) -> None:
        self._complete()


class ThreadsCommunicator(Communicator):
    def __init__(self, world: _World, uid: Hashable, axis: str, ranks: Sequence[int], global_rank: int) -> None:
        super().__init__(axis, ranks, global_rank)
        self._world = world
        self._uid = uid
        self._count = 0

    def _exchange(self, verb: str, value: Any, signature: Any, consume: Callable[[list[Any]], None]) -> WorkLike:
        """Posts a value now; at the wait, passes the values of all ranks, in group order, to `consume`."""
        key = (self._uid, self._count)
        self._count += 1
        self._world.post(key, self.rank, (verb, signature, value))
        self._world.give_way(self.global_rank)

        def complete() -> None:
            slots = self._world.collect(self.global_rank, key, range(self.size), self.size, lambda: self.describe(verb))
            for index, (other_verb, other_signature, _) in enumerate(slots):
                if (other_verb, other_signature) != (verb, signature):
                    raise CommError(
                        f"{self.describe(verb)}: the ranks disagree: rank {self.global_rank} called {verb} {signature}"
                        f", rank {self.ranks[index]} called {other_verb} {other_signature}"
                    )
            consume([value for _, _, value in slots])

        return _Pending(complete)

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        return self._exchange(
            "all_reduce", buffer.clone(), (op, *_signature(buffer)), lambda values: _copy(buffer, _reduce(values, op))
        )

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        return self._exchange(
            "all_gather", x.clone(), _signature(x), lambda values: _copy(gathered, torch.stack(values))
        )

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        return self._exchange(
            "reduce_scatter",
            scattered.clone(),
            (op, *_signature(scattered)),
            lambda values: _copy(out, _reduce([value[self.rank] for value in values], op)),
        )

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        return self._exchange(
            "all_to_all",
            scattered.clone(),
            _signature(scattered),
            lambda values: _copy(gathered, torch.stack([value[self.rank] for value in values])),
        )

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        def take(values: list[torch.Tensor]) -> None:
            sources = [src for src, dst in pairs if dst == self.rank]
            with torch.no_grad():
                out.copy_(values[sources[0]]) if sources else out.zero_()

        return self._exchange("permute", x.clone(), (tuple(pairs), *_signature(x)), take)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        value = buffer.clone() if self.rank == src else None
        return self._exchange("broadcast", value, (src, *_signature(buffer)), lambda values: _copy(buffer, values[src]))

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        def take(values: list[tuple[list[torch.Tensor], list[int]]]) -> None:
            for src, (xs, _) in enumerate(values):
                for dst, (_, expected) in enumerate(values):
                    if xs[dst].numel() != expected[src]:
                        raise CommError(
                            f"{self.describe('exchange')}: the ranks disagree: rank {self.ranks[src]} sends "
                            f"{xs[dst].numel()} elements to rank {self.ranks[dst]}, which expects {expected[src]}"
                        )
                _copy(received[src], xs[self.rank])

        value = [x.clone() for x in sent], [y.numel() for y in received]
        return self._exchange("exchange", value, sent[0].dtype, take)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        self._world.post(self._mail(self.rank, dst, tag), 0, x.clone())
        self._world.give_way(self.global_rank)
        return DONE

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        key = self._mail(src, self.rank, tag)

        def complete() -> None:
            (value,) = self._world.collect(self.global_rank, key, [0], 1, lambda: self.describe("recv"))
            if _signature(value) != _signature(out):
                raise CommError(
                    f"{self.describe('recv')}: rank {self.ranks[src]} sent {_signature(value)}, expected "
                    f"{_signature(out)}"
                )
            _copy(out, value)

        return _Pending(complete)

    def _mail(self, src: int, dst: int, tag: int) -> Hashable:
        """Returns a key for the next message of this sender, receiver and tag, which stay in order, as on a wire."""
        counters: dict[Hashable, int] = self.__dict__.setdefault("_mail_counters", {})
        number = counters.get((src, dst, tag), 0)
        counters[(src, dst, tag)] = number + 1
        return (self._uid, "mail", src, dst, tag, number)

    def gather_objects(self, obj: Any) -> list[Any]:
        objects: list[Any] = []
        self._exchange("gather_objects", obj, None, objects.extend).wait()
        return objects


class _ThreadsBoard(Board):
    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.timeout)
        self._world = world
        self._texts: dict[tuple[str, int], str] = {}
        world.boards[rank] = self

    def exchange(self, topic: str, number: int, text: str, ranks: Sequence[int], what: str) -> dict[int, str]:
        texts = super().exchange(topic, number, text, ranks, what)
        self._world.moved()  # what this rank does next may be an answer to others
        return texts

    def _post(self, topic: str, number: int, text: str) -> None:
        with self._world.changed:
            self._texts[topic, number] = text
            self._world.moved()

    def _read(self, topic: str, number: int, rank: int) -> str | None:
        board = self._world.boards.get(rank)
        if board is None:
            return None
        text = board._texts.get((topic, number))
        return board.answers[topic](number) if text is None and topic in board.answers else text

    def _forget(self, topic: str, number: int) -> None:
        del self._texts[topic, number]

    def _pause(self, what: str, seconds: float) -> None:
        seen = self._world.moves
        self._world.wait(self.rank, lambda: self._world.moves != seen, polls=True)
        self._world.check(self.rank, lambda: what)

    def _ask(self, topic: str, number: int, what: str) -> None:
        pass  # done by `_read`


class ThreadsBackend(Backend):
    """Backend of one rank of a shared world."""

    name = "threads"

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.board = _ThreadsBoard(world, rank)
        self._counts: dict[Hashable, int] = {}

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        ranks = tuple(next(group for group in groups if global_rank in group))
        number = self._counts.get((label, ranks), 0)
        self._counts[label, ranks] = number + 1
        return ThreadsCommunicator(self._world, (label, ranks, number), label, ranks, global_rank)


def run(
    mesh: Mesh, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, order: str | int = "round-robin"
) -> list[Any]:
    """Runs `fn(*args)` on every rank of `mesh`, each in a thread with its own context; returns the results by rank.

    One rank runs at a time, until it waits for others. Every rank begins with the random states of the caller (torch's,
    the accelerator's, Python's and numpy's) and has its own from then on, as processes would; the caller goes on with
    rank 0's. So a run is repeated exactly. No rank may wait for others while it holds a lock that they take.

    Args:
        timeout: seconds that a rank may compute while others wait for it.
        order: the order of turns: "round-robin", or the seed of a random order, in which ranks also stop after
            they send, to search for races.

    Raises:
        the first exception of any rank, unchanged (the others are notified, and end).
        CommDeadlock: all ranks wait; the message has each rank's call and its line.
        ValueError: another `order`.
    """
    if order != "round-robin" and not isinstance(order, int):
        raise ValueError(f'order={order!r}: it is "round-robin", or an integer, the seed of a random order')
    world = _World(mesh, timeout, order if isinstance(order, int) else None)
    results: list[Any] = [None] * mesh.world_size

    def rank_main(rank: int) -> None:
        try:
            world.enter(rank)
            with use(Context(mesh, rank, ThreadsBackend(world, rank))):
                results[rank] = fn(*args)
        except BaseException as error:  # noqa: B902 - whatever it was, the other ranks must not wait for this one
            world.fail(rank, error)
        finally:
            world.leave(rank, None)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(mesh.world_size)
    ]
    for thread in threads:
        thread.start()
    world.begin()
    for thread in threads:
        thread.join()
    world.end()
    if world.failure is not None:
        rank, error = world.failure
        error.add_note(f"raised on rank {rank} of {mesh}") if hasattr(error, "add_note") else None
        raise error
    return results


def _signature(x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


def _copy(out: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        out.copy_(value)


def _reduce(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    with torch.no_grad():
        total = values[0].clone()
        for value in values[1:]:
            if op == "sum":
                total += value
            elif op == "max":
                torch.maximum(total, value, out=total)
            else:
                torch.minimum(total, value, out=total)
        return total
