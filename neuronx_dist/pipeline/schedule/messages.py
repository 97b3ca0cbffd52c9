"""Adding messages to an order of computations, so that no order can deadlock.

A receive is posted one computation ahead of the one that needs it, so that its sender finds it waiting; a send starts
right after the computation that makes its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .tasks import RECEIVE_FOR, SEND_AFTER, Task

__all__ = ["with_messages"]


def with_messages(order: Sequence[Task], is_message: Callable[[Task], bool]) -> list[Task]:
    """Adds sends and receives to a stage's computations.

    Args:
        order: forwards and backwards of one stage.
        is_message: whether a send or receive goes to another stage; what has no other end, or has it on the same stage,
            is left out.
    """

    def receive(task: Task) -> list[Task]:
        message = task._replace(kind=RECEIVE_FOR[task.kind]) if task.kind in RECEIVE_FOR else None
        return [message] if message is not None and is_message(message) else []

    def send(task: Task) -> list[Task]:
        message = task._replace(kind=SEND_AFTER[task.kind]) if task.kind in SEND_AFTER else None
        return [message] if message is not None and is_message(message) else []

    tasks = receive(order[0]) if order else []
    for position, task in enumerate(order):
        if position + 1 < len(order):
            tasks += receive(order[position + 1])
        tasks.append(task)
        tasks += send(task)
    return tasks
