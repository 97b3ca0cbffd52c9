"""Moving tensors where ranks have no messages: stages in lockstep, transfers in which all ranks take part.

    round      stage 0     stage 1     transfers after it
    1          F0                      forward
    2          F1          F0          forward
    3                      B0          backward
    4          B0          F1
    5                      B1          backward
    6          B1

On XLA ranks that communicate must run one program, but stages have different programs. So each task is a program of one
stage alone, and each transfer is another program, the same on all ranks: every rank sends a tensor of one shape to its
neighbour, a dummy if it has none, and a rank that expects nothing drops what arrives. A stage that sends to two others
(in ZB-V) does so in two lanes, each of which is a collective. On other backends without messages programs may differ: a
transfer goes only from the stages that send in this round to their receivers.

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
from ...comm.rank_selection import in_one_program
from ...gradients.gradient import ParameterGradient
from ...torch_internals.tensors import version_of
from ..cut.splitting import StagePlan
from ..schedule import Kind, Round, Schedule, Task, rounds
from ..schedule.tasks import SEND_AFTER
from .transport import Channels, WireFormat, located, off_the_wire, on_the_wire, wires_of

__all__ = ["Lockstep", "Transfers"]


class _Payload(NamedTuple):
    """Shape and dtype of the tensor in one collective of a transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Lane:
    """Transfers in one collective: no stage is the source of two, or the target of two.

    Attributes:
        sent: the kind of the sends that these transfers carry out.
        pairs: `(source, target)` stages, in order.
        payloads: of each shape and dtype as many as the largest boundary needs.
        crossing: formats of the tensors that cross each boundary, by the sending virtual stage.
        indices: indices into `payloads` of these tensors, by the sending virtual stage.
    """

    def __init__(self, sent: Kind) -> None:
        self.sent = sent
        self.pairs: list[tuple[int, int]] = []
        self.payloads: list[_Payload] = []
        self.crossing: dict[int, list[WireFormat]] = {}
        self.indices: dict[int, list[int]] = {}

    def takes(self, source: int, target: int) -> bool:
        """Returns whether a boundary between these stages fits into this lane."""
        others = [pair for pair in self.pairs if pair != (source, target)]
        return all(source != other_source and target != other_target for other_source, other_target in others)

    def add(self, sender: int, pair: tuple[int, int], wires: list[WireFormat]) -> None:
        """Adds the boundary after virtual stage `sender` (of gradients: before it)."""
        self.pairs = sorted({*self.pairs, pair})
        self.crossing[sender] = wires
        carried = [_Payload(wire.shape, wire.dtype) for wire in wires]
        self.payloads += (Counter(carried) - Counter(self.payloads)).elements()
        free = {payload: [i for i, other in enumerate(self.payloads) if other == payload] for payload in carried}
        self.indices[sender] = [free[payload].pop(0) for payload in carried]


class Transfers:
    """All transfers between stages, from the plans of all virtual stages, which every rank has.

    Args:
        plans: by virtual stage.
        schedule: decides which stage holds each virtual stage.

    Attributes:
        lanes: first of activations, then of gradients. Stages in a line, or in a ring, have one lane of each kind; with
            chunks that go down and up again (ZB-V), each direction has a lane.
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
        """The transfers after a round: by lane and stage the sends that they carry out; equal on all ranks."""
        sends: dict[_Lane, dict[int, Task]] = {lane: {} for lane in self.lanes if lane.payloads}
        for stage, task in enumerate(tasks):
            if task is not None and task.kind in SEND_AFTER:
                send = task._replace(kind=SEND_AFTER[task.kind])
                lane = self._lane_of.get((send.kind, self._schedule.virtual_stage(stage, send.chunk)))
                if lane in sends:
                    sends[lane][stage] = send
        return {lane: carried for lane, carried in sends.items() if carried}

    def dummy(self, payload: _Payload, device: torch.device) -> torch.Tensor:
        """The tensor of a rank that has nothing to send: data, not a constant of its program."""
        if (payload, device) not in self.dummies:
            self.dummies[payload, device] = upload(torch.zeros(payload.shape, dtype=payload.dtype), device)
        return self.dummies[payload, device]


class Lockstep:
    """The transport of backends on which all ranks have to call the same collective.

    Args:
        schedule, stage: the schedule to run, and this rank's stage.
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
        self._arrived: dict[Task, tuple[list[torch.Tensor], list[WireFormat]]] = {}

    def run(self, compute: Callable[[Task], None]) -> None:
        filled = self._fill_gradients() if self._schedule.trains else []
        self._cut()
        versions = [version_of(grad) for _, _, grad in filled]
        try:
            for number, round_ in enumerate(rounds(self._schedule), 1):
                self._round(number, round_, compute)
        finally:
            for (param, name, grad), version in zip(filled, versions):
                if getattr(param, name) is grad and version_of(grad) == version:  # no microbatch used the parameter
                    setattr(param, name, None)

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        self._leaving[send] = tensors

    def take(self, receive: Task) -> list[torch.Tensor]:
        # Nothing has arrived if no boundary of the lane has tensors. Arrived tensors are permuted here, in the program
        # of the task that needs them, and not in that of the transfer.
        arrived, wires = self._arrived.pop(receive, ([], []))
        return [off_the_wire(x, wire) for x, wire in zip(arrived, wires)]

    def _round(self, number: int, round_: Round, compute: Callable[[Task], None]) -> None:
        task = round_.tasks[self._stage]
        if task is not None:
            with located(task, self._stage, self._schedule.num_stages):
                compute(task)
        needed = self._transfers.after(round_.tasks)
        for lane, sends in needed.items():
            with located(f"{lane.sent.value} of round {number}", self._stage, self._schedule.num_stages):
                self._transfer(lane, sends)
        if not needed:
            self._cut()

    def _transfer(self, lane: _Lane, sends: Mapping[int, Task]) -> None:
        """Moves the results of this round that belong to the lane."""
        channel = self._channels.forward if lane.sent is Kind.SEND_FORWARD else self._channels.backward
        payloads = {}
        if self._stage in sends:
            send = sends[self._stage]
            sender = self._schedule.virtual_stage(self._stage, send.chunk)
            leaving = self._leaving.pop(send)
            for index, tensor, wire in zip(lane.indices[sender], leaving, lane.crossing[sender]):
                payloads[index] = on_the_wire(tensor, wire)
        receivers = {stage: self._schedule.peer(stage, send) for stage, send in sends.items()}
        used = {(stage, receiver[0]) for stage, receiver in receivers.items() if receiver is not None}
        came = []
        for index, wanted in enumerate(lane.payloads):
            payload = payloads.pop(index) if index in payloads else self._transfers.dummy(wanted, self._device)
            # A program for each payload: two tensors that a stage sends may be one in memory, which would be one input.
            with comm.current().backend.own_program():
                pairs = lane.pairs if in_one_program(payload) else [pair for pair in lane.pairs if pair in used]
                came.append(comm.permute(payload, channel, pairs=pairs))
        for stage, send in sends.items():
            receiver = receivers[stage]
            if receiver is not None and receiver[0] == self._stage:
                sender = self._schedule.virtual_stage(stage, send.chunk)
                self._arrived[receiver[1]] = [came[index] for index in lane.indices[sender]], lane.crossing[sender]

    def _fill_gradients(self) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Sets missing gradients to zeros; returns `(parameter, attribute, gradient)` of each.

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
        """Submits the pending operations, so that the following ones form a new XLA program."""
        with comm.current().backend.own_program():
            pass
