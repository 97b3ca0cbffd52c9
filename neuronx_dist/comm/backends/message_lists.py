"""Lists of tensors on gloo: each large one travels alone, between the callers' tensors; the others in one buffer.

This saves the copies into a buffer and out of it. An all_gather of a large tensor is a message to each other
rank, from its own memory into theirs; so is a reduce_scatter, whose pieces are added in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...torch_internals.tensors import is_alias_of
from ..base import Communicator, WorkLike, Works

__all__ = ["LARGE", "REDUCE", "exchange", "start_alone"]

# Bytes of a piece from which on it takes less time alone than copied into a buffer and out of it: as a message, and
# as an all_reduce of gloo, each of which costs about 1 ms on 2 ranks and 4 ms on 4.
LARGE = {"all_gather": 1 << 16, "reduce_scatter": 1 << 16, "all_reduce": 1 << 20}
REDUCE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def start_alone(
    comm: Communicator, verb: str, x: torch.Tensor, op: str, out: torch.Tensor | None, tag: int
) -> tuple[WorkLike, torch.Tensor]:
    """Starts a collective of one tensor, with the result in `out` if there is one; returns the work and the result."""
    if verb == "all_reduce":
        result = x.clone() if out is None else out
        if not _is_same_memory(result, x):
            result.copy_(x)
        return comm.start_all_reduce(result, op), result
    if verb == "all_gather":
        result = x.new_empty(comm.size, *x.shape) if out is None else out
        pieces = result.view(comm.size, *x.shape)
        local_piece = pieces[comm.rank]
        if not _is_same_memory(local_piece, x):
            local_piece.copy_(x)
        return Works(exchange(comm, [x] * comm.size, pieces.unbind(), tag)), result
    result = x.new_empty(x.shape[1:]) if out is None else out
    return _reduce_scatter(comm, x, op, result, tag), result


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two contiguous tensors of one size are the same part of one storage."""
    is_alias = is_alias_of(a, b)
    return is_alias and a.storage_offset() == b.storage_offset()


def exchange(
    comm: Communicator, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int
) -> list[WorkLike]:
    """Sends `sent[i]` to each other rank i, and receives `received[i]` from it. Empty tensors do not travel."""
    works: list[WorkLike] = []
    for step in range(1, comm.size):  # nearest neighbours first; receives before sends, so that nothing is buffered
        src, dst = (comm.rank - step) % comm.size, (comm.rank + step) % comm.size
        if received[src].numel():
            works.append(comm.start_recv(received[src], src, tag))
        if sent[dst].numel():
            works.append(comm.start_send(sent[dst], dst, tag))
    return works


def _reduce_scatter(comm: Communicator, x: torch.Tensor, op: str, out: torch.Tensor, tag: int) -> WorkLike:
    """`[size, ...] -> [...]`. The first piece of another rank is received in `out`, the others beside it."""
    others = [index for index in range(comm.size) if index != comm.rank]
    pieces = list(x.unbind())  # the pieces of the other ranks are replaced by the received ones
    sent = list(pieces)
    scratch = out.new_empty(len(others) - 1, *out.shape)
    for index, buffer in zip(others, (out, *scratch.unbind())):
        pieces[index] = buffer
    works = exchange(comm, sent, pieces, tag)

    def reduce() -> None:
        # In rank order, whatever the rank: of the first two it does not matter which one is `out`.
        REDUCE[op](pieces[0], pieces[1], out=out)
        for piece in pieces[2:]:
            REDUCE[op](out, piece, out=out)

    return Works(works, reduce)
