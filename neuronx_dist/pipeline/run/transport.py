"""What an executor needs of whatever connects the stages: with messages (messages.py) or without (lockstep.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from ... import comm
from ..cut.stage import add_place
from ..schedule import Task

__all__ = ["Channels", "Transport", "located"]


class Channels(NamedTuple):
    """Communicators of the stages of one pipeline; both None if it has one stage.

    Activations and gradients have one each: on NCCL messages between two ranks are one queue per communicator, and
    neither direction may wait for the other.
    """

    forward: comm.Communicator | None
    backward: comm.Communicator | None


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
