"""ZB-V: two chunks on each stage, which go down the line of stages and up again; no bubble, with the memory of 1F1B."""

from __future__ import annotations

from .schedule import Schedule
from .tasks import Kind, Task

__all__ = ["ZeroBubbleV"]


class ZeroBubbleV(Schedule):
    """The schedule ZB-V of "Pipeline Parallelism with Controllable Memory" (Qi et al., 2024), backwards in halves.

    Chunk 0 of all stages is the first half of the model, down the line of stages; chunk 1 is the second half, up again:
    the last stage hands over to itself, and the first stage has the loss. If a forward, and each half of a backward,
    take equally long and there are at least `2 * num_stages - 1` microbatches, no stage waits between its first task
    and its last. A stage keeps `2 * num_stages` activations of a chunk, as much as `num_stages` of a whole stage,
    which is what the first stage of 1F1B keeps.

    >>> print(format_schedule(ZeroBubbleV(num_stages=2, num_microbatches=2).computations(stage=1)))
    F0 F0.1 F1 F1.1 I0.1 W0.1 I0 W0 I1.1 W1.1 I1 W1
    """

    num_chunks = 2
    bounded_sends = True

    def computations(self, stage: int) -> list[Task]:
        # The order of a step with enough microbatches to fill the pipeline; tasks of the surplus ones are left out.
        total = max(self.num_microbatches, 2 * self.num_stages - 1)
        after = self.num_stages - stage  # stages from this one to the last
        order = _Order()
        order.add("F.0", times=2 * after - 1)
        order.add("F.1 F.0", times=stage)
        order.add("F.1 I.1 W.1", times=after)
        order.add("F.0 I.0 W.0 F.1 I.1 W.1", times=total - order.count("F.0"))
        order.add("I.0 W.0 F.1 I.1 W.1", times=total - order.count("F.1"))
        order.add("I.0 I.1", times=stage)
        order.add("I.0 W.0", times=after)
        order.add("W.1", times=total - order.count("W.1"))
        order.add("W.0", times=total - order.count("W.0"))
        return [task for task in order.tasks if task.microbatch < self.num_microbatches]

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage if chunk == 0 else 2 * self.num_stages - 1 - stage

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        if virtual_stage < self.num_stages:
            return virtual_stage, 0
        return 2 * self.num_stages - 1 - virtual_stage, 1

    def peak_in_flight(self, stage: int) -> int:
        return min(2 * self.num_stages, 2 * self.num_microbatches, self.num_microbatches + stage + 1)

    @property
    def bubble(self) -> float:
        # Stages begin one after the other; few microbatches do not fill the way down and up again.
        idle = max(self.num_stages - 1, 4 * (self.num_stages - 1) - 2 * (self.num_microbatches - 1))
        return idle / (6 * self.num_microbatches + idle)

    def few_sends(self, kind: Kind, stage: int) -> int:
        # Activations that go up again are needed only when all activations that go down meanwhile have left.
        return max(2, self.num_stages - stage) if kind is Kind.SEND_FORWARD else 2


class _Order:
    """Builder of an order: the next task of a kind and a chunk is for the next microbatch."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._counts: dict[tuple[Kind, int], int] = {}

    def add(self, words: str, times: int) -> None:
        """Adds tasks by kind and chunk, such as `F.0 I.1`, a number of times."""
        for key in [_kind_and_chunk(word) for word in words.split()] * times:
            microbatch = self._counts.get(key, 0)
            self.tasks.append(Task(*key, microbatch))
            self._counts[key] = microbatch + 1

    def count(self, word: str) -> int:
        return self._counts.get(_kind_and_chunk(word), 0)


def _kind_and_chunk(word: str) -> tuple[Kind, int]:
    kind, _, chunk = word.partition(".")
    return Kind(kind), int(chunk)
