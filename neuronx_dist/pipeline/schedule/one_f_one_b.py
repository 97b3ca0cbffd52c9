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

    Args:
        max_forward_sends: most sends of activations that a stage has under way; it waits for the oldest one, and then
            frees it. None: as many as there are microbatches in flight, with which it never waits.
    """

    def __init__(self, num_stages: int, num_microbatches: int, *, max_forward_sends: int | None = None) -> None:
        super().__init__(num_stages, num_microbatches)
        if max_forward_sends is not None and max_forward_sends < 1:
            raise ValueError(f"max_forward_sends must be at least 1, got {max_forward_sends}")
        self._max_forward_sends = max_forward_sends

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

    def send_window(self, kind: Kind, stage: int) -> int:
        """Sends of one kind under way at one time.

        Activations: as many as there are microbatches in flight, which is when the gradient of the oldest has come
        back, so the wait never blocks. Gradients: two; the second is sent when the stage before has used the first.
        """
        if kind is not Kind.SEND_FORWARD:
            return 2
        return min(self.num_stages - stage, self._max_forward_sends or self.num_stages)
