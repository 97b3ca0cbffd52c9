"""What a schedule does for its first microbatch."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Task

__all__ = ["OneMicrobatch"]


class OneMicrobatch(Schedule):
    """The tasks of another schedule for microbatch 0, in its order and its placement of chunks: what a check plays."""

    def __init__(self, whole: Schedule) -> None:
        super().__init__(whole.num_stages, 1)
        self.num_chunks = whole.num_chunks
        self._whole = whole

    def computations(self, stage: int) -> list[Task]:
        return [task for task in self._whole.computations(stage) if task.microbatch == 0]

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return self._whole.virtual_stage(stage, chunk)

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        return self._whole.holder(virtual_stage)
