"""What a schedule answers. Runtime, layout, memory prediction and check ask it, and keep no formula of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

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

    Raises:
        ValueError: there is no stage, or no microbatch.
    """

    num_chunks: int = 1

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        if num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {num_stages}")
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
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
        """The most forwards of which a stage keeps activations at one time: microbatches, times chunks.

        Raises:
            RuntimeError: the stage leaves out a part of a backward, or does one before its forward.
        """
        return most_in_flight(stage, self.computations(stage))

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
        """How many sends of one kind a stage has under way before it waits for the oldest of them.

        By default it never waits. A smaller window frees what was sent sooner; `simulate` shows one that is too small.
        """
        return self.num_microbatches * self.num_chunks

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
        if task.kind not in OTHER_END:
            raise ValueError(f"{task} is a computation: it has no other end")
        ahead = task.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        neighbour = self.virtual_stage(stage, task.chunk) + (1 if ahead else -1)
        if not 0 <= neighbour < self.num_virtual_stages:
            return None
        other_stage, chunk = self.holder(neighbour)
        return other_stage, Task(OTHER_END[task.kind], chunk, task.microbatch)

    def is_message(self, stage: int, task: Task) -> bool:
        """Whether a send or receive goes to another stage."""
        other_end = self.peer(stage, task)
        return other_end is not None and other_end[0] != stage

    def microbatches_until_repeat(self, stage: int) -> int:
        """How many microbatches show all that a stage holds at one time: with more of them a step repeats itself.

        So many are in flight, and one more adds to gradients that exist. Where a stage sends gradients, also a window
        of these sends is under way, and the next activations are expected.
        """
        sends = [Task(Kind.SEND_BACKWARD, chunk, 0) for chunk in range(self.num_chunks)]
        sends_gradients = any(self.is_message(stage, task) for task in sends)
        under_way = self.send_window(Kind.SEND_BACKWARD, stage) if sends_gradients else 0
        return min(self.num_microbatches, self.peak_in_flight(stage) + under_way + 1)
