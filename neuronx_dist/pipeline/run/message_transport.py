"""Moves tensors between stages by messages: receives are posted ahead, sends are awaited when their window is full.

Each message gets a new buffer, and no two steps share one: a received tensor lives on in the graph of its microbatch,
and an incoming gradient may end as the gradient of a parameter. The time to reuse a buffer is not known, and
`torch.empty` takes a microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from ... import comm
from ..cut.stage import add_place
from ..schedule import Kind, Schedule, Task
from ..schedule.tasks import COMPUTATIONS, RECEIVES, SENDS
from .transport import Channels, WireFormat, off_the_wire, on_the_wire

__all__ = ["Messages"]


class Messages:
    """The transport of backends on which two ranks can exchange a message.

    Args:
        schedule, stage: the schedule to run, and this rank's stage.
        wires: formats of the tensors in messages, by chunk of the stage and by kind.
        channels: to the other stages.
        device: where tensors are received.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        stage: int,
        wires: Sequence[Mapping[Kind, Sequence[WireFormat]]],
        channels: Channels,
        device: torch.device,
    ) -> None:
        self._route = schedule.route(stage)
        self._name = f"stage {stage} of {schedule.num_stages}"
        self._wires = wires
        self._stage = stage
        self._channels = {kind: channels.of(kind) for kind in SENDS | RECEIVES}
        self._device = device
        self._arriving: dict[Task, list[comm.Handle]] = {}
        self._leaving: dict[Task, list[torch.Tensor]] = {}
        self._under_way: dict[Kind, deque[list[comm.Handle]]] = {
            Kind.SEND_FORWARD: deque(),
            Kind.SEND_BACKWARD: deque(),
        }

    def run(self, compute: Callable[[Task], None]) -> None:
        doing: Task | str = ""
        try:
            for task in self._route.tasks:
                doing = task
                if task.kind in COMPUTATIONS:
                    compute(task)
                elif task.kind in RECEIVES:
                    self._post(task)
                else:
                    self._send(task)
            for kind, sends in self._under_way.items():
                doing = f"last {kind.value}"
                while sends:
                    _wait(sends.popleft())
        except Exception as error:
            add_place(error, f"{doing} on {self._name}")
            raise

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        self._leaving[send] = tensors

    def take(self, receive: Task) -> list[torch.Tensor]:
        buffers = _wait(self._arriving.pop(receive))
        return [off_the_wire(buffer, wire) for buffer, wire in zip(buffers, self._wires[receive.chunk][receive.kind])]

    def _post(self, receive: Task) -> None:
        source = self._route.other_stage[receive]
        channel = self._channels[receive.kind][source > self._stage]
        handles = []
        for wire in self._wires[receive.chunk][receive.kind]:
            buffer = torch.empty(wire.shape, dtype=wire.dtype, device=self._device)
            handles.append(comm.recv(buffer, channel, src=source, async_op=True))
        self._arriving[receive] = handles

    def _send(self, send: Task) -> None:
        sends = self._under_way[send.kind]
        if len(sends) >= self._route.windows[send.kind]:
            _wait(sends.popleft())
        target = self._route.other_stage[send]
        channel = self._channels[send.kind][target > self._stage]
        handles = []
        for tensor, wire in zip(self._leaving.pop(send), self._wires[send.chunk][send.kind]):
            payload = on_the_wire(tensor, wire)
            handles.append(comm.send(payload, channel, dst=target, async_op=True))
        sends.append(handles)


def _wait(handles: Sequence[comm.Handle]) -> list[torch.Tensor]:
    return [handle.wait() for handle in handles]
