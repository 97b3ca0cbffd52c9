"""Interleaved 1F1B: several chunks of the model on each stage, and a bubble that is smaller by their number."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["Interleaved"]


class Interleaved(Schedule):
    """1F1B with several chunks on each stage (Narayanan et al., 2021, section 2.2).

    Microbatches go around the line of stages `num_chunks` times, in groups of at least `num_stages`, so that the first
    of a group is back at a stage when the last has left it: all of a group in the first chunk, all in the second, and
    so on. A stage warms up with these forwards, then alternates forward and backward, then drains the backwards.

    Groups are as equal as the number of microbatches allows, the larger ones first. With a multiple of `num_stages`
    all have that size, and the order is Megatron-LM's. A step takes the ideal time, `num_microbatches * (F + B) +
    (num_stages - 1) * (F + B) / num_chunks`, with any number of microbatches from `num_stages` on.

    >>> print(format_schedule(Interleaved(num_stages=2, num_microbatches=2, num_chunks=2).computations(stage=1)))
    F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

    Raises:
        ValueError: fewer than two chunks; no stage, or no microbatch.
    """

    bounded_sends = True

    def __init__(self, num_stages: int, num_microbatches: int, num_chunks: int, *, deallocate: bool = False) -> None:
        super().__init__(num_stages, num_microbatches, deallocate=deallocate)
        if num_chunks < 2:
            raise ValueError(
                f"an interleaved schedule needs at least 2 chunks on each stage, got {num_chunks} "
                "(virtual_pipeline_size); for one chunk use 1F1B"
            )
        self.num_chunks = num_chunks

    def computations(self, stage: int) -> list[Task]:
        forwards = [
            Task(Kind.FORWARD, chunk, microbatch)
            for group in self.groups
            for chunk in range(self.num_chunks)
            for microbatch in group
        ]
        last_chunk = self.num_chunks - 1
        backwards = [Task(Kind.BACKWARD, last_chunk - task.chunk, task.microbatch) for task in forwards]
        warmup = self._warmup(stage)
        alternating = [task for pair in zip(forwards[warmup:], backwards) for task in pair]
        return forwards[:warmup] + alternating + backwards[len(forwards) - warmup :]

    def peak_in_flight(self, stage: int) -> int:
        return min(self._warmup(stage) + 1, self.num_microbatches * self.num_chunks)

    @property
    def bubble(self) -> float:
        # With fewer microbatches than stages, a stage also waits for the first to come around, for each further chunk.
        missing = max(0, self.num_stages - self.num_microbatches)
        idle = self.num_stages - 1 + (self.num_chunks - 1) * missing
        return idle / (self.num_microbatches * self.num_chunks + idle)

    def few_sends(self, kind: Kind, stage: int) -> int:
        # Activations that come around are needed only when the rest of their group has passed.
        goes_around = stage == (self.num_stages - 1 if kind is Kind.SEND_FORWARD else 0)
        return max(2, len(self.groups[0]) - self.num_stages) if goes_around else 2

    @property
    def groups(self) -> list[range]:
        """Microbatches that go around together."""
        number = max(1, self.num_microbatches // self.num_stages)
        size, larger = divmod(self.num_microbatches, number)
        starts = [index * size + min(index, larger) for index in range(number + 1)]
        return [range(start, end) for start, end in zip(starts, starts[1:])]

    def _warmup(self, stage: int) -> int:
        """Number of forwards before the first backward, without the forward right before it."""
        ahead = (self.num_chunks - 1) * len(self.groups[0]) + 2 * (self.num_stages - stage - 1)
        return min(ahead, self.num_microbatches * self.num_chunks)
