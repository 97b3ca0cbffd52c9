"""How many forwards wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence

from .tasks import Kind, Task

__all__ = ["most_in_flight"]


def most_in_flight(stage: int, tasks: Sequence[Task]) -> int:
    """The most forwards of a stage whose backward is not over. Without any backward nothing is kept.

    Raises:
        RuntimeError: a backward without its forward, or a forward of which a part of the backward never comes.
    """
    if not any(task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) for task in tasks):
        return 0
    peak = 0
    missing: dict[tuple[int, int], set[Kind]] = {}  # (chunk, microbatch) -> parts of its backward that are to come
    for task in tasks:
        key = task.chunk, task.microbatch
        if task.kind is Kind.FORWARD:
            missing[key] = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        elif task.kind is Kind.BACKWARD or task.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            parts = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} if task.kind is Kind.BACKWARD else {task.kind}
            early = task.kind is Kind.BACKWARD_WEIGHT and Kind.BACKWARD_INPUT in missing.get(key, ())
            if early or not parts <= missing.get(key, set()):
                raise RuntimeError(f"stage {stage} does {task} before what it starts from, or twice")
            missing[key] -= parts
            if not missing[key]:
                del missing[key]
        peak = max(peak, len(missing))
    for (chunk, microbatch), kinds in missing.items():
        absent = Kind.BACKWARD if len(kinds) == 2 else next(iter(kinds))
        raise RuntimeError(f"stage {stage} never does {Task(absent, chunk, microbatch)}")
    return peak
