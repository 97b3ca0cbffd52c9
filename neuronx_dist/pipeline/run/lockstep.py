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
neighbour, a dummy if it has none, and whoever expects nothing forgets what comes.

Tasks of one kind are the same program for all microbatches, compiled once: inputs are data before the first forward,
and gradients are there before the first backward, as zeros, so that it adds to them like all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


class _Direction:
    """Transfers of activations, or of gradients.

    Attributes:
        sent: the kind of the sends that these transfers carry out.
        pairs: `(source, target)` stages.
        payloads: of each shape and dtype as many as the boundary needs that needs the most.
        crossing: what crosses each boundary, by the virtual stage that sends it.
        indices: the payloads that those tensors are, by the virtual stage that sends them.
    """

    def __init__(self, sent: Kind, plans: Sequence[StagePlan], schedule: Schedule) -> None:
        self.sent = sent
        self.crossing: dict[int, list[Wire]] = {}
        pairs: set[tuple[int, int]] = set()
        for virtual_stage, plan in enumerate(plans):
            stage, chunk = schedule.holder(virtual_stage)
            receiver = schedule.peer(stage, Task(sent, chunk, 0))
            if receiver is not None and receiver[0] != stage:
                self.crossing[virtual_stage] = wires_of(plan, sent)
                pairs.add((stage, receiver[0]))
        self.pairs = sorted(pairs)
        if len({source for source, _ in pairs}) < len(pairs):
            raise ValueError(f"{schedule}: a stage sends to several others, which one collective cannot do: {pairs}")
        carried = {
            sender: [_Payload(wire.shape, wire.dtype) for wire in wires] for sender, wires in self.crossing.items()
        }
        needed: Counter[_Payload] = Counter()
        for payloads in carried.values():
            needed |= Counter(payloads)
        self.payloads = list(needed.elements())
        self.indices = {sender: self._indices_of(payloads) for sender, payloads in carried.items()}

    def send_of(self, task: Task | None) -> Task | None:
        """The send after a computation, if it is of this direction."""
        if task is None or SEND_AFTER.get(task.kind) is not self.sent:
            return None
        return task._replace(kind=self.sent)

    def _indices_of(self, payloads: Sequence[_Payload]) -> list[int]:
        free = {payload: [i for i, each in enumerate(self.payloads) if each == payload] for payload in payloads}
        return [free[payload].pop(0) for payload in payloads]


class Transfers:
    """What goes from stage to stage, by the plans of all virtual stages, which every rank has.

    Args:
        plans: by virtual stage.
        schedule: says which stage holds each of them.

    Raises:
        ValueError: a stage sends to several others.
    """

    def __init__(self, plans: Sequence[StagePlan], schedule: Schedule) -> None:
        self.forward = _Direction(Kind.SEND_FORWARD, plans, schedule)
        self.backward = _Direction(Kind.SEND_BACKWARD, plans, schedule)
        self.dummies: dict[tuple[_Payload, torch.device], torch.Tensor] = {}

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
        # Nothing has come where no boundary of the direction has tensors. What has come is permuted here, in the
        # program of the task that needs it, and not in that of the transfer.
        arrived, wires = self._arrived.pop(receive, ([], []))
        return [off_the_wire(x, wire) for x, wire in zip(arrived, wires)]

    def _round(self, number: int, each: Round, compute: Callable[[Task], None]) -> None:
        task = each.tasks[self._stage]
        if task is not None:
            with located(task, self._stage, self._schedule.num_stages):
                compute(task)
        both = ((each.forward, self._transfers.forward), (each.backward, self._transfers.backward))
        needed = [direction for is_needed, direction in both if is_needed and direction.payloads]
        for direction in needed:
            with located(f"{direction.sent.value} of round {number}", self._stage, self._schedule.num_stages):
                self._transfer(direction, each.tasks)
        if not needed:
            self._cut()

    def _transfer(self, direction: _Direction, tasks: Sequence[Task | None]) -> None:
        """Moves what stages made in this round, if it is of the direction."""
        channel = self._channels.forward if direction.sent is Kind.SEND_FORWARD else self._channels.backward
        payloads = {}
        send = direction.send_of(tasks[self._stage])
        if send is not None and self._schedule.is_message(self._stage, send):
            sender = self._schedule.virtual_stage(self._stage, send.chunk)
            leaving = self._leaving.pop(send)
            for index, tensor, wire in zip(direction.indices[sender], leaving, direction.crossing[sender]):
                payloads[index] = on_the_wire(tensor, wire)
        came = []
        for index, wanted in enumerate(direction.payloads):
            payload = payloads.pop(index) if index in payloads else self._transfers.dummy(wanted, self._device)
            # A program for each payload: two tensors that a stage sends may be one in memory, which would be one input.
            with comm.current().backend.own_program():
                came.append(comm.permute(payload, channel, pairs=direction.pairs))
        for stage, task in enumerate(tasks):
            send = direction.send_of(task)
            receiver = None if send is None else self._schedule.peer(stage, send)
            if send is not None and receiver is not None and receiver[0] == self._stage != stage:
                sender = self._schedule.virtual_stage(stage, send.chunk)
                arrived = [came[index] for index in direction.indices[sender]]
                self._arrived[receiver[1]] = arrived, direction.crossing[sender]

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
