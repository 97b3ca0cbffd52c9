"""Forwards only: the schedule of evaluation."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["Inference"]


class Inference(Schedule):
    """All forwards, one after the other. Nothing is kept, for there is no backward."""

    def computations(self, stage: int) -> list[Task]:
        return [Task(Kind.FORWARD, 0, microbatch) for microbatch in range(self.num_microbatches)]

    def peak_in_flight(self, stage: int) -> int:
        return 0

    @property
    def bubble(self) -> float:
        return (self.num_stages - 1) / (self.num_microbatches + self.num_stages - 1)

    def send_window(self, kind: Kind, stage: int) -> int:
        """As many sends as there are stages from here on, as in training."""
        return self.num_stages - stage if kind is Kind.SEND_FORWARD else 2
