"""1F1B: the schedule of training."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["OneFOneB"]


class OneFOneB(Schedule):
    """The 1F1B schedule (PipeDream-flush; Narayanan et al., 2021).

    A stage warms up with `num_stages - stage - 1` forwards, then alternates forward and backward, then drains the
    backwards. In lockstep it takes `2 * (num_microbatches + num_stages - 1)` rounds.

    >>> print(format_schedule(OneFOneB(num_stages=2, num_microbatches=2).tasks(stage=0)))
    F0 SF0 RB0 F1 SF1 RB1 B0 B1
    """

    bounded_sends = True

    def computations(self, stage: int) -> list[Task]:
        warmup = min(self.num_stages - stage - 1, self.num_microbatches)
        order = [Task(Kind.FORWARD, 0, microbatch) for microbatch in range(warmup)]
        for microbatch in range(self.num_microbatches - warmup):
            order.append(Task(Kind.FORWARD, 0, warmup + microbatch))
            order.append(Task(Kind.BACKWARD, 0, microbatch))
        drained = range(self.num_microbatches - warmup, self.num_microbatches)
        return order + [Task(Kind.BACKWARD, 0, microbatch) for microbatch in drained]

    def peak_in_flight(self, stage: int) -> int:
        return min(self.num_stages - stage, self.num_microbatches)

    @property
    def bubble(self) -> float:
        return (self.num_stages - 1) / (self.num_microbatches + self.num_stages - 1)
