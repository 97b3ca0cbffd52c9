"""One rank of a job on fake tensors, which have shapes and no values: communicators that send nothing, and its weights.

`WireBackend` makes communicators that allocate the buffers of gloo or NCCL. `fakes_of` is a memo for `copy.deepcopy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm.backends.c10d import C10dCommunicator
from ..comm.base import Backend, Communicator, WorkLike
from ..mesh import Mesh
from ..spmd import random
from ..weights.partial_model import join, partial_model
from .meter import MemoryMeter

__all__ = ["MESSAGES", "WireBackend", "fakes_of", "playing"]

MESSAGES = "messages"  # the kind of memory of tensors that stages send


@contextmanager
def playing(mesh: Mesh, rank: int, wires: WireBackend, states: dict[str, Any] | None = None) -> Iterator[None]:
    """Makes this thread the rank of a mesh, with random streams of these states."""
    with comm.as_rank(mesh, rank, wires):
        random.streams().set_states(states or {})
        if random.TENSOR_PARALLEL not in random.streams().get_states():
            random.streams().add(random.TENSOR_PARALLEL, 0)
        yield


def fakes_of(model: nn.Module, device: torch.device) -> dict[int, Any]:
    """Returns fake tensors on `device` by the `id` of this rank's parameters and buffers: a memo for `copy.deepcopy`.

    Those of other ranks stand for themselves. To be called inside of the fake mode.
    """
    part = partial_model(model)
    fakes: dict[int, Any] = {}
    for prefix, module in part.original_module.named_modules():
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is None or id(x) in fakes:
                continue
            fakes[id(x)] = x
            if part.is_local(join(prefix, name)):
                fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                if isinstance(x, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=x.requires_grad)
                fake.__dict__.update(x.__dict__)
                fakes[id(x)] = fake
    return fakes


class _HoldingWork:
    """Finished work that holds its buffers until it is awaited, as the work of a real group does."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        self.buffers = buffers

    def wait(self) -> None:
        return None


class _MeasuringCommunicator(C10dCommunicator):
    """A communicator without a group, which sends nothing and allocates the buffers of the real communicator."""

    def __init__(self, label: str, ranks: Sequence[int], global_rank: int, wires: WireBackend) -> None:
        Communicator.__init__(self, label, ranks, global_rank)
        self._gloo = wires.is_gloo
        self._meter = wires.meter
        self._communicates = wires.communicates

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        self._communicates(buffer.nbytes)
        return _HoldingWork(buffer)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        self._communicates(gathered.nbytes)
        return super().start_all_gather(gathered, x) if self._gloo else _HoldingWork(gathered, x)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        self._communicates(scattered.nbytes)
        return super().start_reduce_scatter(out, scattered, op) if self._gloo else _HoldingWork(out, scattered)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        self._communicates(gathered.nbytes)
        return _HoldingWork(gathered, scattered)

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        self._communicates(sum(x.nbytes for x in received))
        return _HoldingWork(*received, *sent)

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return _HoldingWork(buffer)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return self._message(x)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        return self._message(out)

    def _message(self, buffer: torch.Tensor) -> WorkLike:
        if self.axis.startswith("pp"):
            self._meter.label([buffer], MESSAGES)
        return _HoldingWork(buffer)


class WireBackend(Backend):
    """Communicators without a group, which allocate the buffers of gloo or NCCL, and label messages in `meter`.

    Args:
        communicates: called with the number of bytes of each collective that is started.
    """

    name = "wire"

    def __init__(
        self, meter: MemoryMeter, device: torch.device, communicates: Callable[[int], None] = lambda sent: None
    ) -> None:
        self.meter = meter
        self._device = device
        self.is_gloo = device.type == "cpu"
        self.communicates = communicates

    @property
    def device(self) -> torch.device:
        return self._device

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        ranks = next(group for group in groups if global_rank in group)
        return _MeasuringCommunicator(label, ranks, global_rank, self)
