"""All ranks' communication against each other, without running any of it.

Every rank has a list of events. Collectives are met the strict way: a rank waits in each until all of its group are in
the same one, whatever is asynchronous in reality, so that an order which differs between ranks is found even where two
groups are involved. Messages wait for nobody; sends and receives of two ranks are paired in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...comm.backends.observed import Event
from ...mesh import Mesh
from ...pipeline.schedule import Schedule, simulate
from ..report import Problem
from .explore import Explored, RankProgram

__all__ = ["compare_events", "compare_schedule"]


class _Seen:
    """An event as a certain rank does it."""

    __slots__ = ("event", "group", "is_message", "rank", "ranks", "what")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.rank = event.rank
        self.ranks = event.ranks
        self.group = (event.axis, event.ranks)
        self.is_message = event.verb in ("send", "recv")
        source = event.peer if event.verb == "broadcast" else None
        # What has to be the same on all ranks of the group.
        self.what = event.verb, event.op, event.shape, event.dtype, source, event.pairs

    @property
    def peer(self) -> int:
        assert self.event.peer is not None
        return self.event.peer

    def __str__(self) -> str:
        event = self.event
        words = f"{event.verb}({event.op})" if event.op else event.verb
        if event.peer is not None:
            words += f" {'to' if event.verb == 'send' else 'from'} rank {event.peer}"
        if event.shape is not None:
            words += f" of {list(event.shape)} {str(event.dtype).removeprefix('torch.')}"
        return f"{words} over {event.axis or 'itself'}"


def places(event: Event) -> list[str]:
    """The user's line of an event, and the package's if that says more."""
    return [event.where] if event.inside == event.where else [event.where, event.inside]


def _at(event: Event) -> str:
    inside = f" (in {event.inside})" if event.inside != event.where else ""
    return f"{event.where}{inside}"


# --- collectives and messages -----------------------------------------------------------------------------------------


def compare_events(explored: Explored) -> list[Problem]:
    """Collectives that some ranks of a group call otherwise or not at all; messages without the other end."""
    kept = explored.representatives()
    meeting = _Meeting(explored.mesh, {rank: explored.programs[rank] for rank in kept})
    problem = meeting.run()
    if problem is not None:
        return [problem]
    return _messages(explored.mesh, meeting.messages, set(kept))


@dataclass
class _Queue:
    events: list[_Seen]  # collectives
    position: int = 0

    @property
    def head(self) -> _Seen | None:
        return self.events[self.position] if self.position < len(self.events) else None

    def rest(self) -> Iterator[_Seen]:
        return iter(self.events[self.position :])


class _Meeting:
    """Runs the collectives of all ranks against each other."""

    def __init__(self, mesh: Mesh, programs: Mapping[int, RankProgram]) -> None:
        self.mesh = mesh
        self.messages: list[_Seen] = []
        self.queues: dict[int, _Queue] = {}
        for rank, program in programs.items():
            seen = [_Seen(event if event.rank == rank else event.on(rank)) for event in program.events]
            self.messages += [event for event in seen if event.is_message]
            self.queues[rank] = _Queue([event for event in seen if not event.is_message])

    def run(self) -> Problem | None:
        waiting = list(self.queues)
        while waiting:
            moved: list[int] = []
            for rank in waiting:
                head = self.queues[rank].head
                if head is None:
                    continue
                others = [self.queues[member] for member in head.ranks if member in self.queues]
                heads = [queue.head for queue in others]
                if all(other is not None and other.group == head.group for other in heads):
                    first, *rest = (other for other in heads if other is not None)
                    for other in rest:
                        if other.what != first.what:
                            return self._differ(first, other)
                    for queue in others:
                        queue.position += 1
                    moved += [member for member in head.ranks if member in self.queues]
            waiting = list(dict.fromkeys(moved))
        stuck = [queue.head for queue in self.queues.values() if queue.head is not None]
        return self._stuck(stuck) if stuck else None

    def _differ(self, one: _Seen, other: _Seen) -> Problem:
        """Two ranks are in different collectives of one group."""
        if one.rank > other.rank:
            one, other = other, one
        first, second = self.queues[one.rank], self.queues[other.rank]
        mine = [seen.what for seen in first.rest() if seen.group == one.group]
        theirs = [seen.what for seen in second.rest() if seen.group == one.group]
        if mine[1:2] == theirs[:1] and len(mine) > len(theirs):
            return self._missing(one, other.rank, other)
        if theirs[1:2] == mine[:1] and len(theirs) > len(mine):
            return self._missing(other, one.rank, one)
        if mine[1:2] == theirs[:1] and theirs[1:2] == mine[:1]:
            return _two(
                one,
                other,
                f"ranks {one.rank} and {other.rank} call two collectives over {one.event.axis} in different orders",
                "call them in one order on all ranks",
            )
        a, b = one.event, other.event
        if a.verb != b.verb:
            what = f"call different collectives over {a.axis}"
        elif a.op != b.op:
            what = f"reduce by different operations over {a.axis}, {a.op} and {b.op}"
        elif a.shape != b.shape:
            what = f"call {a.verb} over {a.axis} with different shapes, {list(a.shape or ())} and {list(b.shape or ())}"
        elif a.dtype != b.dtype:
            what = f"call {a.verb} over {a.axis} with different dtypes, {a.dtype} and {b.dtype}"
        else:
            what = f"call {a.verb} over {a.axis} with different sources or pairs"
        return _two(
            one, other, f"ranks {one.rank} and {other.rank} {what}", "all ranks of a group have to call the same"
        )

    def _stuck(self, heads: Sequence[_Seen]) -> Problem:
        """Reports a deadlock: a rank never calls the collective, or ranks wait for one another in different groups."""
        for head in heads:
            for rank in head.ranks:
                if rank in self.queues and not any(seen.group == head.group for seen in self.queues[rank].rest()):
                    return self._missing(head, rank, self.queues[rank].head)
        # Everyone would come, but in another order: follow who waits for whom.
        one = heads[0]
        for _ in range(len(heads)):
            present = [self.queues[rank].head for rank in one.ranks if rank in self.queues]
            other = next(seen for seen in present if seen is not None and seen.group != one.group)
            if one.rank in other.ranks:
                break
            one = other
        return _two(
            one,
            other,
            f"ranks {one.rank} and {other.rank} wait for each other: they call collectives over {one.event.axis} and "
            f"{other.event.axis} in different orders",
            "call them in one order on all ranks",
        )

    def _missing(self, extra: _Seen, rank: int, instead: _Seen | None) -> Problem:
        then = f"its next is {instead} at {_at(instead.event)}" if instead is not None else "it has ended by then"
        lines = [*places(extra.event), *(places(instead.event) if instead is not None else [])]
        message = (
            f"rank {extra.rank} calls {extra}, and rank {rank} of the same group does not\n"
            f"    rank {extra.rank}: {_at(extra.event)}\n"
            f"    rank {rank}: {then}\n"
            f"    Is it inside a branch that only some ranks take? Call it on all ranks of {extra.event.axis} "
            f"{list(extra.ranks)}, or on none."
        )
        return Problem("collectives", message, (extra.rank, rank), tuple(lines))


def _two(one: _Seen, other: _Seen, what: str, repair: str) -> Problem:
    message = (
        f"{what}\n"
        f"    rank {one.rank}: {one} at {_at(one.event)}\n"
        f"    rank {other.rank}: {other} at {_at(other.event)}\n"
        f"    {repair[0].upper()}{repair[1:]}."
    )
    return Problem("collectives", message, (one.rank, other.rank), (*places(one.event), *places(other.event)))


def _messages(mesh: Mesh, messages: Sequence[_Seen], kept: set[int]) -> list[Problem]:
    """Pairs sends and receives between two ranks, in order."""
    channels: dict[Any, tuple[list[_Seen], list[_Seen]]] = {}
    for seen in messages:
        ends = (seen.rank, seen.peer) if seen.event.verb == "send" else (seen.peer, seen.rank)
        if seen.peer in kept:
            pair = channels.setdefault((seen.group, ends, seen.event.tag), ([], []))
            pair[seen.event.verb == "recv"].append(seen)
    problems = []
    for (_, (source, target), _), (sends, receives) in channels.items():
        for sent, received in zip(sends, receives):
            if (sent.event.shape, sent.event.dtype) != (received.event.shape, received.event.dtype):
                problems.append(_unequal(mesh, sent, received))
                break
        else:
            if len(sends) != len(receives):
                longer, other = (sends, "receive") if len(sends) > len(receives) else (receives, "send")
                seen = longer[min(len(sends), len(receives))]
                rank = target if other == "receive" else source
                message = (
                    f"rank {seen.rank} calls {seen}, and rank {rank} has no {other} for it\n"
                    f"    rank {seen.rank}: {_at(seen.event)}\n"
                    f"    rank {rank}: {min(len(sends), len(receives))} such calls, rank {seen.rank} {len(longer)}"
                )
                problems.append(Problem("collectives", message, (seen.rank, rank), tuple(places(seen.event))))
    return problems


def _unequal(mesh: Mesh, sent: _Seen, received: _Seen) -> Problem:
    def place(seen: _Seen) -> str:
        return f"stage {mesh.coordinate('pp', seen.rank)} (rank {seen.rank})" if between else f"rank {seen.rank}"

    between = mesh.coordinate("pp", sent.rank) != mesh.coordinate("pp", received.rank)
    message = (
        f"{place(sent)} sends {sent.event.dtype} {list(sent.event.shape or ())}, and {place(received)} expects "
        f"{received.event.dtype} {list(received.event.shape or ())}\n"
        f"    rank {sent.rank}: {_at(sent.event)}\n"
        f"    rank {received.rank}: {_at(received.event)}"
    )
    kind = "pipeline" if between else "collectives"
    return Problem(kind, message, (sent.rank, received.rank), (*places(sent.event), *places(received.event)))


# --- the schedule -----------------------------------------------------------------------------------------------------


def compare_schedule(mesh: Mesh, schedule: Schedule | None) -> list[Problem]:
    """Whether the messages of all microbatches, in the order in which each stage makes them, come to an end.

    Args:
        schedule: of the pipeline model; None: there is no pipeline.
    """
    if schedule is None:
        return []
    try:
        simulate(schedule)
    except RuntimeError as error:
        what = (
            f"the schedule of {schedule.num_microbatches} microbatches over {schedule.num_stages} stages cannot run: "
            f"{error}"
        )
        return [Problem("pipeline", what, tuple(mesh.groups("pp")[0]), error=error)]
    return []
