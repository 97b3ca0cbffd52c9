"""Moving tensors where ranks have no messages (XLA): stages in lockstep, transfers in which all ranks take part.

    round      stage 0     stage 1     transfers after it
    1          F0                      forward
    2          F1          F0          forward
    3                      B0          backward
    4          B0          F1
    5                      B1          backward
    6          B1

All ranks that communicate must run one program, and stages have different ones. So each task is a program, in which a
stage is on its own, and each transfer is another, the same on all ranks: every rank sends a tensor of one shape to its
neighbour, a dummy if it has none, and whoever expects nothing forgets what comes. A stage that sends to two others
(in ZB-V) does so in two lanes, which are collectives of their own.

Tasks of one kind are the same program for all microbatches, compiled once: inputs are data before the first forward,
and gradients are there before the first backward, as zeros, so that it adds to them like all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ... import comm
from ...comm.host import upload
from ...gradients.gradient import ParameterGradient
from ..cut.splitting import StagePlan
from ..schedule import Kind, Round, Schedule, Task, rounds
from ..schedule.tasks import SEND_AFTER
from .transport import Channels, located
from .wire import Wire, off_the_wire, on_the_wire, wires_of

__all__ = ["Lockstep", "Transfers"]


class _Payload(NamedTuple):
    """What one collective of a transfer carries."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Lane:
    """Transfers that one collective carries: no stage is the source of two, or the target of two.

    Attributes:
        sent: the kind of the sends that these transfers carry out.
        pairs: `(source, target)` stages, in order.
        payloads: of each shape and dtype as many as the boundary needs that needs the most.
        crossing: what crosses each boundary, by the virtual stage that sends it.
        indices: the payloads that those tensors are, by the virtual stage that sends them.
    """

    def __init__(self, sent: Kind) -> None:
        self.sent = sent
        self.pairs: list[tuple[int, int]] = []
        self.payloads: list[_Payload] = []
        self.crossing: dict[int, list[Wire]] = {}
        self.indices: dict[int, list[int]] = {}

    def takes(self, source: int, target: int) -> bool:
        """Whether a boundary between these stages can be a transfer of this lane."""
        others = [pair for pair in self.pairs if pair != (source, target)]
        return all(source != other_source and target != other_target for other_source, other_target in others)

    def add(self, sender: int, pair: tuple[int, int], wires: list[Wire]) -> None:
        """Adds the boundary after (of gradients: before) virtual stage `sender`."""
        self.pairs = sorted({*self.pairs, pair})
        self.crossing[sender] = wires
        carried = [_Payload(wire.shape, wire.dtype) for wire in wires]
        self.payloads += (Counter(carried) - Counter(self.payloads)).elements()
        free = {payload: [i for i, each in enumerate(self.payloads) if each == payload] for payload in carried}
        self.indices[sender] = [free[payload].pop(0) for payload in carried]


class Transfers:
    """What goes from stage to stage, by the plans of all virtual stages, which every rank has.

    Args:
        plans: by virtual stage.
        schedule: says which stage holds each of them.

    Attributes:
        lanes: the first ones of activations, then those of gradients. Stages in a line, or in a ring, have one of each
            kind; where chunks go there and back again (ZB-V), each way has its own.
    """

    def __init__(self, plans: Sequence[StagePlan], schedule: Schedule) -> None:
        self.lanes: list[_Lane] = []
        self.dummies: dict[tuple[_Payload, torch.device], torch.Tensor] = {}
        self._schedule = schedule
        self._lane_of: dict[tuple[Kind, int], _Lane] = {}  # by the virtual stage that sends
        for sent in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            lanes: list[_Lane] = []
            for sender, plan in enumerate(plans):
                stage, chunk = schedule.holder(sender)
                receiver = schedule.peer(stage, Task(sent, chunk, 0))
                if receiver is None or receiver[0] == stage:
                    continue
                pair = stage, receiver[0]
                lane = next((lane for lane in lanes if lane.takes(*pair)), None)
                if lane is None:
                    lane = _Lane(sent)
                    lanes.append(lane)
                lane.add(sender, pair, wires_of(plan, sent))
                self._lane_of[sent, sender] = lane
            self.lanes += lanes

    def after(self, tasks: Sequence[Task | None]) -> dict[_Lane, dict[int, Task]]:
        """The transfers after a round: lanes, and by stage the sends that each carries out; the same on all ranks."""
        sends: dict[_Lane, dict[int, Task]] = {lane: {} for lane in self.lanes if lane.payloads}
        for stage, task in enumerate(tasks):
            if task is not None and task.kind in SEND_AFTER:
                send = task._replace(kind=SEND_AFTER[task.kind])
                lane = self._lane_of.get((send.kind, self._schedule.virtual_stage(stage, send.chunk)))
                if lane in sends:
                    sends[lane][stage] = send
        return {lane: carried for lane, carried in sends.items() if carried}

    def dummy(self, payload: _Payload, device: torch.device) -> torch.Tensor:
        """What a rank sends that has nothing to send: data like all else, not a constant of its program."""
        if (payload, device) not in self.dummies:
            self.dummies[payload, device] = upload(torch.zeros(payload.shape, dtype=payload.dtype), device)
        return self.dummies[payload, device]


class Lockstep:
    """The transport of backends on which all ranks have to call the same collective.

    Args:
        schedule, stage: what to go through, and on which stage.
        transfers: of the program.
        channels: to the other stages.
        parameters: of this stage.
        device: where this stage computes.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        stage: int,
        transfers: Transfers,
        channels: Channels,
        parameters: Iterable[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._schedule = schedule
        self._stage = stage
        self._transfers = transfers
        self._channels = channels
        self._parameters = [param for param in parameters if param.requires_grad]
        self._device = device
        self._leaving: dict[Task, list[torch.Tensor]] = {}
        self._arrived: dict[Task, tuple[list[torch.Tensor], list[Wire]]] = {}

    def run(self, compute: Callable[[Task], None]) -> None:
        filled = self._fill_gradients() if self._schedule.trains else []
        self._cut()
        versions = [grad._version for _, _, grad in filled]
        try:
            for number, each in enumerate(rounds(self._schedule), 1):
                self._round(number, each, compute)
        finally:
            for (param, name, grad), version in zip(filled, versions):
                if getattr(param, name) is grad and grad._version == version:  # no microbatch used the parameter
                    setattr(param, name, None)

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        self._leaving[send] = tensors

    def take(self, receive: Task) -> list[torch.Tensor]:
        # Nothing has come where no boundary of the lane has tensors. What has come is permuted here, in the
        # program of the task that needs it, and not in that of the transfer.
        arrived, wires = self._arrived.pop(receive, ([], []))
        return [off_the_wire(x, wire) for x, wire in zip(arrived, wires)]

    def _round(self, number: int, each: Round, compute: Callable[[Task], None]) -> None:
        task = each.tasks[self._stage]
        if task is not None:
            with located(task, self._stage, self._schedule.num_stages):
                compute(task)
        needed = self._transfers.after(each.tasks)
        for lane, sends in needed.items():
            with located(f"{lane.sent.value} of round {number}", self._stage, self._schedule.num_stages):
                self._transfer(lane, sends)
        if not needed:
            self._cut()

    def _transfer(self, lane: _Lane, sends: Mapping[int, Task]) -> None:
        """Moves what stages made in this round, if it is of the lane."""
        channel = self._channels.forward if lane.sent is Kind.SEND_FORWARD else self._channels.backward
        payloads = {}
        if self._stage in sends:
            send = sends[self._stage]
            sender = self._schedule.virtual_stage(self._stage, send.chunk)
            leaving = self._leaving.pop(send)
            for index, tensor, wire in zip(lane.indices[sender], leaving, lane.crossing[sender]):
                payloads[index] = on_the_wire(tensor, wire)
        came = []
        for index, wanted in enumerate(lane.payloads):
            payload = payloads.pop(index) if index in payloads else self._transfers.dummy(wanted, self._device)
            # A program for each payload: two tensors that a stage sends may be one in memory, which would be one input.
            with comm.current().backend.own_program():
                came.append(comm.permute(payload, channel, pairs=lane.pairs))
        for stage, send in sends.items():
            receiver = self._schedule.peer(stage, send)
            if receiver is not None and receiver[0] == self._stage:
                sender = self._schedule.virtual_stage(stage, send.chunk)
                self._arrived[receiver[1]] = [came[index] for index in lane.indices[sender]], lane.crossing[sender]

    def _fill_gradients(self) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Zeros where a gradient is missing: `(parameter, attribute, gradient)`.

        ZeRO-1 may accumulate in `main_grad`, for which backward makes `grad` anew each time.
        """
        filled = []
        for param in self._parameters:
            gradient = ParameterGradient(param)
            if gradient.tensor is None:
                zeros = gradient.tensor = gradient.zeros()
                filled.append((param, gradient.attribute, zeros))
        return filled

    def _cut(self) -> None:
        """Ends a program."""
        with comm.current().backend.own_program():
            pass
