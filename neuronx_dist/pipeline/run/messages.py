"""Moving tensors between stages by messages: receives are posted ahead, sends are awaited when their window is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ... import comm
from ..cut.splitting import StagePlan
from ..schedule import Kind, Schedule, Task
from ..schedule.tasks import COMPUTATIONS, RECEIVES
from .transport import Channels, located
from .wire import off_the_wire, on_the_wire, specs_of, wire_shape

__all__ = ["Messages"]


class Messages:
    """The transport of backends on which two ranks can exchange a message.

    Args:
        schedule, stage: what to go through, and on which stage.
        plans: of the stage's chunks.
        channels: to the other stages.
        device: where tensors are received.
    """

    def __init__(
        self, *, schedule: Schedule, stage: int, plans: Sequence[StagePlan], channels: Channels, device: torch.device
    ) -> None:
        self._schedule = schedule
        self._stage = stage
        self._channels = channels
        self._device = device
        kinds = (Kind.RECV_FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD, Kind.SEND_BACKWARD)
        self._specs = {(kind, chunk): specs_of(plan, kind) for chunk, plan in enumerate(plans) for kind in kinds}
        self._arriving: dict[Task, list[comm.Handle]] = {}
        self._leaving: dict[Task, list[torch.Tensor]] = {}
        self._under_way: dict[Kind, deque[list[comm.Handle]]] = {
            Kind.SEND_FORWARD: deque(),
            Kind.SEND_BACKWARD: deque(),
        }

    def run(self, compute: Callable[[Task], None]) -> None:
        for task in self._schedule.tasks(self._stage):
            with located(task, self._stage, self._schedule.num_stages):
                if task.kind in COMPUTATIONS:
                    compute(task)
                elif task.kind in RECEIVES:
                    self._post(task)
                else:
                    self._send(task)
        for kind, sends in self._under_way.items():
            with located(f"last {kind.value}", self._stage, self._schedule.num_stages):
                while sends:
                    _wait(sends.popleft())

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        self._leaving[send] = tensors

    def take(self, receive: Task) -> list[torch.Tensor]:
        buffers = _wait(self._arriving.pop(receive))
        return [off_the_wire(buffer, spec) for buffer, spec in zip(buffers, self._specs[receive.kind, receive.chunk])]

    def _post(self, receive: Task) -> None:
        channel, source = self._other_end(receive)
        handles = []
        for spec in self._specs[receive.kind, receive.chunk]:
            buffer = torch.empty(wire_shape(spec), dtype=spec.dtype, device=self._device)
            handles.append(comm.recv(buffer, channel, src=source, async_op=True))
        self._arriving[receive] = handles

    def _send(self, send: Task) -> None:
        sends = self._under_way[send.kind]
        while len(sends) >= self._schedule.send_window(send.kind, self._stage):
            _wait(sends.popleft())
        channel, target = self._other_end(send)
        handles = []
        for tensor, spec in zip(self._leaving.pop(send), self._specs[send.kind, send.chunk]):
            payload = on_the_wire(tensor, spec)
            handles.append(comm.send(payload, channel, dst=target, async_op=True))
        sends.append(handles)

    def _other_end(self, task: Task) -> tuple[comm.Communicator, int]:
        """The channel of a message, and the other stage's index in it."""
        forward = task.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        channel = self._channels.forward if forward else self._channels.backward
        other_end = self._schedule.peer(self._stage, task)
        assert channel is not None and other_end is not None
        return channel, other_end[0]


def _wait(handles: Sequence[comm.Handle]) -> list[torch.Tensor]:
    return [handle.wait() for handle in handles]
