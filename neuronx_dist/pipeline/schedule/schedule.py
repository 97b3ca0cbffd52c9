"""What a schedule answers. Runtime, layout, memory prediction and check ask it, and keep no formula of their own."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from functools import cached_property

from .completeness import fault_of
from .holdings import most_held
from .in_flight import most_in_flight
from .messages import with_messages
from .route import Route, route_of
from .tasks import OTHER_END, Kind, Task
from .timing import Costs, bubble_of, timeline_of

__all__ = ["Schedule"]


class Schedule(ABC):
    """In which order the stages of a pipeline do what, for all microbatches of a step.

    A schedule is a subclass in a file of its own. It defines `computations`; all else has a default, for stages in a
    line, or for chunks that go around the line of stages several times. `peak_in_flight` and `bubble` are counted,
    unless it has a closed formula for them.

    Attributes:
        num_stages, num_microbatches: of the pipeline, and of a step.
        num_chunks: pieces of the model on each stage; 1 unless a subclass sets it.
        bounded_sends: whether few sends are under way at one time, so that what was sent is freed before the step ends;
            for orders which are proven to run with it. False unless a subclass sets it.
        deallocate: whether even fewer are, if `bounded_sends`.

    Raises:
        ValueError: there is no stage, or no microbatch.
    """

    num_chunks: int = 1
    bounded_sends: bool = False

    def __init__(self, num_stages: int, num_microbatches: int, *, deallocate: bool = False) -> None:
        if num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {num_stages}")
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.deallocate = deallocate
        self._other_ends: dict[tuple[int, Kind, int], tuple[int, Kind, int] | None] = {}
        self._routes: dict[int, Route] = {}

    def __repr__(self) -> str:
        chunks = f", num_chunks={self.num_chunks}" if self.num_chunks > 1 else ""
        return f"{type(self).__name__}(num_stages={self.num_stages}, num_microbatches={self.num_microbatches}{chunks})"

    # --- what each schedule defines

    @abstractmethod
    def computations(self, stage: int) -> list[Task]:
        """The forwards and backwards of a stage, in order. A backward is one task, or its two halves."""

    # --- what has a default

    def peak_in_flight(self, stage: int) -> int:
        """The most forwards of which a stage keeps activations at one time: microbatches, times chunks."""
        return most_in_flight(self.computations(stage))

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits, if a forward and each half of a backward take equally long.

        Messages take no time.

        Raises:
            RuntimeError: computations wait for each other, or for one that never comes.
        """
        orders = [self.computations(stage) for stage in range(self.num_stages)]
        return bubble_of(timeline_of(orders, self.peer, Costs()))

    def send_window(self, kind: Kind, stage: int) -> int:
        """How many sends of one kind a stage has under way before it waits for the oldest of them, and frees it.

        With `bounded_sends`: of gradients `few_sends`; of activations as many as there are in flight, for when the
        oldest has been used its gradient comes back, or `few_sends` with `deallocate`. Else a send never waits.
        `prove` shows a window that is too small.
        """
        if not self.bounded_sends:
            return self.num_microbatches * self.num_chunks
        few = self.few_sends(kind, stage)
        if kind is Kind.SEND_BACKWARD or self.deallocate:
            return few
        return max(few, self.peak_in_flight(stage))

    def few_sends(self, kind: Kind, stage: int) -> int:
        """How many sends of one kind are enough for no stage to wait, whatever tasks take: one is used, one comes."""
        return 2

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Position of a stage's chunk in the model: 0 is the first piece of it."""
        return chunk * self.num_stages + stage

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        """The stage and the chunk at a position in the model; the reverse of `virtual_stage`."""
        chunk, stage = divmod(virtual_stage, self.num_stages)
        return stage, chunk

    # --- what follows from it

    @property
    def num_virtual_stages(self) -> int:
        """Pieces into which the model is cut."""
        return self.num_stages * self.num_chunks

    @property
    def holders(self) -> list[int]:
        """The stage that holds each piece of the model, in the model's order."""
        return [self.holder(virtual_stage)[0] for virtual_stage in range(self.num_virtual_stages)]

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards, so that forwards have to keep what these need."""
        return any(task.kind is not Kind.FORWARD for task in self.computations(0))

    def tasks(self, stage: int) -> list[Task]:
        """All that a stage does, in order: its computations, and the messages to other stages around them.

        Raises:
            ValueError: there is no such stage.
        """
        self.check_stage(stage)
        return with_messages(self.computations(stage), lambda message: self.is_message(stage, message))

    def route(self, stage: int) -> Route:
        """What a stage does and with whom, for a runtime: computed once, so a schedule is not changed afterwards.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in self._routes:
            self._routes[stage] = route_of(
                self.tasks(stage), lambda task: self.peer(stage, task), lambda kind: self.send_window(kind, stage)
            )
        return self._routes[stage]

    def check_stage(self, stage: int) -> None:
        """Raises ValueError if there is no such stage."""
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"there is no stage {stage} in a pipeline of {self.num_stages} (0..{self.num_stages - 1})")

    def peer(self, stage: int, task: Task) -> tuple[int, Task] | None:
        """The other end of a send or receive: which stage has it, and its task there.

        None at both ends of the pipeline, where nothing is sent. Where chunks that follow one another are on one stage,
        the other end is the same stage, and there is no message: the stage keeps the tensors.

        Raises:
            ValueError: the task is a computation.
        """
        key = stage, task.kind, task.chunk
        if key not in self._other_ends:
            self._other_ends[key] = self._other_end(stage, task)
        other_end = self._other_ends[key]
        return None if other_end is None else (other_end[0], Task(other_end[1], other_end[2], task.microbatch))

    def _other_end(self, stage: int, task: Task) -> tuple[int, Kind, int] | None:
        """Stage, kind and chunk of the other end, which is the same for all microbatches."""
        if task.kind not in OTHER_END:
            raise ValueError(f"{task} is a computation: it has no other end")
        ahead = task.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        neighbour = self.virtual_stage(stage, task.chunk) + (1 if ahead else -1)
        if not 0 <= neighbour < self.num_virtual_stages:
            return None
        other_stage, chunk = self.holder(neighbour)
        return other_stage, OTHER_END[task.kind], chunk

    def is_message(self, stage: int, task: Task) -> bool:
        """Whether a send or receive goes to another stage."""
        other_end = self.peer(stage, task)
        return other_end is not None and other_end[0] != stage

    @property
    def both_ways(self) -> bool:
        """Whether two stages send activations to each other, so that a queue for both ways could deadlock."""
        sends = {(source, target) for source, target in zip(self.holders, self.holders[1:]) if source != target}
        return any((target, source) in sends for source, target in sends)

    def microbatches_until_repeat(self, stage: int) -> int:
        """How many microbatches show all that a stage holds at one time: with more of them a step repeats itself.

        All, if the schedule is for this number of microbatches only.
        """
        held = self._most_held(stage)
        for num_microbatches in range(1, self.num_microbatches):
            shorter = copy.copy(self)
            shorter.num_microbatches = num_microbatches
            shorter._routes = {}
            fault = fault_of([shorter.computations(stage)], self.num_chunks, num_microbatches)
            if fault is None and shorter._most_held(stage) == held:
                return num_microbatches
        return self.num_microbatches

    def _most_held(self, stage: int) -> dict[tuple[Kind, int], set[tuple[int, ...]]]:
        return most_held(self.tasks(stage), self.num_chunks, lambda kind: self.send_window(kind, stage))
