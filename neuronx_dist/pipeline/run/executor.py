"""Executing a schedule on one rank: the stage's computations, and the messages between stages.

    RF  post the receives of a microbatch's activations         RB  post the receives of its gradients
    F   await them, run the stage, keep what backward needs     B   await them, run backward, drop what was kept
    SF  start sending its outputs to the next stage             SB  start sending its inputs' gradients back

Shapes, dtypes and who needs a gradient are known from the recording, so no message describes another. Activations and
gradients have a communicator each: on NCCL messages between two ranks are one queue per communicator, and neither
direction may wait for the other. Where there are no messages, `rounds.py` takes their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ... import comm
from ..cut.stage import Stage, add_place
from ..record.recording import TensorSpec
from ..schedule import Kind, Task, send_window

__all__ = ["Channels", "Run", "off_the_wire", "on_the_wire", "tensor_spec", "wire_shape"]


class Channels(NamedTuple):
    """Communicators of the stages of one pipeline; both None if it has one stage."""

    forward: comm.Communicator | None
    backward: comm.Communicator | None


class _Kept(NamedTuple):
    """What a microbatch's backward starts from: what the stage received, and the history of what it sent."""

    received: list[torch.Tensor]
    sent: list[GradientEdge | None]
    loss: torch.Tensor | None


class Run:
    """One pass over all microbatches on this rank.

    Args:
        module: the whole model, of which this rank holds the parameters of its stage.
        stage, index, num_stages: the program of this rank's stage, its number, and their number.
        channels: to the neighbours.
        microbatches: input tensors by leaf number, for each microbatch.
        pick_loss: from the model's output leaves, on the last stage; None: all leaves are kept as results.
        device: where tensors are received.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: Stage,
        index: int,
        num_stages: int,
        channels: Channels,
        microbatches: Sequence[dict[int, torch.Tensor]],
        device: torch.device,
        pick_loss: Callable[[list[Any]], torch.Tensor] | None,
    ) -> None:
        self.module = module
        self.stage = stage
        self.index = index
        self.num_stages = num_stages
        self.channels = channels
        self.microbatches = microbatches
        self.device = device
        self.pick_loss = pick_loss
        self.results: list[Any] = [None] * len(microbatches)  # of the last stage: losses, or lists of output leaves
        self.peak_in_flight = 0
        self._received_specs = [tensor_spec(node) for node in stage.plan.received]
        self._sent_specs = [tensor_spec(node) for node in stage.plan.sent]
        self._arriving: dict[Task, list[comm.Handle]] = {}
        self._leaving: dict[Task, list[torch.Tensor]] = {}
        self._under_way: dict[Kind, deque[list[comm.Handle]]] = {
            Kind.SEND_FORWARD: deque(),
            Kind.SEND_BACKWARD: deque(),
        }
        self._kept: dict[int, _Kept] = {}

    def execute(self, schedule: Callable[[int, int, int], Sequence[Task]]) -> list[Any]:
        """Runs this stage's tasks of `schedule(stage, num_stages, num_microbatches)` in order; returns the results.

        Raises:
            whatever a task raises, with the task and the stage before the message.
        """
        do = {  # not an attribute: `self` in a cycle would hold tensors until the garbage collector comes by
            Kind.RECV_FORWARD: self._post_forward,
            Kind.FORWARD: self._forward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_BACKWARD: self._post_backward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_BACKWARD: self._send_backward,
        }
        for task in schedule(self.index, self.num_stages, len(self.microbatches)):
            with self._at(task):
                do[task.kind](task.microbatch)
        for kind, sends in self._under_way.items():
            with self._at(f"last {kind.value}"):
                while sends:
                    _wait(sends.popleft())
        return self.results

    @contextmanager
    def _at(self, what: Task | str) -> Iterator[None]:
        """Errors inside say what was being done, and where."""
        try:
            yield
        except Exception as error:
            add_place(error, f"{what} on stage {self.index} of {self.num_stages}")
            raise

    # --- computing

    def _forward(self, microbatch: int) -> None:
        received = self._await(Task(Kind.RECV_FORWARD, microbatch), self._received_specs)
        training = torch.is_grad_enabled()
        for tensor, spec in zip(received, self._received_specs):
            tensor.requires_grad_(training and spec.requires_grad)
        sent, outputs = self.stage.run(self.module, self.microbatches[microbatch], received)
        loss = None
        if self.index == self.num_stages - 1:
            if self.pick_loss is None:
                self.results[microbatch] = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
            else:
                loss = self.pick_loss(outputs)
                self.results[microbatch] = loss.detach()
        if self.index < self.num_stages - 1:
            self._leaving[Task(Kind.SEND_FORWARD, microbatch)] = [x.detach() for x in sent]
        if training:
            # An edge holds the history of a tensor and not its values: what was sent is freed unless autograd saved it.
            edges = [get_gradient_edge(x) if x.requires_grad else None for x in sent]
            self._kept[microbatch] = _Kept(received, edges, loss)
            self.peak_in_flight = max(self.peak_in_flight, len(self._kept))

    def _backward(self, microbatch: int) -> None:
        received, edges, loss = self._kept.pop(microbatch)
        if loss is not None:
            (loss / len(self.microbatches)).backward()
        else:
            specs = [spec for spec in self._sent_specs if spec.requires_grad]
            incoming = iter(self._await(Task(Kind.RECV_BACKWARD, microbatch), specs))
            pairs = [(edge, next(incoming)) for edge, spec in zip(edges, self._sent_specs) if spec.requires_grad]
            used = [(edge, grad) for edge, grad in pairs if edge is not None]
            if used:
                torch.autograd.backward([edge for edge, _ in used], [grad for _, grad in used])
        if self.index > 0:
            self._leaving[Task(Kind.SEND_BACKWARD, microbatch)] = [
                torch.zeros_like(x) if x.grad is None else x.grad
                for x, spec in zip(received, self._received_specs)
                if spec.requires_grad
            ]

    # --- messages

    def _post_forward(self, microbatch: int) -> None:
        handles = []
        for spec in self._received_specs:
            buffer = self._buffer(spec)
            handles.append(comm.recv(buffer, self.channels.forward, src=self.index - 1, async_op=True))
        self._arriving[Task(Kind.RECV_FORWARD, microbatch)] = handles

    def _post_backward(self, microbatch: int) -> None:
        handles = []
        for spec in self._sent_specs:
            if spec.requires_grad:
                buffer = self._buffer(spec)
                handles.append(comm.recv(buffer, self.channels.backward, src=self.index + 1, async_op=True))
        self._arriving[Task(Kind.RECV_BACKWARD, microbatch)] = handles

    def _send_forward(self, microbatch: int) -> None:
        self._make_room(Kind.SEND_FORWARD)
        handles = []
        for tensor, spec in zip(self._leaving.pop(Task(Kind.SEND_FORWARD, microbatch)), self._sent_specs):
            payload = on_the_wire(tensor, spec)
            handles.append(comm.send(payload, self.channels.forward, dst=self.index + 1, async_op=True))
        self._under_way[Kind.SEND_FORWARD].append(handles)

    def _send_backward(self, microbatch: int) -> None:
        self._make_room(Kind.SEND_BACKWARD)
        handles = []
        specs = [spec for spec in self._received_specs if spec.requires_grad]
        for tensor, spec in zip(self._leaving.pop(Task(Kind.SEND_BACKWARD, microbatch)), specs):
            payload = on_the_wire(tensor, spec)
            handles.append(comm.send(payload, self.channels.backward, dst=self.index - 1, async_op=True))
        self._under_way[Kind.SEND_BACKWARD].append(handles)

    def _make_room(self, kind: Kind) -> None:
        sends = self._under_way[kind]
        while len(sends) >= send_window(kind, self.index, self.num_stages):
            _wait(sends.popleft())

    def _buffer(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty(wire_shape(spec), dtype=spec.dtype, device=self.device)

    def _await(self, task: Task, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The tensors of a posted receive, laid out in memory as the model has them."""
        buffers = _wait(self._arriving.pop(task, []))
        return [off_the_wire(buffer, spec) for buffer, spec in zip(buffers, specs)]


def _wait(handles: Sequence[comm.Handle]) -> list[torch.Tensor]:
    return [handle.wait() for handle in handles]


def tensor_spec(node: Any) -> TensorSpec:
    spec: TensorSpec = node.meta["info"].spec
    return spec


# A transposed tensor travels as it lies in memory, without a copy, and arrives with the strides that it has in the
# model: a `view` which is possible there is possible here.


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dims from the largest stride to the smallest; as they are, if memory has gaps or overlaps."""
    order = sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], spec.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] > 1 and spec.stride[dim] != expected:
            return list(range(len(spec.shape)))
        expected *= spec.shape[dim]
    return order


def wire_shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(spec.shape[dim] for dim in _memory_order(spec))


def on_the_wire(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return _permuted(x, _memory_order(spec)).contiguous()


def off_the_wire(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    order = _memory_order(spec)
    return _permuted(x, [order.index(dim) for dim in range(len(order))])


def _permuted(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == sorted(order) else x.permute(order)  # on XLA even the identity is a computation
