"""Playing all stages of a schedule against each other, without a model: proof that it runs, and what a step takes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .analysis import Costs, MemoryInUse, TimedTask, bubble_of, fault_of, memory_of, most_in_flight, timeline_of
from .schedule import Schedule
from .tasks import OTHER_END, RECEIVE_FOR, RECEIVES, SEND_AFTER, SENDS, Kind, Task

__all__ = ["Simulation", "prove", "simulate"]


def prove(schedule: Schedule) -> None:
    """Runs the tasks of all stages against each other, and raises if they do not come to an end.

    The transport is the strictest: a message moves only when both ends have posted it, messages of one kind from one
    stage to another move in the order in which each end posted them, and a send waits until the one that is
    `send_window` places before it has moved. What runs here runs on every transport that has a queue for each kind of
    message (activations, gradients), source and target. Where a communicator has one queue for both ways between two
    ranks, as in NCCL, each direction needs a separate communicator if `schedule.both_ways`.

    Raises:
        RuntimeError: a stage leaves out a forward or a part of a backward, or does one twice; it sends what it has not
            computed; nothing can run (a deadlock), with the task that each stage stands at and what it waits for; both
            ends of a channel disagree about the microbatch; or a message has no other end.
    """
    computations = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    fault = fault_of(computations, schedule.num_chunks, schedule.num_microbatches)
    if fault is not None:
        raise RuntimeError(fault)
    orders = [schedule.tasks(stage) for stage in range(schedule.num_stages)]
    wire = _Wire(schedule)
    position = [0] * schedule.num_stages
    progress = True
    while progress:
        progress = False
        for stage, tasks in enumerate(orders):
            while position[stage] < len(tasks) and wire.post(stage, tasks[position[stage]]):
                position[stage] += 1
                progress = True
        wire.deliver()
    if any(position[stage] < len(tasks) for stage, tasks in enumerate(orders)):
        standing = [
            f"stage {stage} at {tasks[position[stage]]}{wire.reason(stage, tasks[position[stage]])}"
            if position[stage] < len(tasks)
            else f"stage {stage} at the end"
            for stage, tasks in enumerate(orders)
        ]
        raise RuntimeError(f"deadlock: {', '.join(standing)}")
    wire.check_empty()


class _Wire:
    """Messages between all stages; a message moves when both ends have posted it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        # By sending stage, receiving stage and kind of the send: tasks that were posted and have not moved.
        self._sends: dict[tuple[int, int, Kind], deque[Task]] = {}
        self._receives: dict[tuple[int, int, Kind], deque[Task]] = {}
        self._posted: dict[tuple[int, Kind], list[Task]] = {}  # all sends of a stage, by kind
        self._moved: set[tuple[int, Task]] = set()  # (stage, send or receive)
        self._computed: set[tuple[int, Task]] = set()  # (stage, send that can start)

    def post(self, stage: int, task: Task) -> bool:
        """Returns whether a stage can do a task now; posts the task if it is a message."""
        if task.kind in SENDS:
            if (stage, task) not in self._computed:
                raise RuntimeError(f"stage {stage} does {task} before the computation whose result it sends")
            if self._under_way(stage, task) is not None:
                return False
            self._posted.setdefault((stage, task.kind), []).append(task)
            self._sends.setdefault((stage, self._other_stage(stage, task), task.kind), deque()).append(task)
        elif task.kind in RECEIVES:
            channel = self._other_stage(stage, task), stage, OTHER_END[task.kind]
            self._receives.setdefault(channel, deque()).append(task)
        else:
            if not self._has_come(stage, task):
                return False
            if task.kind in SEND_AFTER:
                self._computed.add((stage, task._replace(kind=SEND_AFTER[task.kind])))
        return True

    def _has_come(self, stage: int, computation: Task) -> bool:
        """Returns whether the input of a computation has arrived, from another stage or another chunk of this stage."""
        if computation.kind not in RECEIVE_FOR:
            return True
        receive = computation._replace(kind=RECEIVE_FOR[computation.kind])
        sender = self._schedule.peer(stage, receive)
        if sender is not None and sender[0] == stage:
            return sender in self._computed
        return sender is None or (stage, receive) in self._moved

    def deliver(self) -> None:
        """Moves all messages that both ends have posted."""
        for (source, target, kind), sends in self._sends.items():
            receives = self._receives.get((source, target, kind), deque())
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                if self._schedule.peer(source, send) != (target, receive):
                    raise RuntimeError(f"stage {source} sends {send} where stage {target} expects {receive}")
                self._moved.add((source, send))
                self._moved.add((target, receive))

    def reason(self, stage: int, task: Task) -> str:
        """The reason why a task cannot run yet, in brackets."""
        if task.kind in SENDS:
            return f" (waits until {self._under_way(stage, task)} is received)"
        receive = task._replace(kind=RECEIVE_FOR[task.kind])
        sender = self._schedule.peer(stage, receive)
        assert sender is not None
        if sender[0] == stage:
            return f" (before the computation of chunk {sender[1].chunk} whose result it takes)"
        return f" (waits for {sender[1]} of stage {sender[0]})"

    def check_empty(self) -> None:
        for (source, target, _), sends in self._sends.items():
            if sends:
                raise RuntimeError(f"stage {source} sends {sends[0]}, which stage {target} does not receive")
        for (source, target, _), receives in self._receives.items():
            if receives:
                raise RuntimeError(f"stage {target} expects {receives[0]}, which stage {source} does not send")

    def _under_way(self, stage: int, send: Task) -> Task | None:
        """The earlier send that has to move before this send starts; None: this one can start."""
        window = self._schedule.send_window(send.kind, stage)
        if window < 1:
            raise RuntimeError(f"stage {stage} may have {window} sends in progress, which allows none: {send}")
        posted = self._posted.get((stage, send.kind), [])
        if len(posted) < window or (stage, posted[-window]) in self._moved:
            return None
        return posted[-window]

    def _other_stage(self, stage: int, task: Task) -> int:
        other_end = self._schedule.peer(stage, task)
        if other_end is None:
            raise RuntimeError(f"stage {stage} does {task}, but there is no stage at the other end")
        return other_end[0]


class Simulation(NamedTuple):
    """Results of `simulate`; lists are by stage.

    Attributes:
        step_time: from the start of the first task to the end of the last, on any stage.
        bubble: share of `step_time` in which a stage waits, averaged over stages.
        timeline: when each computation starts and ends.
        memory: activations in memory, as changes over time, from 0 on.
        peak_memory: maximum of `memory`.
        peak_in_flight: the most forwards (of a microbatch in a chunk) whose backward is not over.
    """

    step_time: float
    bubble: float
    timeline: list[list[TimedTask]]
    memory: list[list[MemoryInUse]]
    peak_memory: list[float]
    peak_in_flight: list[int]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Proves that a schedule runs, and computes the time, the waiting and the memory of a step.

    A stage does its computations in order, each as soon as the stage is free and the input has arrived.

        >>> simulate(OneFOneB(num_stages=4, num_microbatches=8), Costs(backward_weight=2)).step_time
        44.0

    Args:
        costs: None: a forward takes 1, each half of a backward 1, messages nothing; a forward keeps 1.

    Raises:
        RuntimeError: the schedule can't run; see `prove`.
    """
    prove(schedule)
    costs = costs or Costs()
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    timeline = timeline_of(orders, schedule.peer, costs)
    memory = [memory_of(stage, timed, costs) for stage, timed in enumerate(timeline)]
    return Simulation(
        step_time=max(timed[-1].end for timed in timeline),
        bubble=bubble_of(timeline),
        timeline=timeline,
        memory=memory,
        peak_memory=[max(change.amount for change in changes) for changes in memory],
        peak_in_flight=[most_in_flight(order) for order in orders],
    )
