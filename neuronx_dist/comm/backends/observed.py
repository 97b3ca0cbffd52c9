"""A backend for checking programs: shapes only, with a record of every collective and of every read of the rank.

    backend = CheckBackend(on_read=lambda axes: ...)
    with comm.as_rank(mesh, rank, backend):
        program()                                # on fake or meta tensors, one rank in place of many
    backend.events                               # its collectives in order, with call sites, backward included
    backend.reads                                # where it read its rank, and the answers of all other ranks
    backend.same_program(other)                  # whether rank `other`, running it, would have done the same

Inside, `comm.rank(axis)`, `current().rank`, `mesh.coordinate(axis, current().rank)`, `mesh.group_of(axis, rank)` and a
communicator's `rank`, `global_rank` and `ranks` are `RankValue`s (comm/ranks says what counts as a read).
To check a whole mesh: play rank 0; then each rank that is not `same_program` to any that was played before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ...call_site import call_in_words, call_sites
from ...mesh import Groups, Mesh
from .. import backends
from ..base import Backend, Communicator, WorkLike
from ..ranks.observed_ranks import ObservedRank, Read
from ..ranks.rank_numbers import concrete
from ..ranks.rank_values import RankValue, value_on
from .shapes import ShapesCommunicator

__all__ = ["CheckBackend", "CheckCommunicator", "Event"]


@dataclass(eq=False)
class Event:
    """One collective as this rank starts it, on the wire: ranks that match in these fields meet."""

    number: int  # runs through starts and waits of the whole program
    verb: str  # all_reduce, ..., send, recv, gather_objects (of barrier and broadcast_object too)
    axis: str  # name of the group: "tp", "dp,cp", a label given to new_group
    op: str | None  # sum, max, min; None where nothing is reduced
    shape: tuple[int, ...] | None  # sent (recv: received); reduce_scatter and all_to_all: [size, *piece]
    dtype: torch.dtype | None  # None for objects
    ranks: tuple[int, ...]  # global ranks of the group, in the order of the group
    rank: int  # the global rank that starts it
    where: str  # file:line of the user's code
    inside: str  # file:line of the innermost frame outside comm/ and torch: the layer, or the same as `where`
    phase: str  # `CheckBackend.phase` at the time
    peer: int | None = None  # global rank of the other end of send and recv, and of a broadcast's source
    tag: int = 0  # of send and recv; may be a RankValue
    pairs: tuple[tuple[int, int], ...] = ()  # of permute: group indices
    sizes: tuple[tuple[int, ...], ...] = ()  # of exchange: numbers of elements to, and from, each index of the group
    awaited: int | None = None  # number at which it was first waited for; start and wait together: `number + 1`
    communicator: CheckCommunicator | None = field(default=None, repr=False)
    peer_index: int | None = field(default=None, repr=False)  # as passed: an index in the group

    def on(self, rank: int) -> Event:
        """Returns this event as another rank with the same program has it: in that rank's group, with its peer."""
        assert self.communicator is not None
        ranks = self.communicator.ranks_of(rank)
        peer = ranks[value_on(self.peer_index, rank)] if self.peer_index is not None else None
        pairs = tuple((value_on(source, rank), value_on(target, rank)) for source, target in self.pairs)
        return replace(self, rank=rank, ranks=ranks, peer=peer, tag=value_on(self.tag, rank), pairs=pairs)

    @property
    def key(self) -> tuple[Any, ...]:
        """Fields that must be equal on all ranks of the group (for send and recv: see `peer`)."""
        source = self.peer if self.verb == "broadcast" else None
        return self.verb, self.axis, self.ranks, self.op, self.shape, self.dtype, source, self.pairs

    def __str__(self) -> str:
        what = f"{self.verb}({self.op})" if self.op else self.verb
        if self.verb in ("send", "recv"):
            tag = f" tag {concrete(self.tag)}" if concrete(self.tag) else ""
            what += f" {'to' if self.verb == 'send' else 'from'} rank {self.peer}{tag}"
        data = f" of {list(self.shape)} {str(self.dtype).removeprefix('torch.')}" if self.shape is not None else ""
        return f"{what}{data} over {self.axis} {list(self.ranks)} at {self.where}"


class _Work:
    def __init__(self, backend: CheckBackend, event: Event) -> None:
        self._backend, self._event = backend, event

    def wait(self) -> None:
        if self._event.awaited is None:
            self._event.awaited = self._backend._next()


class CheckCommunicator(ShapesCommunicator):
    """A communicator of the shapes backend that records each collective, and whose ranks are RankValues."""

    def __init__(
        self,
        axis: str,
        groups: Sequence[Sequence[int]],
        observed: ObservedRank,
        backend: CheckBackend,
        symbolic: bool,
    ) -> None:
        self.axis = axis
        self.backend = backend
        self._observed = observed
        self._symbolic = symbolic
        self._groups = groups
        self._known: dict[int, tuple[int, ...]] = {}
        self.concrete_ranks = self.ranks_of(observed.number)
        self._size = len(self.concrete_ranks)
        self._rank: int | None = None
        self._ranks: tuple[int, ...] | None = None
        if symbolic and not isinstance(groups, Groups) and len({len(group) for group in groups} - {1}) > 1:
            self._size = self._of_each_rank(lambda group, index: len(group))

    @property
    def mesh_groups(self) -> Groups | None:
        """Groups of all ranks, if these are the groups along an axis of the mesh."""
        return self._groups if isinstance(self._groups, Groups) else None

    def _of_each_rank(self, value: Callable[[Sequence[int], int], int]) -> int:
        """Returns the results of `value` for each rank's group and index in the group."""
        by_rank = {rank: value(group, index) for group in self._groups for index, rank in enumerate(group)}
        return self._observed.value(self._observed.table_by_rank(by_rank))

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank's index in the group, as a RankValue."""
        if self._rank is None:
            if not self._symbolic:
                self._rank = self.concrete_ranks.index(self._observed.number)
            elif isinstance(self._groups, Groups):
                self._rank = self._observed.mesh.coordinate(self._groups.axis, self._observed.rank)
            else:
                self._rank = self._of_each_rank(lambda group, index: index)
        return self._rank

    @property
    def global_rank(self) -> int:  # type: ignore[override]
        return self._observed.rank if self._symbolic else self._observed.number

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Global ranks of the group: numbers that depend on this rank's coordinates along the other axes."""
        if self._ranks is None:
            if not self._symbolic:
                self._ranks = self.concrete_ranks
            elif isinstance(self._groups, Groups):
                self._ranks = self._observed.group(self._groups.axis)
            elif isinstance(self.size, RankValue):
                ranks: tuple[int, ...] = self._observed.read(self._observed.table_by_rank(self._by_rank))
                return ranks
            else:
                self._ranks = self._observed.group_in(self._groups, self.rank)
        return self._ranks

    @cached_property
    def _by_rank(self) -> dict[int, tuple[int, ...]]:
        return {rank: ranks for ranks in map(tuple, self._groups) for rank in ranks}

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group of `rank` that corresponds to this group."""
        if rank not in self._known:
            by_rank = self._groups
            self._known[rank] = tuple(by_rank.of(rank)) if isinstance(by_rank, Groups) else self._by_rank[rank]
        return self._known[rank]

    def all_groups(self) -> list[tuple[int, ...]]:
        """Groups of all ranks."""
        return [tuple(group) for group in self._groups]

    def _event(
        self,
        verb: str,
        x: torch.Tensor | None,
        op: str | None = None,
        peer: int | None = None,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> _Work:
        where, inside = call_sites()
        event = Event(
            self.backend._next(),
            verb,
            self.axis,
            op,
            tuple(map(int, x.shape)) if x is not None else None,
            x.dtype if x is not None else dtype,
            self.concrete_ranks,
            self._observed.number,
            where,
            inside,
            self.backend.phase,
            peer=self.concrete_ranks[concrete(peer)] if peer is not None else None,
            communicator=self,
            peer_index=peer,
            **more,
        )
        if not self.backend.silent:
            self.backend.events.append(event)
        return _Work(self.backend, event)

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        work = self._event("all_reduce", buffer, op)
        super().start_all_reduce(buffer, op)
        return work

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        super().start_all_gather(gathered, x)
        return self._event("all_gather", x)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        out.copy_(scattered[concrete(self.rank)])
        ShapesCommunicator.start_all_reduce(self, out, op)
        return self._event("reduce_scatter", scattered, op)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        super().start_all_to_all(gathered, scattered)
        return self._event("all_to_all", scattered)

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        super().start_permute(out, x, pairs)
        return self._event("permute", x, pairs=tuple(pairs))

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return self._event("broadcast", buffer, peer=src)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return self._event("send", x, peer=dst, tag=tag)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        out.zero_()
        return self._event("recv", out, peer=src, tag=tag)

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        super().start_exchange(received, sent)
        sizes = tuple(tuple(x.numel() for x in xs) for xs in (sent, received))
        return self._event("exchange", None, dtype=sent[0].dtype, sizes=sizes)

    def gather_objects(self, obj: Any) -> list[Any]:
        self._event("gather_objects", None).wait()
        return [obj] * self.size

    def describe(self, verb: str, site: str = "") -> str:
        ranks = f"ranks {list(self.concrete_ranks)}, seen from rank {self._observed.number}"
        return f"{verb} over {self.axis} ({ranks}) at {site or call_in_words()}"

    def __repr__(self) -> str:
        ranks, rank = list(self.concrete_ranks), concrete(self.rank)
        return f"{type(self).__name__}(axis={self.axis!r}, ranks={ranks}, rank={rank})"


class CheckBackend(Backend):
    """One rank's program under observation. One object for each program that is played.

    Args:
        on_read: called with the axes along which an answer differs each time the program reads its rank.
        symbolic: False: ranks are plain ints, and nothing is known about reads.
        silent: store no events (used by recorders, which run a program before it runs).

    Attributes:
        events: the collectives so far.
        phase: put into each event; set it to "forward", "backward", ...
        observed: the played rank, with its reads; None before a context is made.
    """

    name = "check"

    def __init__(
        self,
        on_read: Callable[[frozenset[str]], None] | None = None,
        *,
        symbolic: bool = True,
        silent: bool = False,
    ) -> None:
        self.on_read = on_read
        self.symbolic = symbolic
        self.silent = silent
        self.phase = ""
        self.events: list[Event] = []
        self.observed: ObservedRank | None = None
        self._number = 0

    @property
    def reads(self) -> list[Read]:
        """All distinct reads: `.axes`, `.where`, `.answer(coordinates)`."""
        return self.observed.reads if self.observed is not None else []

    def same_program(self, rank: int) -> bool:
        """Returns whether `rank` would have read the same answers, and so have decided equally so far."""
        assert self.observed is not None, "not in use yet"
        return self.observed.same_program(rank)

    def current_rank(self, mesh: Mesh, rank: int) -> int:
        observed = rank.observed if isinstance(rank, RankValue) else None
        if not isinstance(observed, ObservedRank) or observed.mesh != mesh:
            observed = ObservedRank(mesh, rank, self.on_read or (lambda axes: None))
        self.observed = observed
        return observed.rank if self.symbolic else observed.number

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        observed = self.observed
        assert observed is not None
        return CheckCommunicator(label, groups, observed, self, self.symbolic)

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        """Wraps a process group of the user. The groups of the other ranks are unknown, and assumed to differ."""
        observed = self.observed
        assert observed is not None
        ranks = backends.c10d.ranks_of_group(group)
        int(observed.rank)
        return CheckCommunicator(group.group_desc or "group", [ranks], observed, self, False)

    def _next(self) -> int:
        self._number += 1
        return self._number
