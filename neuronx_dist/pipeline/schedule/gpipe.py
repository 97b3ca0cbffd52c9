"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["GPipe"]


class GPipe(Schedule):
    """All forwards, then all backwards, the last microbatch first (Huang et al., 2019).

    As fast as 1F1B, but a stage keeps the activations of all microbatches.

    >>> print(format_schedule(GPipe(num_stages=2, num_microbatches=2).tasks(stage=0)))
    F0 SF0 RB1 F1 SF1 RB0 B1 B0
    """

    bounded_sends = True

    def computations(self, stage: int) -> list[Task]:
        forwards = [Task(Kind.FORWARD, 0, microbatch) for microbatch in range(self.num_microbatches)]
        return forwards + [task._replace(kind=Kind.BACKWARD) for task in reversed(forwards)]

    def peak_in_flight(self, stage: int) -> int:
        return self.num_microbatches

    @property
    def bubble(self) -> float:
        return (self.num_stages - 1) / (self.num_microbatches + self.num_stages - 1)
