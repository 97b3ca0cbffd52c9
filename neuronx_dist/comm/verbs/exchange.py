"""`comm.exchange`: each rank sends each other rank a tensor, whose size both sides know before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...call_site import reissues
from ...torch_internals.operators import skip_in_compiler
from .. import recording
from ..base import Communicator, Handle
from ..context import AxisLike, communicator
from .dispatch import Result, run
from .transformed_tensors import transforming, untransformed

__all__ = ["exchange"]


@skip_in_compiler  # its messages are methods of process groups, which dynamo cannot trace
def exchange(
    sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], axis: AxisLike, *, async_op: bool = False
) -> Result:
    """Fills `recvs[i]` with the `sends[me]` of the rank with group index i; returns `recvs`.

    Both have an entry for each rank of the group, this one included (a copy that does not travel). Empty tensors do not
    travel either, but every rank of the group calls this, in the same order. A record contains `[n]`, the number of
    elements sent to other ranks or received from them, whichever is larger.

    Args:
        sends: of any shapes, one dtype and device. They may be changed once the exchange is awaited.
        recvs: contiguous, of that dtype and device; `recvs[i]` has as many elements as rank i sends here.

    Raises:
        ValueError: an entry is missing, or cannot be sent or filled.
        CommError: two ranks do not expect the same number of elements; on XLA: shards have unequal sizes.
    """
    if has_torch_function_unary(sends):
        return _hand_over(sends, recvs, axis, {"async_op": True} if async_op else {})
    comm = communicator(axis)
    rank = int(comm.rank)  # the sizes depend on the rank: a check plays each rank
    _check(sends, recvs, comm, rank)
    if transforming():
        sends = [untransformed(x, "exchange") for x in sends]
    sent = _flat(sends, lambda x: x.detach().reshape(-1).contiguous())
    received = _flat(recvs, lambda y: y.detach().view(-1))
    if sent[rank].numel():
        received[rank].copy_(sent[rank])
    if len(comm.ranks) == 1:
        return Handle(comm, "", None, None, result=recvs) if async_op else recvs
    if recording.recorders:
        others = [[x for index, x in enumerate(xs) if index != rank] for xs in (sent, received)]
        messages = sum(bool(x.numel()) for x in others[0])
        recording.note(comm, "exchange", max(others, key=recording.shape_of), messages=messages)
    sent[rank], received[rank] = sent[rank][:0], received[rank][:0]
    return run(comm, "exchange", sent, lambda: comm.start_exchange(received, sent), async_op, lambda: recvs)


def _flat(xs: Sequence[torch.Tensor], flatten: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Flattens each tensor once: most of many ranks may share an empty one."""
    flat = {key: flatten(x) for key, x in {id(x): x for x in xs}.items()}
    return [flat[id(x)] for x in xs]


@reissues
def _hand_over(sends: Any, recvs: Any, axis: AxisLike, keywords: dict[str, Any]) -> Result:
    return handle_torch_function(exchange, (sends,), sends, recvs, axis, **keywords)


def _check(sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], comm: Communicator, rank: int) -> None:
    size = len(comm.ranks)
    if not len(sends) == len(recvs) == size:
        raise ValueError(
            f"exchange over {comm.axis}: {len(sends)} tensors to send and {len(recvs)} to receive, but {size} "
            "ranks; pass one of each for each rank, empty if there is nothing to transfer"
        )
    first = sends[0]
    for name, xs in (("sends", sends), ("recvs", recvs)):
        for index, x in {id(x): (index, x) for index, x in enumerate(xs)}.values():
            if x.dtype != first.dtype or x.device != first.device:
                raise ValueError(
                    f"exchange over {comm.axis}: {name}[{index}] is {x.dtype} on {x.device}, but sends[0] is "
                    f"{first.dtype} on {first.device}; all tensors must have the same dtype and device"
                )
    for index, x in {id(x): (index, x) for index, x in enumerate(recvs)}.values():
        if not x.is_contiguous():
            raise ValueError(
                f"exchange over {comm.axis}: recvs[{index}] must be contiguous, got strides {x.stride()} for shape "
                f"{tuple(x.shape)}"
            )
    if sends[rank].numel() != recvs[rank].numel():
        raise ValueError(
            f"exchange over {comm.axis}: sends[{rank}] has {sends[rank].numel()} elements, but recvs[{rank}] has "
            f"{recvs[rank].numel()}; both belong to this rank and must have the same size"
        )
