"""Whether the stages of a schedule do everything once, and nothing before what it starts from."""

from __future__ import annotations

from collections.abc import Sequence

from .tasks import COMPUTATIONS, Kind, Task

__all__ = ["fault_of"]

_HALVES = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


def fault_of(orders: Sequence[Sequence[Task]], num_chunks: int, num_microbatches: int) -> str | None:
    """What a stage leaves out, does twice or does too early; None: nothing.

    Every stage does the forward of every microbatch in each of its chunks. If any stage does a backward, each of these
    forwards has one, whole or in halves, the input half first.

    Args:
        orders: the computations of each stage.
    """
    trains = any(task.kind is not Kind.FORWARD for order in orders for task in order)
    for stage, order in enumerate(orders):
        fault = _fault_on_stage(order, num_chunks, num_microbatches, trains)
        if isinstance(fault, Task):
            others = [f", and stage {other} does {fault}" for other, tasks in enumerate(orders) if fault in tasks]
            return f"stage {stage} never does {fault}" + "".join(others[:1])
        if fault is not None:
            return f"stage {stage} {fault}"
    return None


def _fault_on_stage(order: Sequence[Task], num_chunks: int, num_microbatches: int, trains: bool) -> str | Task | None:
    """What is wrong; a task that is left out."""
    missing: dict[tuple[int, int], frozenset[Kind]] = {}  # (chunk, microbatch) -> halves of its backward to come
    for task in order:
        key = task.chunk, task.microbatch
        if task.kind not in COMPUTATIONS:
            return f"has {task} among its computations, which is a message: `tasks` adds these"
        if not 0 <= task.microbatch < num_microbatches:
            return f"does {task}, but microbatches are 0..{num_microbatches - 1}"
        if not 0 <= task.chunk < num_chunks:
            return f"does {task}, but the chunks of a stage are 0..{num_chunks - 1}"
        if task.kind is Kind.FORWARD:
            if key in missing:
                return f"does {task} twice"
            missing[key] = _HALVES
            continue
        halves = _HALVES if task.kind is Kind.BACKWARD else frozenset({task.kind})
        early = task.kind is Kind.BACKWARD_WEIGHT and Kind.BACKWARD_INPUT in missing.get(key, ())
        if early or not halves <= missing.get(key, frozenset()):
            return f"does {task} before what it starts from, or twice"
        missing[key] -= halves
    for microbatch in range(num_microbatches):
        for chunk in range(num_chunks):
            if (chunk, microbatch) not in missing:
                return Task(Kind.FORWARD, chunk, microbatch)
            halves = missing[chunk, microbatch]
            if trains and halves:
                kind = Kind.BACKWARD if len(halves) == 2 else next(iter(halves))
                return Task(kind, chunk, microbatch)
    return None
