"""Schedules that a user could write, each in a few lines: the package knows nothing of them."""

from __future__ import annotations

from neuronx_dist.pipeline.schedule import GPipe, Kind, Schedule, Task


class Halves(GPipe):
    """All forwards, then all input gradients, then all weight gradients, where others would wait."""

    def computations(self, stage: int) -> list[Task]:
        kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return [Task(kind, 0, microbatch) for kind in kinds for microbatch in range(self.num_microbatches)]

    @property
    def bubble(self) -> float:
        # A stage waits for its first activation or its last stage's, and for its first gradient: both ways of the line.
        rounds = 3 * self.num_microbatches + 2 * (self.num_stages - 1)
        return 1 - 3 * self.num_microbatches / rounds


class Around(Schedule):
    """GPipe with two chunks on each stage: microbatches go around the line of stages twice."""

    num_chunks = 2

    def computations(self, stage: int) -> list[Task]:
        pairs = [(chunk, microbatch) for chunk in range(2) for microbatch in range(self.num_microbatches)]
        return [Task(Kind.FORWARD, *pair) for pair in pairs] + [Task(Kind.BACKWARD, *pair) for pair in reversed(pairs)]


class ThereAndBack(Around):
    """The same, but the second chunks are in reverse order: the last stage hands over to itself, as in ZB-V."""

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage if chunk == 0 else 2 * self.num_stages - 1 - stage

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        if virtual_stage < self.num_stages:
            return virtual_stage, 0
        return 2 * self.num_stages - 1 - virtual_stage, 1
