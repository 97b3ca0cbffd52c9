"""Computes a stage's tasks: forwards, and backwards whole or in halves; keeps activations between them.

    F   take the activations of the stage before, run the chunk, keep what backward needs, pass the results on
    B   take the gradients of the stage after, run backward, free what was saved, pass the inputs' gradients back
    I   as B, but parameters get no gradient yet; what their gradients need is saved
    W   compute the gradients of parameters, free the rest

A transport brings and takes away tensors, and decides when each task is due. halves.py divides a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...spmd.watching import active
from ..cut.stage import ChunkFunction
from ..schedule import Kind, Schedule, Task
from .halves import WeightHalf, divide
from .recomputation import seen_checkpoints
from .transport import Transport

__all__ = ["Executor"]


class _BackwardStart(NamedTuple):
    """Starting point of a backward.

    Attributes:
        received: tensors of the stage before; backward sets `.grad` of those that require a gradient.
        sent: gradient edges of the tensors for the stage after; None for a tensor that gets no gradient back.
        loss: of the chunk that ends the model, which sends nothing.
        inputs: the edges where the first half of a backward ends; None if backwards are not divided.
        recomputes: activation checkpointing will recompute a part of the forward.
    """

    received: list[torch.Tensor]
    sent: list[GradientEdge | None]
    loss: torch.Tensor | None
    inputs: list[GradientEdge] | None
    recomputes: bool


class Executor:
    """Runs one pass over all microbatches on this rank.

    Args:
        module: the whole model, of which this rank holds the parameters of its stage.
        chunks: the stage's pieces of the model.
        schedule, stage: the schedule to run, and this rank's stage.
        transport: to the other stages.
        microbatches: inputs of the chunks, by microbatch.
        pick_loss: returns the loss among the model's output leaves, on the last stage; None: all leaves are results.
        check_outputs: called after each forward that ends the model, with the task, its output leaves and the received
            tensors.
        scale_loss: returns the scalar that backward starts from, for a microbatch's loss; None: its part of the mean.
        without_backward: microbatches whose backward adds nothing.

    Attributes:
        results: by microbatch, on the stage that ends the model: losses, or lists of output leaves; None elsewhere.
        peak_in_flight: the most forwards of which activations were saved at one time, counted as a schedule does: from
            the forward to the backward, or to the second half. Between the halves `WeightHalf` alone keeps tensors.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        chunks: Sequence[ChunkFunction],
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
        # A type checker sees whole backwards: then the first half is the whole backward.
        halves = any(task.kind is Kind.BACKWARD_INPUT for task in self._route.tasks)
        self._in_halves = halves and active() is None
        self._handed_over: dict[Task, list[torch.Tensor]] = {}  # between chunks of this stage, by receive
        self._pending: dict[tuple[int, int], _BackwardStart | WeightHalf] = {}  # by chunk and microbatch

    def execute(self) -> list[Any]:
        """Runs this stage's tasks; returns `results`.

        Raises:
            any error of a task, with the task and the stage before the message.
        """
        self._transport.run(self._compute)
        return self.results

    def _compute(self, task: Task) -> None:
        _COMPUTE[task.kind](self, task)

    # --- forward

    def _forward(self, task: Task) -> None:
        chunk = self._chunks[task.chunk]
        received = self._take_for(task)
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
            self._give_on(task, [x.detach() for x in sent])
        if self._trains:
            # An edge holds a tensor's history and not its values: sent tensors are freed unless autograd saved them.
            edges = [get_gradient_edge(x) if x.requires_grad else None for x in sent]
            if first is not None:
                first = [get_gradient_edge(x) for x in received if x.requires_grad] or first
            recomputes = checkpoints is not None and checkpoints.any
            self._pending[task.chunk, task.microbatch] = _BackwardStart(received, edges, loss, first, recomputes)
            self.peak_in_flight = max(self.peak_in_flight, len(self._pending))

    # --- backward

    def _backward(self, task: Task) -> None:
        start = self._pending.pop((task.chunk, task.microbatch))
        assert isinstance(start, _BackwardStart)
        if task.microbatch in self._without_backward:
            self._take_for(task)
        elif start.loss is not None:
            self._scaled(start.loss).backward()
        else:
            roots = self._grad_edges(task, start.sent)
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        self._give_gradients(task, start.received, [x.grad for x in start.received])

    def _backward_input(self, task: Task) -> None:
        """Computes the gradients of received tensors: the first half of a backward."""
        key = task.chunk, task.microbatch
        start = self._pending[key]
        assert isinstance(start, _BackwardStart)
        if start.inputs is None:
            self._backward(task)
            self._pending[key] = WeightHalf()
            return
        if start.loss is not None:
            roots: list[tuple[GradientEdge, Any]] = [(get_gradient_edge(self._scaled(start.loss)), None)]
        else:
            roots = self._grad_edges(task, start.sent)
        computed, half = divide(
            [edge for edge, _ in roots], [grad for _, grad in roots], start.inputs, recomputes=start.recomputes
        )
        self._pending[key] = half
        if half.once:
            self._chunks[task.chunk].warn_of_undivided(half.once)
        if not any(x.requires_grad for x in start.received):
            half.give(list(enumerate(start.inputs)), computed)  # parameters before them are of the second half
        grads = iter(computed)
        self._give_gradients(task, start.received, [next(grads) if x.requires_grad else None for x in start.received])

    def _backward_weight(self, task: Task) -> None:
        """Computes the gradients of parameters: the second half of a backward."""
        half = self._pending.pop((task.chunk, task.microbatch))
        assert isinstance(half, WeightHalf)
        half.run()

    def _grad_edges(self, task: Task, edges: Sequence[GradientEdge | None]) -> list[tuple[GradientEdge, torch.Tensor]]:
        """`(edge, gradient)` of each sent tensor that requires a gradient."""
        specs = self._chunks[task.chunk].sent_specs
        arrived = iter(self._take_for(task))
        pairs = [(edge, next(arrived)) for edge, spec in zip(edges, specs) if spec.requires_grad]
        return [(edge, grad) for edge, grad in pairs if edge is not None]

    def _give_gradients(
        self, task: Task, received: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        if task not in self._route.after:
            return
        specs = self._chunks[task.chunk].received_specs
        self._give_on(
            task,
            [
                torch.zeros_like(x) if grad is None else grad
                for x, grad, spec in zip(received, grads, specs)
                if spec.requires_grad
            ],
        )

    # --- to and from the neighbouring chunks, on other stages or on this one

    def _take_for(self, task: Task) -> list[torch.Tensor]:
        """Takes the tensors that a computation needs from its neighbour; none at the ends of the pipeline."""
        link = self._route.before.get(task)
        if link is None:
            return []
        if link.stage == self._stage:
            return self._handed_over.pop(link.message)
        return self._transport.take(link.message)

    def _give_on(self, task: Task, tensors: list[torch.Tensor]) -> None:
        """Passes the results of a computation on to its neighbour."""
        link = self._route.after[task]
        if link.stage == self._stage:
            self._handed_over[link.other_end] = tensors
        else:
            self._transport.give(link.message, tensors)


# A module-level table: bound methods in an executor would be a cycle, and keep a step's losses until it is collected.
_COMPUTE = {
    Kind.FORWARD: Executor._forward,
    Kind.BACKWARD: Executor._backward,
    Kind.BACKWARD_INPUT: Executor._backward_input,
    Kind.BACKWARD_WEIGHT: Executor._backward_weight,
}
