"""What an executor needs of whatever connects the stages: with messages (messages.py) or without (lockstep.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from ... import comm
from ..cut.stage import add_place
from ..schedule import Kind, Task

__all__ = ["Channels", "Transport", "located"]


class Channels(NamedTuple):
    """Communicators of the stages of one pipeline; all None if it has one stage.

    Activations and gradients have one each: on NCCL messages between two ranks are one queue per communicator, and
    neither kind may wait for the other. With several chunks on a stage both kinds go both ways, and each way has one.

    Attributes:
        forward, backward: of activations, and of gradients.
        forward_up, backward_down: of activations that go to a stage of a lower number, and of gradients that go to one
            of a higher number; None: as the others of their kind.
    """

    forward: comm.Communicator | None
    backward: comm.Communicator | None
    forward_up: comm.Communicator | None = None
    backward_down: comm.Communicator | None = None

    def of(self, kind: Kind) -> tuple[comm.Communicator | None, comm.Communicator | None]:
        """The communicators of a stage's sends or receives of a kind: with stages of lower numbers, and of higher."""
        forward_up, backward_down = self.forward_up or self.forward, self.backward_down or self.backward
        return {
            Kind.SEND_FORWARD: (forward_up, self.forward),
            Kind.RECV_FORWARD: (self.forward, forward_up),
            Kind.SEND_BACKWARD: (self.backward, backward_down),
            Kind.RECV_BACKWARD: (backward_down, self.backward),
        }[kind]


class Transport(Protocol):
    """Goes through a schedule on one stage, and moves tensors to and from other stages. Made for one step."""

    def run(self, compute: Callable[[Task], None]) -> None:
        """Does the stage's tasks in order: calls `compute` for each computation, and moves tensors itself.

        Raises:
            whatever a task raises, with the task and the stage before the message.
        """

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        """Takes the tensors of a send, when they have been computed."""

    def take(self, receive: Task) -> list[torch.Tensor]:
        """Waits for the tensors of a receive; they are laid out in memory as the model has them."""


@contextmanager
def located(what: Task | str, stage: int, num_stages: int) -> Iterator[None]:
    """Errors inside say what was being done, and on which stage."""
    try:
        yield
    except Exception as error:
        add_place(error, f"{what} on stage {stage} of {num_stages}")
        raise
