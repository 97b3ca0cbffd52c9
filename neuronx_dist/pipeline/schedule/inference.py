"""Forwards only: the schedule of evaluation."""

from __future__ import annotations

from .lockstep import rounds
from .one_f_one_b import OneFOneB
from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["Inference"]


class Inference(Schedule):
    """All forwards, one after the other, chunk by chunk. Nothing is kept, for there is no backward.

    Args:
        chunks_of: the schedule of training, whose chunks the stages have; None: one on each stage.
    """

    def __init__(self, num_stages: int, num_microbatches: int, chunks_of: Schedule | None = None) -> None:
        super().__init__(num_stages, num_microbatches)
        self._chunks_of = chunks_of
        self.num_chunks = 1 if chunks_of is None else chunks_of.num_chunks

    def computations(self, stage: int) -> list[Task]:
        return [
            Task(Kind.FORWARD, chunk, microbatch)
            for chunk in range(self.num_chunks)
            for microbatch in range(self.num_microbatches)
        ]

    def peak_in_flight(self, stage: int) -> int:
        return 0

    @property
    def bubble(self) -> float:
        if self.num_chunks == 1:
            return (self.num_stages - 1) / (self.num_microbatches + self.num_stages - 1)
        return 1 - self.num_chunks * self.num_microbatches / len(rounds(self))

    def send_window(self, kind: Kind, stage: int) -> int:
        """As in training; with several chunks a send never waits."""
        if self.num_chunks > 1:
            return super().send_window(kind, stage)
        training = self._chunks_of or OneFOneB(self.num_stages, self.num_microbatches)
        return training.send_window(kind, stage)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        schedule = self._chunks_of
        return super().virtual_stage(stage, chunk) if schedule is None else schedule.virtual_stage(stage, chunk)

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        schedule = self._chunks_of
        return super().holder(virtual_stage) if schedule is None else schedule.holder(virtual_stage)
