"""Parts of another schedule, in its order and its placement of chunks: forwards only, or one microbatch."""

from __future__ import annotations

from .one_f_one_b import OneFOneB
from .schedule import Schedule
from .tasks import Kind, Task, counted

__all__ = ["Inference", "OneMicrobatch"]


class Inference(Schedule):
    """The forwards of a schedule of training: the schedule of evaluation, which saves nothing for a backward.

    Args:
        training: None: 1F1B, with one chunk on each stage.

    Raises:
        ValueError: a schedule of training for other sizes; no stage, or no microbatch.
    """

    def __init__(self, num_stages: int, num_microbatches: int, training: Schedule | None = None) -> None:
        super().__init__(num_stages, num_microbatches)
        self._training = training or OneFOneB(num_stages, num_microbatches)
        if (self._training.num_stages, self._training.num_microbatches) != (num_stages, num_microbatches):
            raise ValueError(
                f"{self._training} has no forwards for {counted(num_stages, 'stage')} and "
                f"{counted(num_microbatches, 'microbatch')}: create it for the same sizes"
            )
        self.num_chunks = self._training.num_chunks

    def computations(self, stage: int) -> list[Task]:
        return [task for task in self._training.computations(stage) if task.kind is Kind.FORWARD]

    def peak_in_flight(self, stage: int) -> int:
        return 0

    def send_window(self, kind: Kind, stage: int) -> int:
        return self._training.send_window(kind, stage)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return self._training.virtual_stage(stage, chunk)

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        return self._training.holder(virtual_stage)


class OneMicrobatch(Schedule):
    """The tasks of another schedule for microbatch 0: the schedule that a check plays."""

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
