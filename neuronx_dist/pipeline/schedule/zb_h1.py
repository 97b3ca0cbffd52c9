"""ZB-H1: 1F1B whose weight gradients fill a part of the bubble."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["ZeroBubbleH1"]


class ZeroBubbleH1(Schedule):
    """The handcrafted schedule ZB-H1 of "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).

    The order is that of 1F1B, with backwards in halves, and stage `s` does the weight gradient of a microbatch `s`
    microbatches later than its input gradient. Then each stage keeps `num_stages` microbatches, as the first one of
    1F1B does, and a step has a bubble of `(num_stages - 1) * (F + I - W)` in place of `(num_stages - 1) * (F + I + W)`,
    from `num_stages` microbatches on, if a weight gradient takes no longer than a forward and than an input gradient.

    >>> print(format_schedule(ZeroBubbleH1(num_stages=2, num_microbatches=3).computations(stage=1)))
    F0 I0 F1 I1 W0 F2 I2 W1 W2
    """

    bounded_sends = True

    def computations(self, stage: int) -> list[Task]:
        order = []
        for microbatch in range(self.num_microbatches + self.num_stages - 1):
            order.append(Task(Kind.FORWARD, 0, microbatch))
            warmup = self.num_stages - 1 - stage
            order.append(Task(Kind.BACKWARD_INPUT, 0, microbatch - warmup))
            order.append(Task(Kind.BACKWARD_WEIGHT, 0, microbatch - warmup - stage))
        return [task for task in order if 0 <= task.microbatch < self.num_microbatches]

    def peak_in_flight(self, stage: int) -> int:
        return min(self.num_stages, self.num_microbatches)

    @property
    def bubble(self) -> float:
        # Weight gradients fill the drain, as many as there are stages after the first.
        idle = 2 * (self.num_stages - 1) - (min(self.num_stages, self.num_microbatches) - 1)
        return idle / (3 * self.num_microbatches + idle)
