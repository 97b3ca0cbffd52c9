"""The interface of a transport: with messages (message_transport.py) or without (lockstep_transport.py).

Shapes, dtypes and `requires_grad` are known from the recording, so no message describes another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from ... import comm
from ...program.recording import TensorSpec
from ..cut.splitting import StagePlan
from ..cut.stage import ChunkFunction, add_place
from ..schedule import Kind, Task

__all__ = ["Channels", "Transport", "WireFormat", "located", "off_the_wire", "on_the_wire", "wires_of"]


class Channels(NamedTuple):
    """Communicators of the stages of one pipeline; all None if it has one stage.

    Activations have one communicator and gradients another: on NCCL messages between two ranks are one queue per
    communicator, and neither kind may wait for the other. With several chunks on a stage both kinds go in both
    directions, and each direction has a communicator.

    Attributes:
        forward, backward: of activations, and of gradients.
        forward_up, backward_down: of activations to a stage of a lower number, and of gradients to a stage of a higher
            number; None: the communicator of the kind.
    """

    forward: comm.Communicator | None
    backward: comm.Communicator | None
    forward_up: comm.Communicator | None = None
    backward_down: comm.Communicator | None = None

    def of(self, kind: Kind) -> tuple[comm.Communicator | None, comm.Communicator | None]:
        """The communicators of a stage's sends or receives of a kind, with stages of lower and of higher numbers."""
        forward_up, backward_down = self.forward_up or self.forward, self.backward_down or self.backward
        return {
            Kind.SEND_FORWARD: (forward_up, self.forward),
            Kind.RECV_FORWARD: (self.forward, forward_up),
            Kind.SEND_BACKWARD: (self.backward, backward_down),
            Kind.RECV_BACKWARD: (backward_down, self.backward),
        }[kind]


class Transport(Protocol):
    """Interface: goes through a schedule on one stage, and moves tensors between stages. An object serves one step."""

    def run(self, compute: Callable[[Task], None]) -> None:
        """Does the stage's tasks in order: calls `compute` for each computation, and moves tensors itself.

        Raises:
            any error of a task, with the task and the stage before the message.
        """

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        """Accepts the tensors of a send, once they are computed."""

    def take(self, receive: Task) -> list[torch.Tensor]:
        """Waits for the tensors of a receive; returns them with the shape and strides that they have in the model."""


@contextmanager
def located(what: Task | str, stage: int, num_stages: int) -> Iterator[None]:
    """Adds the task and the stage to the message of an error inside."""
    try:
        yield
    except Exception as error:
        add_place(error, f"{what} on stage {stage} of {num_stages}")
        raise


# --- tensors on their way between two stages


class WireFormat(NamedTuple):
    """Format in which a tensor of the model is sent.

    A transposed tensor is sent as it lies in memory, without a copy, and arrives with the strides that it has in the
    model: a `view` that is possible there is possible here.

    Attributes:
        shape, dtype: of the contiguous tensor in the message.
        order: permutation of the model's dims that gives the message's dims; None: the identity.
        back: the inverse permutation.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None
    back: tuple[int, ...] | None


def wires_of(plan: StagePlan | ChunkFunction, kind: Kind) -> list[WireFormat]:
    """Formats of the tensors in a send or receive of a stage with this plan."""
    specs = plan.received_specs if kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else plan.sent_specs
    forward = kind in (Kind.RECV_FORWARD, Kind.SEND_FORWARD)
    return [_wire(spec) for spec in specs if forward or spec.requires_grad]


def on_the_wire(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Converts a tensor of the model to the tensor of the message."""
    # On XLA even an identity permutation is a computation.
    return (x if wire.order is None else x.permute(wire.order)).contiguous()


def off_the_wire(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Converts the tensor of a message to the shape and strides that it has in the model."""
    return x if wire.back is None else x.permute(wire.back)


def _wire(spec: TensorSpec) -> WireFormat:
    order = _memory_order(spec)
    shape = tuple(spec.shape[dim] for dim in order)
    if order == sorted(order):
        return WireFormat(shape, spec.dtype, None, None)
    return WireFormat(shape, spec.dtype, tuple(order), tuple(order.index(dim) for dim in range(len(order))))


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dims from the largest stride to the smallest; in the tensor's order, if memory has gaps or overlaps."""
    order = sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], spec.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] > 1 and spec.stride[dim] != expected:
            return list(range(len(spec.shape)))
        expected *= spec.shape[dim]
    return order
