"""Collectives of a backend that lacks some of them, done by those that it has (`capabilities.py`).

    missing             done by
    all_reduce          all_gather, and a reduction in rank order
    reduce_scatter      all_reduce, of which each rank keeps its piece
    broadcast           all_gather
    all_to_all          all_gather
    permute             broadcasts in groups of two ranks, which all ranks start in one order
    exchange            an all_to_all of unequal parts; an all_to_all of parts padded to the largest
    send, recv          broadcasts, between the two ranks of a group that `comm.new_group` made; else an error
    objects             texts in the job's store

No substitute waits for a rank outside its group, and the members of every group start its collectives in one order.
Therefore none depends on collectives of different groups running at the same time.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base import DONE, Communicator, WorkLike, Works
from ..errors import CommError
from .capabilities import METHODS, Capabilities, without
from .message_lists import REDUCE

__all__ = ["OPS", "Substitutes", "pairs_in_order"]

OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def pairs_in_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns `(source, target)` pairs in the order in which all ranks start their messages.

    Every order that all ranks share excludes a deadlock. In this one the neighbours of a line take two rounds.

    >>> pairs_in_order([(0, 1), (1, 2), (2, 3)])
    [(0, 1), (2, 3), (1, 2)]
    """
    return sorted(pairs, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair))


class Substitutes(Communicator):
    """A communicator's collectives, where the backend lacks some; a subclass inherits the others from another class.

    Attributes:
        group: the process group.
        capabilities: of its backend.
        pair: returns the communicator of this rank and another one, by both indices in ascending order; both ranks
            call it.
        one_way: communicators by the index of the sender, on which `send` and `recv` are broadcasts; empty: none.
        board: of the backend.
        object_numbers: numbers of the group's `gather_objects`, equal on all its ranks.
    """

    group: dist.ProcessGroup
    capabilities: Capabilities
    pair: Callable[[int, int], Communicator]
    one_way: Sequence[Communicator] = ()
    board: Any
    object_numbers: Iterator[int]

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        if self.capabilities.has("all_reduce"):
            return _started(super().start_all_reduce(buffer, op))
        gathered = buffer.new_empty(self.size, *buffer.shape)

        def reduce() -> None:
            total = buffer.copy_(gathered[0])
            for piece in gathered[1:]:
                REDUCE[op](total, piece, out=total)

        return Works([self.start_all_gather(gathered, buffer)], reduce)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        out, x = _real(gathered), _real(x)
        name = self._method("all_gather")
        options = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.asyncOp = True
        if name == "allgather":
            return _started(self.group.allgather([list(out.unbind())], [x], options))
        return _started(getattr(self.group, name)(out.view(-1), x.view(-1), options))

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        if not self.capabilities.has("reduce_scatter"):
            whole = scattered.clone()
            return Works([self.start_all_reduce(whole, op)], lambda: _copy(out, whole[self.rank]))
        out, scattered = _real(out), _real(scattered)
        name = self._method("reduce_scatter")
        options = distributed_c10d.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = OPS[op], True
        if name == "reduce_scatter":
            return _started(self.group.reduce_scatter([out], [list(scattered.unbind())], options))
        return _started(getattr(self.group, name)(out.view(-1), scattered.view(-1), options))

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        if not self.capabilities.has("all_to_all"):
            whole = scattered.new_empty(self.size, *scattered.shape)
            work = self.start_all_gather(whole, scattered)
            return Works([work], lambda: _copy(gathered, whole[:, self.rank]))
        out, scattered = _real(gathered), _real(scattered)
        name = self._method("all_to_all")
        if name == "alltoall":
            options = distributed_c10d.AllToAllOptions()
            options.asyncOp = True
            return _started(self.group.alltoall(list(out.unbind()), list(scattered.unbind()), options))
        return self._all_to_all(name, out, scattered, [], [])

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        if self.capabilities.has_messages:
            return super().start_permute(out, x, pairs)
        out.zero_()
        works: list[WorkLike] = []
        for src, dst in pairs_in_order(pairs):
            if src == dst == self.rank:
                out.copy_(x)
            elif self.rank in (src, dst):
                pair = self.pair(min(src, dst), max(src, dst))
                works.append(pair.start_broadcast(x if src == self.rank else out, int(src > dst)))
        return Works(works)

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        if self.capabilities.has_messages:
            return super().start_exchange(received, sent)
        sizes, sizes_received = [x.numel() for x in sent], [x.numel() for x in received]
        if self.capabilities.has("all_to_all") and self.capabilities.unequal_all_to_all:
            name = self._method("all_to_all")
            x, out = torch.cat([*sent]), sent[0].new_empty(sum(sizes_received))
            if name == "alltoall":
                pieces = [_real(piece) for piece in out.split(sizes_received)]
                work = _started(self.group.alltoall(pieces, [_real(piece) for piece in x.split(sizes)]))
            else:
                work = self._all_to_all(name, _real(out), _real(x), sizes_received, sizes)
            return Works([work], lambda: _deliver(received, out.split(sizes_received)))
        return self._exchange_padded(received, sent)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        if self.capabilities.has("broadcast"):
            return _started(super().start_broadcast(buffer, src))
        gathered = buffer.new_empty(self.size, *buffer.shape)
        return Works([self.start_all_gather(gathered, buffer)], lambda: _copy(buffer, gathered[src]))

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        if self.capabilities.has_messages:
            return super().start_send(x, dst, tag)
        return self._one_way(self.rank, "send").start_broadcast(x, self.rank)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        if self.capabilities.has_messages:
            return super().start_recv(out, src, tag)
        return self._one_way(src, "recv").start_broadcast(out, src)

    def gather_objects(self, obj: Any) -> list[Any]:
        if self.capabilities.gathers_objects:
            return super().gather_objects(obj)
        text = base64.b64encode(pickle.dumps(obj)).decode()
        topic, number = f"objects/{self.group.group_name}", next(self.object_numbers)
        texts = self.board.exchange(topic, number, text, self.ranks, self.describe("gather_objects"))
        return [pickle.loads(base64.b64decode(texts[rank])) for rank in self.ranks]

    def _exchange_padded(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        """Exchanges parts that are all as long as the longest one of the group, which an all-gather finds first."""
        first = sent[0]
        longest = max(x.numel() for x in (*sent, *received))
        lengths = torch.empty(self.size, 8, dtype=torch.uint8, device=first.device)  # bytes: every backend has them
        local_length = torch.tensor([longest], dtype=torch.int64).view(torch.uint8).to(first.device)
        self.start_all_gather(lengths, local_length).wait()
        longest = int(lengths.cpu().view(torch.int64).max())
        if not longest:
            return DONE
        padded, out = (first.new_zeros(self.size, longest) for _ in range(2))
        for row, x in zip(padded, sent):
            row[: x.numel()].copy_(x)
        work = self.start_all_to_all(out, padded)
        return Works([work], lambda: _deliver(received, [row[: y.numel()] for row, y in zip(out, received)]))

    def _all_to_all(
        self, name: str, out: torch.Tensor, x: torch.Tensor, sizes_received: list[int], sizes_sent: list[int]
    ) -> WorkLike:
        options = distributed_c10d.AllToAllOptions()
        options.asyncOp = True
        return _started(getattr(self.group, name)(out, x, sizes_received, sizes_sent, options))

    def _one_way(self, src: int, verb: str) -> Communicator:
        if not self.one_way:
            raise CommError(f"{self.describe(verb)}: {without(self.capabilities.backend, verb)}")
        return self.one_way[src]

    def _method(self, verb: str) -> str:
        """Returns the name of the group's method for a verb that the group has."""
        return next(name for name in METHODS[verb] if name in self.capabilities.methods and hasattr(self.group, name))


def _started(work: WorkLike | None) -> WorkLike:
    """Returns the work of a call; a backend that is done when the call returns may return None."""
    return DONE if work is None else work


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.dtype.is_complex else x


def _copy(out: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        out.copy_(value)


def _deliver(received: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    for y, part in zip(received, parts):
        _copy(y, part)
