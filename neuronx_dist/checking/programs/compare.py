"""All ranks' communication against each other, without running any of it.

Every rank has a list of events. Collectives are matched strictly: a rank waits in each until all ranks of its group are
in the same one, although some are asynchronous in reality, so that an order which differs between ranks is found even
where two groups are involved. Messages do not wait; the sends and receives of two ranks are paired in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...comm.backends.observed import CheckCommunicator, Event
from ...comm.ranks.rank_values import rank_values_in
from ...mesh import Mesh
from ..report import Problem
from .cells import Cells
from .explore import Explored, RankProgram

__all__ = ["compare_events"]


@dataclass(eq=False)
class _Group:
    """A group of ranks that communicate.

    Attributes:
        ranks: all of them.
        compared: those whose events are compared.
    """

    ranks: tuple[int, ...]
    compared: list[int]


class _Seen:
    """An event as a certain rank does it."""

    __slots__ = ("event", "group", "rank", "what")

    def __init__(self, event: Event, group: _Group) -> None:
        self.event = event
        self.rank = event.rank
        self.group = group
        source = event.peer if event.verb == "broadcast" else None
        # Arguments that have to be equal on all ranks of the group.
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


# --- which ranks to look at -------------------------------------------------------------------------------------------


def is_message(event: Event) -> bool:
    """Returns whether an event is a message between two ranks, and no collective."""
    return event.verb in ("send", "recv")


def ranks_for_collectives(explored: Explored) -> list[int]:
    """Returns one rank per cell, with cells split until mismatched collectives of any rank show among these.

    Each represents the ranks of its cell, which run the same program with the same sources. Then all that a rank of a
    group waits for has to be found in the group of the rank's representative: the representatives of the group's
    members have to be the compared ranks of that group. Groups along axes, which are products of atoms as the cells
    are, satisfy it. Explicit lists of ranks are checked one by one.
    """
    cells = explored.programs.cells.copy()
    events = [event for program in explored.distinct for event in program.events if not is_message(event)]
    for event in events:
        for number in rank_values_in((event.peer_index, event.pairs)):
            cells.cut(number.table)
    lists = _explicit_lists(cells, events)
    _separate_until(cells, lists, lambda: all(_is_covered(cells, groups) for groups in lists))
    return cells.representatives()


def ranks_for_messages(explored: Explored) -> list[int]:
    """Ranks that suffice for messages: the full groups of ranks that send any, and one rank of each other cell."""
    cells = explored.programs.cells.copy()
    events = [event for program in explored.distinct for event in program.events if is_message(event)]
    for event in events:
        for number in rank_values_in((event.peer_index, event.tag)):
            cells.cut(number.table)
    for axis in {mesh_groups.axis for event in events if (mesh_groups := _communicator(event).mesh_groups) is not None}:
        cells.separate(cells.atoms_of(axis))
    lists = _explicit_lists(cells, events)
    for groups in lists:
        cells.separate(_atoms_within(cells, groups))
    _separate_until(cells, lists, lambda: all(_is_moved_whole(cells, groups) for groups in lists))
    return cells.representatives()


_Lists = list[tuple[int, ...]]


def _explicit_lists(cells: Cells, events: Iterable[Event]) -> list[_Lists]:
    """The groups, as lists of ranks, that lie along no axis of the mesh, or along a part of an axis that is no atom."""
    communicators = {id(event.communicator): _communicator(event) for event in events}
    lists = {
        tuple(communicator.all_groups())
        for communicator in communicators.values()
        if communicator.mesh_groups is None or not cells.is_of_atoms(communicator.mesh_groups.axis)
    }
    return [[group for group in groups if len(group) > 1] for groups in lists]


def _communicator(event: Event) -> CheckCommunicator:
    assert event.communicator is not None
    return event.communicator


def _separate_until(cells: Cells, lists: list[_Lists], fits: Callable[[], bool]) -> None:
    """Separates the ranks of each group, and all ranks if that is not enough."""
    for take_apart in (lambda groups: _atoms_within(cells, groups), lambda groups: cells.atoms):
        if fits():
            return
        for groups in lists:
            cells.separate(take_apart(groups))


def _atoms_within(cells: Cells, groups: _Lists) -> set[str]:
    return {atom for group in groups for rank in group[1:] for atom in cells.atoms_between(group[0], rank)}


def _is_covered(cells: Cells, groups: _Lists) -> bool:
    """Returns whether each representative waits for exactly the representatives of its cell's group members."""
    group_of = {rank: group for group in groups for rank in group}
    stands_for = {rank: cells.representative(rank) for rank in group_of}
    compared_with = {
        one: {rank for rank in group_of.get(one, (one,)) if stands_for.get(rank, rank) == rank}
        for one in set(stands_for.values())
    }
    in_groups = Counter(stands_for.values())
    for one, group_ranks in compared_with.items():
        if in_groups[one] < cells.count(one) and group_ranks != {one}:
            return False  # it stands for ranks that are in no group
    return all(
        compared_with[stands_for[rank]] == {stands_for[member] for member in group}
        for group in groups
        for rank in group
    )


def _is_moved_whole(cells: Cells, groups: _Lists) -> bool:
    """Returns whether replacing each group's members by their representatives yields a group, in order."""
    known = set(groups)
    return all(tuple(map(cells.representative, group)) in known for group in groups) and _is_covered(cells, groups)


# --- collectives and messages -----------------------------------------------------------------------------------------


def compare_events(explored: Explored) -> list[Problem]:
    """Problems: collectives that ranks of a group call differently or not at all; messages without a peer."""
    problem = _Meeting(explored.programs, ranks_for_collectives(explored)).run()
    return [problem] if problem is not None else _messages(explored)


class _Queue:
    """The collectives of a rank, and the position of the next one."""

    def __init__(self, rank: int, events: Sequence[Event], group_of: Callable[[Event, int], _Group]) -> None:
        self.rank = rank
        self.position = 0
        self._events = events
        self._group_of = group_of
        self._head: _Seen | None = None

    @property
    def head(self) -> _Seen | None:
        if self._head is None and self.position < len(self._events):
            self._head = self._seen(self._events[self.position])
        return self._head

    def advance(self) -> None:
        self.position += 1
        self._head = None

    def rest(self) -> Iterator[_Seen]:
        return map(self._seen, self._events[self.position :])

    def _seen(self, event: Event) -> _Seen:
        local_event = event if event.rank == self.rank else event.on(self.rank)
        return _Seen(local_event, self._group_of(event, self.rank))


class _Meeting:
    """Runs the collectives of ranks against each other."""

    def __init__(self, programs: Mapping[int, RankProgram], compared: Sequence[int]) -> None:
        self._groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._group_of_rank: dict[tuple[int, int], _Group] = {}  # by communicator and rank
        self._collectives: dict[int, list[Event]] = {}  # by program
        self.queues: dict[int, _Queue] = {}
        for rank in compared:
            program = programs[rank]
            if id(program) not in self._collectives:
                self._collectives[id(program)] = [event for event in program.events if not is_message(event)]
            self.queues[rank] = _Queue(rank, self._collectives[id(program)], self._group_of)

    def _group_of(self, event: Event, rank: int) -> _Group:
        key = id(event.communicator), rank
        if key not in self._group_of_rank:
            ranks = _communicator(event).ranks_of(rank)
            if (event.axis, ranks) not in self._groups:
                self._groups[event.axis, ranks] = _Group(ranks, [member for member in ranks if member in self.queues])
            self._group_of_rank[key] = self._groups[event.axis, ranks]
        return self._group_of_rank[key]

    def run(self) -> Problem | None:
        waiting = list(self.queues)
        while waiting:
            moved: list[int] = []
            for rank in waiting:
                head = self.queues[rank].head
                if head is None:
                    continue
                others = [self.queues[member] for member in head.group.compared]
                heads = [queue.head for queue in others]
                if all(other is not None and other.group is head.group for other in heads):
                    first, *rest = (other for other in heads if other is not None)
                    for other in rest:
                        if other.what != first.what:
                            return self._differ(first, other)
                    if unequal := _unequal_exchange([first, *rest]):
                        return unequal
                    for queue in others:
                        queue.advance()
                    moved += head.group.compared
            waiting = list(dict.fromkeys(moved))
        stuck = [queue.head for queue in self.queues.values() if queue.head is not None]
        return self._stuck(stuck) if stuck else None

    def _differ(self, one: _Seen, other: _Seen) -> Problem:
        """Reports that two ranks are in different collectives of one group."""
        if one.rank > other.rank:
            one, other = other, one
        first, second = self.queues[one.rank], self.queues[other.rank]
        first_calls = [seen.what for seen in first.rest() if seen.group is one.group]
        second_calls = [seen.what for seen in second.rest() if seen.group is one.group]
        if first_calls[1:2] == second_calls[:1] and len(first_calls) > len(second_calls):
            return self._missing(one, other.rank, other)
        if second_calls[1:2] == first_calls[:1] and len(second_calls) > len(first_calls):
            return self._missing(other, one.rank, one)
        if first_calls[1:2] == second_calls[:1] and second_calls[1:2] == first_calls[:1]:
            return _unlike(
                [one, other],
                f"ranks {one.rank} and {other.rank} call two collectives over {one.event.axis} in different orders",
                "Call them in one order on all ranks.",
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
        repair = "All ranks of a group must make the same call."
        return _unlike([one, other], f"ranks {one.rank} and {other.rank} {what}", repair)

    def _stuck(self, heads: Sequence[_Seen]) -> Problem:
        """Reports a deadlock: a rank never calls the collective, or ranks wait for one another in different groups."""
        for head in heads:
            for rank in head.group.compared:
                if not any(seen.group is head.group for seen in self.queues[rank].rest()):
                    return self._missing(head, rank, self.queues[rank].head)
        # All ranks call it, but in another order: follow the rank that each one waits for, until the chain closes.
        chain = [heads[0]]
        circle: list[_Seen] = []
        while not circle:
            last = chain[-1]
            present = [self.queues[rank].head for rank in last.group.compared]
            other = next(seen for seen in present if seen is not None and seen.group is not last.group)
            if last.rank in other.group.compared:
                circle = [last, other]
            elif other in chain:
                circle = chain[chain.index(other) :]
            chain.append(other)
        ranks, axes = ([*dict.fromkeys(column)] for column in zip(*((seen.rank, seen.event.axis) for seen in circle)))
        return _unlike(
            circle,
            f"ranks {_and(ranks)} wait for each other: they call collectives over {_and(axes)} in different orders",
            "Call them in one order on all ranks.",
        )

    def _missing(self, extra: _Seen, rank: int, instead: _Seen | None) -> Problem:
        then = f"its next is {instead} at {_at(instead.event)}" if instead is not None else "it has ended by then"
        lines = [*places(extra.event), *(places(instead.event) if instead is not None else [])]
        message = (
            f"rank {extra.rank} calls {extra}, and rank {rank} of the same group does not\n"
            f"    rank {extra.rank}: {_at(extra.event)}\n"
            f"    rank {rank}: {then}\n"
            f"    Is it inside a branch that only some ranks take? Call it on all ranks of {extra.event.axis} "
            f"{_shown(extra.group.ranks)}, or on none."
        )
        return Problem("collectives", message, (extra.rank, rank), tuple(lines))


def _unequal_exchange(members: Sequence[_Seen]) -> Problem | None:
    """Two ranks of an `exchange` that expect different numbers of elements between them."""
    if members[0].event.verb != "exchange":
        return None
    for source in members:
        for target in members:
            (sent, _), (_, expected) = source.event.sizes, target.event.sizes
            ranks = source.group.ranks
            goes, comes = sent[ranks.index(target.rank)], expected[ranks.index(source.rank)]
            if goes != comes:
                what = f"rank {source.rank} sends {goes} elements to rank {target.rank}, which expects {comes}"
                repair = "Both sides of an exchange must pass the same sizes."
                return _unlike([source, target] if source is not target else [source], what, repair)
    return None


def _unlike(seen: Sequence[_Seen], what: str, repair: str) -> Problem:
    message = f"{what}\n" + "".join(f"    rank {one.rank}: {one} at {_at(one.event)}\n" for one in seen)
    lines = [place for one in seen for place in places(one.event)]
    return Problem("collectives", f"{message}    {repair}", tuple(one.rank for one in seen), tuple(lines))


def _and(items: Sequence[Any]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))


def _shown(ranks: Sequence[int], most: int = 64) -> str:
    if len(ranks) <= most:
        return str([*ranks])
    return f"[{', '.join(map(str, ranks[:most]))}, ...] ({len(ranks)} ranks)"


def _messages(explored: Explored) -> list[Problem]:
    """Pairs sends and receives between two ranks, in order."""
    mesh = explored.mesh
    channels: dict[Any, tuple[list[_Seen], list[_Seen]]] = {}
    sent_by = {id(program): [event for event in program.events if is_message(event)] for program in explored.distinct}
    for rank in ranks_for_messages(explored):
        for event in sent_by[id(explored.programs[rank])]:
            local_event = event if event.rank == rank else event.on(rank)
            seen = _Seen(local_event, _Group(local_event.ranks, []))
            ends = (rank, seen.peer) if local_event.verb == "send" else (seen.peer, rank)
            pair = channels.setdefault((local_event.axis, local_event.ranks, ends, local_event.tag), ([], []))
            pair[local_event.verb == "recv"].append(seen)
    problems = []
    for (_, _, (source, target), _), (sends, receives) in channels.items():
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
