"""How many forwards wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence

from .tasks import Kind, Task

__all__ = ["most_in_flight"]


def most_in_flight(order: Sequence[Task]) -> int:
    """The most forwards of a stage whose backward is not over. Without any backward nothing is kept."""
    if all(task.kind is Kind.FORWARD for task in order):
        return 0
    most = now = 0
    for task in order:
        if task.kind is Kind.FORWARD:
            now += 1
            most = max(most, now)
        elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            now -= 1
    return most
