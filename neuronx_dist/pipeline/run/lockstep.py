"""Executing a schedule where ranks have no messages (XLA): stages in lockstep, transfers in which all ranks take part.

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
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.host import upload
from ...gradients.gradient import gradient_of, missing_gradient
from ..cut.partition import StagePlan
from ..record.recording import TensorSpec
from ..schedule import Kind, Task, rounds
from .executor import Run, off_the_wire, on_the_wire, tensor_spec, wire_shape

__all__ = ["Lockstep", "Transfers"]


class _Slot(NamedTuple):
    """What one collective carries."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Direction:
    """Transfers to the next stage, or to the one before.

    Boundary `i` is between stages `i` and `i + 1`. Of each shape and dtype there are as many slots as the boundary
    needs that needs the most; `places[i]` are the slots of the tensors that cross boundary `i`.
    """

    def __init__(self, step: int, computed: Kind, sent: Kind, received: Kind, crossing: list[list[TensorSpec]]) -> None:
        self.step, self.computed, self.sent, self.received = step, computed, sent, received
        self.crossing = crossing
        last = len(crossing)
        self.pairs = [(stage, stage + step) for stage in range(last + 1) if 0 <= stage + step <= last]
        kinds = [[_Slot(wire_shape(spec), spec.dtype) for spec in specs] for specs in crossing]
        needed: Counter[_Slot] = Counter()
        for found in kinds:
            needed |= Counter(found)
        self.slots = list(needed.elements())
        self.places = [self._places(found) for found in kinds]

    def sending(self, tasks: Sequence[Task | None], stage: int) -> tuple[int, int] | None:
        """The boundary and the microbatch of what a stage has to send after a round, if it has anything."""
        boundary = min(stage, stage + self.step)
        task = tasks[stage] if 0 <= stage < len(tasks) and 0 <= boundary < len(self.crossing) else None
        return (boundary, task.microbatch) if task is not None and task.kind is self.computed else None

    def _places(self, found: Sequence[_Slot]) -> list[int]:
        free = {kind: [place for place, slot in enumerate(self.slots) if slot == kind] for kind in found}
        return [free[kind].pop(0) for kind in found]


class Transfers:
    """What goes from stage to stage, by the plans of all stages, which every rank has."""

    def __init__(self, plans: Sequence[StagePlan]) -> None:
        crossing = [[tensor_spec(node) for node in plan.sent] for plan in plans[:-1]]
        grads = [[spec for spec in specs if spec.requires_grad] for specs in crossing]
        self.forward = _Direction(1, Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD, crossing)
        self.backward = _Direction(-1, Kind.BACKWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD, grads)
        self._dummies: dict[tuple[_Slot, torch.device], torch.Tensor] = {}

    def dummy(self, slot: _Slot, device: torch.device) -> torch.Tensor:
        """What a rank sends that has nothing to send: data like all else, not a constant of its program."""
        if (slot, device) not in self._dummies:
            self._dummies[slot, device] = upload(torch.zeros(slot.shape, dtype=slot.dtype), device)
        return self._dummies[slot, device]


class Lockstep(Run):
    """One pass over all microbatches on this rank.

    Args:
        transfers: of the program.
        parameters: of this stage.
        given: the arguments of `Run`.
    """

    def __init__(self, transfers: Transfers, parameters: Iterable[torch.Tensor], *given: Any) -> None:
        super().__init__(*given)
        self._transfers = transfers
        self._parameters = [param for param in parameters if param.requires_grad]
        self._arrived: dict[Task, list[torch.Tensor]] = {}

    def execute(self, schedule: Callable[[int, int, int], Sequence[Task]]) -> list[Any]:
        """Runs this stage's tasks, takes part in all transfers, and returns the results.

        Raises:
            whatever a task raises, with the task and the stage before the message.
        """
        schedules = [schedule(stage, self.num_stages, len(self.microbatches)) for stage in range(self.num_stages)]
        filled = self._fill_gradients() if torch.is_grad_enabled() else []
        self._cut()
        versions = [grad._version for _, _, grad in filled]
        try:
            self._run(schedules)
        finally:
            for (param, name, grad), version in zip(filled, versions):
                if getattr(param, name) is grad and grad._version == version:  # no microbatch used the parameter
                    setattr(param, name, None)
        return self.results

    def _run(self, schedules: Sequence[Sequence[Task]]) -> None:
        for number, (tasks, forward, backward) in enumerate(rounds(schedules), 1):
            task = tasks[self.index]
            if task is not None:
                with self._at(task):
                    (self._forward if task.kind is Kind.FORWARD else self._backward)(task.microbatch)
            both = ((forward, self._transfers.forward), (backward, self._transfers.backward))
            needed = [direction for needed, direction in both if needed and direction.slots]
            for direction in needed:
                with self._at(f"{direction.sent.value} of round {number}"):
                    self._transfer(direction, tasks)
            if not needed:
                self._cut()

    def _transfer(self, direction: _Direction, tasks: Sequence[Task | None]) -> None:
        """Moves what stages made in this round, by what they did of the direction's kind."""
        channel = self.channels.forward if direction.step > 0 else self.channels.backward
        payloads = {}
        mine = direction.sending(tasks, self.index)
        if mine is not None:
            boundary, microbatch = mine
            leaving = self._leaving.pop(Task(direction.sent, microbatch))
            crossing = zip(direction.places[boundary], leaving, direction.crossing[boundary])
            payloads = {place: on_the_wire(tensor, spec) for place, tensor, spec in crossing}
        came = []
        for place, slot in enumerate(direction.slots):
            payload = payloads.pop(place) if place in payloads else self._transfers.dummy(slot, self.device)
            # A program for each slot: two tensors that a stage sends may be one in memory, which would be one input.
            with comm.current().backend.own_program():
                came.append(comm.permute(payload, channel, pairs=direction.pairs))
        theirs = direction.sending(tasks, self.index - direction.step)
        if theirs is not None:
            boundary, microbatch = theirs
            self._arrived[Task(direction.received, microbatch)] = [came[place] for place in direction.places[boundary]]

    def _await(self, task: Task, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        return [off_the_wire(wire, spec) for wire, spec in zip(self._arrived.pop(task, []), specs)]

    def _fill_gradients(self) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Zeros where a gradient is missing: `(parameter, attribute, gradient)`.

        ZeRO-1 may accumulate in `main_grad`, for which backward makes `grad` anew each time.
        """
        filled = []
        for param in self._parameters:
            if gradient_of(param) is None:
                name = "main_grad" if hasattr(param, "main_grad") else "grad"
                setattr(param, name, missing_gradient(param))
                filled.append((param, name, getattr(param, name)))
        return filled

    def _cut(self) -> None:
        """Ends a program."""
        with comm.current().backend.own_program():
            pass
