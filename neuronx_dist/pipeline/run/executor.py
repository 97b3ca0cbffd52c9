"""Computing a stage's tasks: forwards, backwards whole or in halves, and what is kept between them.

    F   take the activations of the stage before, run the chunk, keep what backward needs, give on what it makes
    B   take the gradients of the stage after, run backward, drop what was kept, give back the inputs' gradients
    I   as B, but parameters get no gradient yet: of what was kept stays what their gradients need
    W   give parameters their gradients, drop the rest

A transport brings and takes away tensors, and says when each task is due. halves.py divides a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...spmd.watching import active
from ..cut.stage import Chunk
from ..schedule import Kind, Schedule, Task
from .halves import WeightHalf, divide
from .recomputation import seen_checkpoints
from .transport import Transport

__all__ = ["Executor"]


class _Kept(NamedTuple):
    """What a backward starts from.

    Attributes:
        received: what came from the stage before; backward puts gradients on those that require them.
        sent: the history of what went to the stage after; None for what no gradient comes back through.
        loss: of the chunk that ends the model, which sends nothing.
        inputs: where the first half of a backward ends; None if backwards are not divided.
        recomputes: activation checkpointing will recompute some of it.
    """

    received: list[torch.Tensor]
    sent: list[GradientEdge | None]
    loss: torch.Tensor | None
    inputs: list[GradientEdge] | None
    recomputes: bool


class Executor:
    """One pass over all microbatches on this rank.

    Args:
        module: the whole model, of which this rank holds the parameters of its stage.
        chunks: the stage's pieces of the model.
        schedule, stage: what to run, and on which stage.
        transport: to the other stages.
        microbatches: what chunks take as their inputs, for each microbatch.
        pick_loss: from the model's output leaves, on the last stage; None: all leaves are kept as results.
        check_outputs: is given each forward that ends the model: the task, its output leaves, what the stage received.
        scale_loss: makes of a microbatch's loss what backward starts from; None: its part of the mean.
        without_backward: microbatches whose backward adds nothing.

    Attributes:
        results: by microbatch, on the stage that ends the model: losses, or lists of output leaves; None elsewhere.
        peak_in_flight: the most forwards of which activations were kept at one time, as a schedule counts them: from
            the forward to the backward, or to the second half of it. Between the halves less is kept than before the
            first one: what `WeightHalf` holds.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        chunks: Sequence[Chunk],
        schedule: Schedule,
        stage: int,
        transport: Transport,
        microbatches: Sequence[Any],
        pick_loss: Callable[[list[Any]], torch.Tensor] | None,
        check_outputs: Callable[[Task, list[Any], list[torch.Tensor]], None] | None = None,
        scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
        without_backward: Collection[int] = (),
    ) -> None:
        self.results: list[Any] = [None] * len(microbatches)
        self.peak_in_flight = 0
        self._module = module
        self._chunks = chunks
        self._route = schedule.route(stage)
        self._stage = stage
        self._transport = transport
        self._microbatches = microbatches
        self._pick_loss = pick_loss
        self._check_outputs = check_outputs
        self._scaled = scale_loss or (lambda loss: loss / len(microbatches))
        self._without_backward = without_backward
        self._trains = schedule.trains
        # A type checker sees the backwards that autograd is asked for: then the first half is the whole of it.
        halves = any(task.kind is Kind.BACKWARD_INPUT for task in self._route.tasks)
        self._in_halves = halves and active() is None
        self._handed_over: dict[Task, list[torch.Tensor]] = {}  # from one chunk of this stage to another, by receive
        self._kept: dict[tuple[int, int], _Kept | WeightHalf] = {}  # by chunk and microbatch

    def execute(self) -> list[Any]:
        """Runs this stage's tasks; returns `results`.

        Raises:
            whatever a task raises, with the task and the stage before the message.
        """
        self._transport.run(self._compute)
        return self.results

    def _compute(self, task: Task) -> None:
        _COMPUTE[task.kind](self, task)

    # --- forward

    def _forward(self, task: Task) -> None:
        chunk = self._chunks[task.chunk]
        received = self._take(task)
        for tensor, spec in zip(received, chunk.received_specs):
            tensor.requires_grad_(self._trains and spec.requires_grad)
        first: list[GradientEdge] | None = [] if self._in_halves else None
        with seen_checkpoints() if self._in_halves else nullcontext() as checkpoints:
            sent, outputs = chunk.run(self._module, self._microbatches[task.microbatch], received, first)
        loss = None
        if task not in self._route.after:
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
            if first is not None:
                first = [get_gradient_edge(x) for x in received if x.requires_grad] or first
            recomputes = checkpoints is not None and checkpoints.any
            self._kept[task.chunk, task.microbatch] = _Kept(received, edges, loss, first, recomputes)
            self.peak_in_flight = max(self.peak_in_flight, len(self._kept))

    # --- backward

    def _backward(self, task: Task) -> None:
        kept = self._kept.pop((task.chunk, task.microbatch))
        assert isinstance(kept, _Kept)
        if task.microbatch in self._without_backward:
            self._take(task)
        elif kept.loss is not None:
            self._scaled(kept.loss).backward()
        else:
            used = self._used(task, kept.sent)
            if used:
                torch.autograd.backward([edge for edge, _ in used], [grad for _, grad in used])
        self._give_gradients(task, kept.received, [x.grad for x in kept.received])

    def _backward_input(self, task: Task) -> None:
        """The gradients of what was received."""
        key = task.chunk, task.microbatch
        kept = self._kept[key]
        assert isinstance(kept, _Kept)
        if kept.inputs is None:
            self._backward(task)
            self._kept[key] = WeightHalf()
            return
        if kept.loss is not None:
            used: list[tuple[GradientEdge, Any]] = [(get_gradient_edge(self._scaled(kept.loss)), None)]
        else:
            used = self._used(task, kept.sent)
        computed, half = divide(
            [edge for edge, _ in used], [grad for _, grad in used], kept.inputs, recomputes=kept.recomputes
        )
        self._kept[key] = half
        if half.once:
            self._chunks[task.chunk].warn_of_undivided(half.once)
        if not any(x.requires_grad for x in kept.received):
            half.give(list(enumerate(kept.inputs)), computed)  # what made the first activations is of the second half
        grads = iter(computed)
        self._give_gradients(task, kept.received, [next(grads) if x.requires_grad else None for x in kept.received])

    def _backward_weight(self, task: Task) -> None:
        """The gradients of parameters."""
        half = self._kept.pop((task.chunk, task.microbatch))
        assert isinstance(half, WeightHalf)
        half.run()

    def _used(self, task: Task, edges: Sequence[GradientEdge | None]) -> list[tuple[GradientEdge, torch.Tensor]]:
        """What was sent and has a history, with its gradients, which have come."""
        specs = self._chunks[task.chunk].sent_specs
        arrived = iter(self._take(task))
        pairs = [(edge, next(arrived)) for edge, spec in zip(edges, specs) if spec.requires_grad]
        return [(edge, grad) for edge, grad in pairs if edge is not None]

    def _give_gradients(
        self, task: Task, received: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        if task not in self._route.after:
            return
        specs = self._chunks[task.chunk].received_specs
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
        link = self._route.before.get(task)
        if link is None:
            return []
        if link.stage == self._stage:
            return self._handed_over.pop(link.message)
        return self._transport.take(link.message)

    def _give(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Passes what a computation made on to its neighbour."""
        link = self._route.after[task]
        if link.stage == self._stage:
            self._handed_over[link.other_end] = tensors
        else:
            self._transport.give(link.message, tensors)


# Outside of an executor, which its own methods would keep, with a step's losses, until Python collects cycles.
_COMPUTE = {
    Kind.FORWARD: Executor._forward,
    Kind.BACKWARD: Executor._backward,
    Kind.BACKWARD_INPUT: Executor._backward_input,
    Kind.BACKWARD_WEIGHT: Executor._backward_weight,
}
