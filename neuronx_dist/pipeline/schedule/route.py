"""What a runtime asks of a schedule at each task, answered once for all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .tasks import RECEIVE_FOR, SEND_AFTER, SENDS, Kind, Task

__all__ = ["Link", "Route", "route_of"]


class Link(NamedTuple):
    """Two computations that follow one another in the model, seen from the one that this stage does.

    Attributes:
        message: this stage's receive of what the computation needs, or its send of what it makes.
        stage: the other one's; this one, if both are here, and then there is no message.
        other_end: the other stage's send or receive.
    """

    message: Task
    stage: int
    other_end: Task


class Route(NamedTuple):
    """What a stage does, and with whom.

    Attributes:
        tasks: all of them, in order.
        before: by computation, where what it needs comes from; none at the ends of the pipeline.
        after: by computation, where what it makes goes to; none at the ends of the pipeline.
        other_stage: by send and receive, which stage has the other end.
        windows: by kind of send, how many are under way at one time.
    """

    tasks: tuple[Task, ...]
    before: dict[Task, Link]
    after: dict[Task, Link]
    other_stage: dict[Task, int]
    windows: dict[Kind, int]


def route_of(
    tasks: Sequence[Task], peer: Callable[[Task], tuple[int, Task] | None], send_window: Callable[[Kind], int]
) -> Route:
    """The route of a stage with these tasks; `peer` and `send_window` are those of its schedule there."""

    def links(kinds: dict[Kind, Kind]) -> dict[Task, Link]:
        messages = {task: task._replace(kind=kinds[task.kind]) for task in tasks if task.kind in kinds}
        other_ends = {task: peer(message) for task, message in messages.items()}
        return {task: Link(messages[task], *end) for task, end in other_ends.items() if end is not None}

    before, after = links(RECEIVE_FOR), links(SEND_AFTER)
    other_stage = {link.message: link.stage for link in (*before.values(), *after.values())}
    return Route(tuple(tasks), before, after, other_stage, {kind: send_window(kind) for kind in SENDS})
