"""A schedule that a user writes down as text, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

from .analysis import fault_of
from .schedule import Schedule
from .tasks import COMPUTATIONS, Task, parse_schedule

__all__ = ["WrittenSchedule"]


class WrittenSchedule(Schedule):
    """A schedule of written tasks, to try an order without a new class.

    The number of stages is the number of texts; the words name the microbatches and chunks.

        >>> schedule = WrittenSchedule("F0 F1 B0 B1", "F0 B0 F1 B1")
        >>> schedule = WrittenSchedule("F0 F0.1 B0.1 I0 W0", "F0 F0.1 I0.1 I0 W0.1 W0", holders=[0, 1, 1, 0])

    Args:
        stages: the computations of each stage. Sends and receives are added to a stage that names none.
        holders: the stage that holds each piece of the model, in the model's order; the pieces of a stage are its
            chunks 0, 1 and so on. None: pieces go around the line of stages.

    Raises:
        ValueError: there is no stage, or a stage is no text; a word is no task; a stage leaves out a task that another
            stage does, or does a task twice or too early; `holders` does not name each stage once per chunk.
    """

    def __init__(self, *stages: str, holders: Sequence[int] | None = None) -> None:
        if not stages or not all(isinstance(text, str) for text in stages):
            raise ValueError(
                'WrittenSchedule takes one string for each stage, as in WrittenSchedule("F0 F1 B0 B1", "F0 B0 F1 '
                f'B1"), got {", ".join(map(repr, stages)) or "none"}'
            )
        self._stages = [_parsed(stage, text) for stage, text in enumerate(stages)]
        tasks = [task for order in self._stages for task in order]
        super().__init__(len(stages), 1 + max((task.microbatch for task in tasks), default=0))
        self.num_chunks = 1 + max((task.chunk for task in tasks), default=0)
        orders = [self.computations(stage) for stage in range(self.num_stages)]
        fault = fault_of(orders, self.num_chunks, self.num_microbatches)
        if fault is not None:
            sizes = f"microbatches 0..{self.num_microbatches - 1}, chunks 0..{self.num_chunks - 1}"
            raise ValueError(f"{fault}; the strings have {sizes}")
        around = list(range(self.num_stages)) * self.num_chunks
        if holders is not None and sorted(holders) != sorted(around):
            raise ValueError(
                f"holders must name each of {self.num_stages} stages as often as it has chunks, which is "
                f"{self.num_chunks}, got {list(holders)}"
            )
        self._holders = around if holders is None else list(holders)

    def computations(self, stage: int) -> list[Task]:
        return [task for task in self._stages[stage] if task.kind in COMPUTATIONS]

    def tasks(self, stage: int) -> list[Task]:
        self.check_stage(stage)
        written = self._stages[stage]
        return super().tasks(stage) if written == self.computations(stage) else list(written)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return [position for position, holder in enumerate(self._holders) if holder == stage][chunk]

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        stage = self._holders[virtual_stage]
        return stage, self._holders[:virtual_stage].count(stage)


def _parsed(stage: int, text: str) -> list[Task]:
    try:
        return parse_schedule(text)
    except ValueError as error:
        raise ValueError(f"stage {stage}: {error}") from None
