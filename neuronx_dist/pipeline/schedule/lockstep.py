"""Rounds of a schedule without messages: all stages in lockstep, all ranks in the transfers after each round."""

from __future__ import annotations

from typing import NamedTuple

from .schedule import Schedule
from .tasks import RECEIVE_FOR, SEND_AFTER, Kind, Task

__all__ = ["Round", "rounds"]


class Round(NamedTuple):
    """A round: the task of each stage, if it has one, and the transfers after it."""

    tasks: tuple[Task | None, ...]
    forward: bool  # a stage has activations for another
    backward: bool  # a stage has gradients for another

    def __str__(self) -> str:
        return " ".join(str(task or "-") for task in self.tasks) + " >" * self.forward + " <" * self.backward


def rounds(schedule: Schedule) -> list[Round]:
    """Divides the computations of all stages into rounds; a stage does its next task once the input has arrived.

    The result of a round has arrived at the neighbour when the next round begins.

        >>> for moment in rounds(OneFOneB(num_stages=2, num_microbatches=2)):
        ...     print(moment)
        F0 - >
        F1 F0 >
        - B0 <
        B0 F1
        - B1 <
        B1 -

    Raises:
        RuntimeError: nothing can run (a deadlock), with the task that each stage stands at.
    """
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    position = [0] * schedule.num_stages
    sent: set[tuple[int, Task]] = set()  # (stage, send), by all computations so far
    result = []

    def ready(stage: int, task: Task) -> bool:
        if task.kind not in RECEIVE_FOR:
            return True
        sender = schedule.peer(stage, task._replace(kind=RECEIVE_FOR[task.kind]))
        return sender is None or sender in sent

    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        tasks: list[Task | None] = []
        for stage, order in enumerate(orders):
            task = order[position[stage]] if position[stage] < len(order) else None
            tasks.append(task if task is not None and ready(stage, task) else None)
        sends = []
        for stage, task in enumerate(tasks):
            if task is not None:
                position[stage] += 1
                if task.kind in SEND_AFTER:
                    sends.append((stage, task._replace(kind=SEND_AFTER[task.kind])))
        if not any(tasks):
            raise RuntimeError(f"deadlock: {positions(orders, position)}")
        sent.update(sends)
        kinds = {send.kind for stage, send in sends if schedule.is_message(stage, send)}
        result.append(Round(tuple(tasks), Kind.SEND_FORWARD in kinds, Kind.SEND_BACKWARD in kinds))
    return result


def positions(orders: list[list[Task]], position: list[int]) -> str:
    """The task that each stage stands at, for the message of a deadlock."""
    return ", ".join(
        f"stage {stage} at {order[position[stage]] if position[stage] < len(order) else 'the end'}"
        for stage, order in enumerate(orders)
    )
