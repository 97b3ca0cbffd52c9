"""Tasks: a task is one thing that a stage does for one microbatch with one chunk of the model's layers.

Tasks print as their kind, their microbatch and, after a point, their chunk, where that is not 0:

    F3       forward of microbatch 3; F3.1: in the second chunk of a stage that holds several pieces of the model
    B3       its backward: the gradients of its inputs and of its weights
    I3, W3   the same in halves: the input gradient, for which the stage before waits; the weight gradient, which can be
             later
    RF3, SF3 post the receive of its activations; start sending them on
    RB3, SB3 the same for the gradients that travel back
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

__all__ = [
    "COMPUTATIONS",
    "OTHER_END",
    "RECEIVES",
    "RECEIVE_FOR",
    "SENDS",
    "SEND_AFTER",
    "Kind",
    "Task",
    "counted",
    "format_schedule",
    "parse_schedule",
]


class Kind(Enum):
    """Kinds of tasks; the value is the printed form."""

    RECV_FORWARD = "RF"
    FORWARD = "F"
    SEND_FORWARD = "SF"
    RECV_BACKWARD = "RB"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_BACKWARD = "SB"

    __hash__ = object.__hash__  # by identity: the hash of Enum is a Python function, and tasks are keys everywhere


class Task(NamedTuple):
    """One thing that a stage does.

    Attributes:
        kind: kind of the task.
        chunk: index of the stage's piece of the model, from 0; a stage of a plain pipeline has one piece.
        microbatch: from 0.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})

# The message that brings the input of a computation, and the message that takes its result away. Both halves of a
# backward need the incoming gradient; the stage keeps it between them, so that it is received once.
RECEIVE_FOR = {
    Kind.FORWARD: Kind.RECV_FORWARD,
    Kind.BACKWARD: Kind.RECV_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD,
}
SEND_AFTER = {
    Kind.FORWARD: Kind.SEND_FORWARD,
    Kind.BACKWARD: Kind.SEND_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.SEND_BACKWARD,
}
OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


def format_schedule(tasks: Sequence[Task]) -> str:
    """The tasks on one line."""
    return " ".join(map(str, tasks))


def parse_schedule(text: str) -> list[Task]:
    """The tasks of a line as `format_schedule` writes it.

    Raises:
        ValueError: a word is no task.
    """
    return [_task(word) for word in text.split()]


def _task(word: str) -> Task:
    match = re.fullmatch(r"([A-Z]+)(\d+)(?:\.(\d+))?", word)
    if match is None or match[1] not in {kind.value for kind in Kind}:
        kinds = ", ".join(kind.value for kind in Kind)
        raise ValueError(
            f"{word!r} is no task, such as F3 or F3.1: one of {kinds}, the microbatch, and for a chunk a point and "
            "its number"
        )
    return Task(Kind(match[1]), int(match[3] or 0), int(match[2]))


def counted(amount: int | str, noun: str) -> str:
    """`1 microbatch`, `2 microbatches`."""
    plural = "" if str(amount) == "1" else "es" if noun.endswith("ch") else "s"
    return f"{amount} {noun}{plural}"
