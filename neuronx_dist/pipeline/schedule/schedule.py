"""`Schedule`, the only source of formulas about a schedule for runtime, layout, memory prediction and check."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from .analysis import Costs, bubble_of, fault_of, most_held, most_in_flight, timeline_of
from .tasks import OTHER_END, RECEIVE_FOR, SEND_AFTER, SENDS, Kind, Task

__all__ = ["Link", "Route", "Schedule"]


class Link(NamedTuple):
    """Link between two computations that follow one another in the model, seen from this stage's computation.

    Attributes:
        message: this stage's receive of the input of the computation, or its send of the result.
        stage: the stage of the other computation; this stage, if both are here, and then there is no message.
        other_end: the send or receive of the other stage.
    """

    message: Task
    stage: int
    other_end: Task


class Route(NamedTuple):
    """The tasks of a stage, and the stages at the other end of its messages.

    Attributes:
        tasks: all tasks of the stage, in order.
        before: by computation, the source of its input; none at the ends of the pipeline.
        after: by computation, the target of its result; none at the ends of the pipeline.
        other_stage: by send and receive, the stage at the other end.
        windows: by kind of send, the most that are under way at one time.
    """

    tasks: tuple[Task, ...]
    before: dict[Task, Link]
    after: dict[Task, Link]
    other_stage: dict[Task, int]
    windows: dict[Kind, int]


class Schedule(ABC):
    """Order of the tasks of all stages of a pipeline, for all microbatches of a step.

    A schedule is a subclass in its own file. The subclass defines `computations`; all else has a default, for stages in
    a line, or for chunks that go around the line of stages several times. `peak_in_flight` and `bubble` are counted,
    unless the subclass has closed formulas.

    Attributes:
        num_stages, num_microbatches: of the pipeline, and of a step.
        num_chunks: pieces of the model on each stage; 1 unless a subclass sets it.
        bounded_sends: whether few sends are under way at one time, so that sent tensors are freed before the step ends;
            True only for orders that are proven to run so. False unless a subclass sets it.
        deallocate: whether even fewer sends are under way, if `bounded_sends`.

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
        """The forwards and backwards of a stage, in order. A backward is one task or two halves."""

    # --- what has a default

    def peak_in_flight(self, stage: int) -> int:
        """The most forwards of which a stage keeps activations at one time, counted by microbatch and chunk."""
        return most_in_flight(self.computations(stage))

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits, if a forward and each half of a backward take equally long.

        Messages take no time.

        Raises:
            RuntimeError: computations wait for each other, or for a message that never comes.
        """
        orders = [self.computations(stage) for stage in range(self.num_stages)]
        return bubble_of(timeline_of(orders, self.peer, Costs()))

    def send_window(self, kind: Kind, stage: int) -> int:
        """Number of sends of one kind under way before a stage waits for the oldest send and frees its tensors.

        With `bounded_sends`: `few_sends` gradients; and as many activations as there are forwards in flight (the
        gradient of the oldest comes back once it has been used), or `few_sends` with `deallocate`. Else a send never
        waits. `prove` reports a window that is too small.
        """
        if not self.bounded_sends:
            return self.num_microbatches * self.num_chunks
        few = self.few_sends(kind, stage)
        if kind is Kind.SEND_BACKWARD or self.deallocate:
            return few
        return max(few, self.peak_in_flight(stage))

    def few_sends(self, kind: Kind, stage: int) -> int:
        """Number of sends of one kind with which no stage waits, whatever tasks take: one is used, one arrives."""
        return 2

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Position of a stage's chunk in the model: 0 is the first piece of the model."""
        return chunk * self.num_stages + stage

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        """The stage and the chunk at a position in the model; the inverse of `virtual_stage`."""
        chunk, stage = divmod(virtual_stage, self.num_stages)
        return stage, chunk

    # --- what follows from that

    @property
    def num_virtual_stages(self) -> int:
        """Number of pieces into which the model is cut."""
        return self.num_stages * self.num_chunks

    @property
    def holders(self) -> list[int]:
        """The stage that holds each piece of the model, in the model's order."""
        return [self.holder(virtual_stage)[0] for virtual_stage in range(self.num_virtual_stages)]

    @cached_property
    def trains(self) -> bool:
        """Returns whether there are backwards, so that forwards keep activations."""
        return any(task.kind is not Kind.FORWARD for task in self.computations(0))

    def tasks(self, stage: int) -> list[Task]:
        """All tasks of a stage, in order: computations, and the messages to other stages around them.

        Raises:
            ValueError: there is no such stage.
        """
        self.check_stage(stage)
        return _with_messages(self.computations(stage), lambda message: self.is_message(stage, message))

    def route(self, stage: int) -> Route:
        """The route of a stage, for a runtime; computed once, so a schedule must not be changed afterwards.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in self._routes:
            self._routes[stage] = _route_of(
                self.tasks(stage), lambda task: self.peer(stage, task), lambda kind: self.send_window(kind, stage)
            )
        return self._routes[stage]

    def check_stage(self, stage: int) -> None:
        """Raises ValueError if there is no such stage."""
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"there is no stage {stage} in a pipeline of {self.num_stages} (0..{self.num_stages - 1})")

    def peer(self, stage: int, task: Task) -> tuple[int, Task] | None:
        """The other end of a send or receive: its stage, and its task there.

        None at both ends of the pipeline, where nothing is sent. If consecutive chunks are on one stage, the other end
        is the same stage, and there is no message: the stage keeps the tensors.

        Raises:
            ValueError: the task is a computation.
        """
        key = stage, task.kind, task.chunk
        if key not in self._other_ends:
            self._other_ends[key] = self._other_end(stage, task)
        other_end = self._other_ends[key]
        return None if other_end is None else (other_end[0], Task(other_end[1], other_end[2], task.microbatch))

    def _other_end(self, stage: int, task: Task) -> tuple[int, Kind, int] | None:
        """Stage, kind and chunk of the other end; they are the same for all microbatches."""
        if task.kind not in OTHER_END:
            raise ValueError(f"{task} is a computation, and has no other end")
        ahead = task.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        neighbour = self.virtual_stage(stage, task.chunk) + (1 if ahead else -1)
        if not 0 <= neighbour < self.num_virtual_stages:
            return None
        other_stage, chunk = self.holder(neighbour)
        return other_stage, OTHER_END[task.kind], chunk

    def is_message(self, stage: int, task: Task) -> bool:
        """Returns whether the other end of a send or receive is on another stage."""
        other_end = self.peer(stage, task)
        return other_end is not None and other_end[0] != stage

    @property
    def both_ways(self) -> bool:
        """Returns whether two stages send activations to each other, so that a queue for both ways could deadlock."""
        sends = {(source, target) for source, target in zip(self.holders, self.holders[1:]) if source != target}
        return any((target, source) in sends for source, target in sends)

    def microbatches_until_repeat(self, stage: int) -> int:
        """Returns the smallest number of microbatches for which a stage's peak memory equals that of the full step.

        `num_microbatches`, if the schedule is for this number only.
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


def _with_messages(order: Sequence[Task], is_message: Callable[[Task], bool]) -> list[Task]:
    """Adds sends and receives to a stage's computations, so that no order can deadlock.

    A receive is posted one computation ahead of the computation that needs it, so that its sender finds it waiting; a
    send starts right after the computation that makes its tensors.

    Args:
        order: forwards and backwards of one stage.
        is_message: returns whether a send or receive goes to another stage; others are left out.
    """

    def receive(task: Task) -> list[Task]:
        message = task._replace(kind=RECEIVE_FOR[task.kind]) if task.kind in RECEIVE_FOR else None
        return [message] if message is not None and is_message(message) else []

    def send(task: Task) -> list[Task]:
        message = task._replace(kind=SEND_AFTER[task.kind]) if task.kind in SEND_AFTER else None
        return [message] if message is not None and is_message(message) else []

    tasks = receive(order[0]) if order else []
    for position, task in enumerate(order):
        if position + 1 < len(order):
            tasks += receive(order[position + 1])
        tasks.append(task)
        tasks += send(task)
    return tasks


def _route_of(
    tasks: Sequence[Task], peer: Callable[[Task], tuple[int, Task] | None], send_window: Callable[[Kind], int]
) -> Route:
    """The route of a stage with these tasks; `peer` and `send_window` are the schedule's answers for this stage."""

    def links(kinds: dict[Kind, Kind]) -> dict[Task, Link]:
        messages = {task: task._replace(kind=kinds[task.kind]) for task in tasks if task.kind in kinds}
        other_ends = {task: peer(message) for task, message in messages.items()}
        return {task: Link(messages[task], *end) for task, end in other_ends.items() if end is not None}

    before, after = links(RECEIVE_FOR), links(SEND_AFTER)
    other_stage = {link.message: link.stage for link in (*before.values(), *after.values())}
    return Route(tuple(tasks), before, after, other_stage, {kind: send_window(kind) for kind in SENDS})
