"""Computing a stage's tasks: forwards, backwards whole or in halves, and what is kept between them.

    F   take the activations of the stage before, run the chunk, keep what backward needs, give on what it makes
    B   take the gradients of the stage after, run backward, drop what was kept, give back the inputs' gradients
    I   as B, but parameters get no gradient yet, and what was kept stays
    W   give parameters their gradients, drop what was kept

A transport brings and takes away tensors, and says when each task is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..cut.stage import Stage
from ..schedule import Kind, Schedule, Task
from ..schedule.tasks import RECEIVE_FOR, SEND_AFTER
from .transport import Transport

__all__ = ["Executor"]


class _Kept(NamedTuple):
    """What a backward starts from.

    Attributes:
        received: what came from the stage before; backward puts gradients on those that require them.
        sent: the history of what went to the stage after; None for what no gradient comes back through.
        loss: of the chunk that ends the model, which sends nothing.
        incoming: gradients of `sent` that require one, from the first half of a backward for the second.
    """

    received: list[torch.Tensor]
    sent: list[GradientEdge | None]
    loss: torch.Tensor | None
    incoming: list[torch.Tensor] | None = None


class Executor:
    """One pass over all microbatches on this rank.

    Args:
        module: the whole model, of which this rank holds the parameters of its stage.
        chunks: the stage's pieces of the model.
        schedule, stage: what to run, and on which stage.
        transport: to the other stages.
        microbatches: input tensors by leaf number, for each microbatch.
        pick_loss: from the model's output leaves, on the last stage; None: all leaves are kept as results.
        check_outputs: is given each forward that ends the model: the task, its output leaves, what the stage received.

    Attributes:
        results: by microbatch, on the stage that ends the model: losses, or lists of output leaves; None elsewhere.
        peak_in_flight: the most forwards of which activations were kept at one time.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        chunks: Sequence[Stage],
        schedule: Schedule,
        stage: int,
        transport: Transport,
        microbatches: Sequence[dict[int, torch.Tensor]],
        pick_loss: Callable[[list[Any]], torch.Tensor] | None,
        check_outputs: Callable[[Task, list[Any], list[torch.Tensor]], None] | None = None,
    ) -> None:
        self.results: list[Any] = [None] * len(microbatches)
        self.peak_in_flight = 0
        self._module = module
        self._chunks = chunks
        self._schedule = schedule
        self._stage = stage
        self._transport = transport
        self._microbatches = microbatches
        self._pick_loss = pick_loss
        self._check_outputs = check_outputs
        self._trains = schedule.trains
        self._handed_over: dict[Task, list[torch.Tensor]] = {}  # from one chunk of this stage to another, by receive
        self._kept: dict[Task, _Kept] = {}  # by the forward

    def execute(self) -> list[Any]:
        """Runs this stage's tasks; returns `results`.

        Raises:
            whatever a task raises, with the task and the stage before the message.
        """
        self._transport.run(self._compute)
        return self.results

    def _compute(self, task: Task) -> None:
        if task.kind is Kind.FORWARD:
            self._forward(task)
        elif task.kind is Kind.BACKWARD:
            self._backward(task)
        elif task.kind is Kind.BACKWARD_INPUT:
            self._backward_input(task)
        else:
            self._backward_weight(task)

    # --- forward

    def _forward(self, task: Task) -> None:
        chunk = self._chunks[task.chunk]
        received = self._take(task)
        for tensor, spec in zip(received, chunk.plan.received_specs):
            tensor.requires_grad_(self._trains and spec.requires_grad)
        sent, outputs = chunk.run(self._module, self._microbatches[task.microbatch], received)
        loss = None
        if self._schedule.peer(self._stage, _send_after(task)) is None:
            if self._check_outputs is not None:
                self._check_outputs(task, outputs, received)
            if self._pick_loss is None:
                self.results[task.microbatch] = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
            else:
                loss = self._pick_loss(outputs)
                self.results[task.microbatch] = loss.detach()
        else:
            self._give(task, [x.detach() for x in sent])
        if self._trains:
            # An edge holds the history of a tensor and not its values: what was sent is freed unless autograd saved it.
            edges = [get_gradient_edge(x) if x.requires_grad else None for x in sent]
            self._kept[task] = _Kept(received, edges, loss)
            self.peak_in_flight = max(self.peak_in_flight, len(self._kept))

    # --- backward

    def _backward(self, task: Task) -> None:
        received, edges, loss, _ = self._kept.pop(task._replace(kind=Kind.FORWARD))
        if loss is not None:
            (loss / len(self._microbatches)).backward()
        else:
            used = self._used(task, edges, self._take(task))
            if used:
                torch.autograd.backward([edge for edge, _ in used], [grad for _, grad in used])
        self._give_gradients(task, received, [x.grad for x in received])

    def _backward_input(self, task: Task) -> None:
        """The gradients of what was received. The graph stays for the other half."""
        forward = task._replace(kind=Kind.FORWARD)
        kept = self._kept[forward]
        incoming = [] if kept.loss is not None else self._take(task)
        self._kept[forward] = kept._replace(incoming=incoming)
        roots, root_grads = self._roots(task, kept, incoming)
        inputs = [x for x in kept.received if x.requires_grad]
        computed: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if roots and inputs:
            computed = torch.autograd.grad(roots, inputs, root_grads, retain_graph=True, allow_unused=True)
        grads = iter(computed)
        self._give_gradients(task, kept.received, [next(grads) if x.requires_grad else None for x in kept.received])

    def _backward_weight(self, task: Task) -> None:
        """The gradients of parameters, by a backward of the whole chunk, which computes input gradients again.

        The result is right for every module. Layers that can compute their weight gradient alone would save the work.
        """
        kept = self._kept.pop(task._replace(kind=Kind.FORWARD))
        assert kept.incoming is not None
        roots, root_grads = self._roots(task, kept, kept.incoming)
        if roots:
            torch.autograd.backward(roots, root_grads)

    def _roots(
        self, task: Task, kept: _Kept, incoming: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor] | list[GradientEdge], list[torch.Tensor] | None]:
        """Where backward starts, and with which gradients."""
        if kept.loss is not None:
            return [kept.loss / len(self._microbatches)], None
        used = self._used(task, kept.sent, incoming)
        return [edge for edge, _ in used], [grad for _, grad in used]

    def _used(
        self, task: Task, edges: Sequence[GradientEdge | None], incoming: Sequence[torch.Tensor]
    ) -> list[tuple[GradientEdge, torch.Tensor]]:
        """What was sent and has a history, with its gradients."""
        specs = self._chunks[task.chunk].plan.sent_specs
        arrived = iter(incoming)
        pairs = [(edge, next(arrived)) for edge, spec in zip(edges, specs) if spec.requires_grad]
        return [(edge, grad) for edge, grad in pairs if edge is not None]

    def _give_gradients(
        self, task: Task, received: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        if self._schedule.peer(self._stage, _send_after(task)) is None:
            return
        specs = self._chunks[task.chunk].plan.received_specs
        self._give(
            task,
            [
                torch.zeros_like(x) if grad is None else grad
                for x, grad, spec in zip(received, grads, specs)
                if spec.requires_grad
            ],
        )

    # --- to and from the neighbouring chunks, on other stages or on this one

    def _take(self, task: Task) -> list[torch.Tensor]:
        """What a computation needs of its neighbour; nothing at the ends of the pipeline."""
        receive = task._replace(kind=RECEIVE_FOR[task.kind])
        sender = self._schedule.peer(self._stage, receive)
        if sender is None:
            return []
        if sender[0] == self._stage:
            return self._handed_over.pop(receive)
        return self._transport.take(receive)

    def _give(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Passes what a computation made on to its neighbour."""
        send = _send_after(task)
        receiver = self._schedule.peer(self._stage, send)
        assert receiver is not None
        if receiver[0] == self._stage:
            self._handed_over[receiver[1]] = tensors
        else:
            self._transport.give(send, tensors)


def _send_after(task: Task) -> Task:
    return task._replace(kind=SEND_AFTER[task.kind])
