"""Proving that a schedule runs, without running a model."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .in_flight import most_in_flight
from .lockstep import positions
from .schedule import Schedule
from .tasks import OTHER_END, RECEIVE_FOR, RECEIVES, SEND_AFTER, SENDS, Kind, Task

__all__ = ["Simulation", "simulate"]


class Simulation(NamedTuple):
    """What `simulate` found.

    Attributes:
        peak_in_flight: by stage, the most forwards (of a microbatch in a chunk) whose backward is not over.
        rounds: how often each stage was given the chance to do a task.
    """

    peak_in_flight: list[int]
    rounds: int


def simulate(schedule: Schedule) -> Simulation:
    """Runs the tasks of all stages against each other, one task per stage and round where it can run.

    The transport is the strictest: a message moves only when both ends have posted it, messages from one stage to
    another in one direction move in the order in which each end posted them, and a send waits until the one that is
    `send_window` places before it has moved.

    Raises:
        RuntimeError: nothing can run (a deadlock), with the task that each stage stands at; both ends of a channel
            disagree about the microbatch; a message has no other end; or a stage leaves out a part of a backward.
    """
    schedules = [schedule.tasks(stage) for stage in range(schedule.num_stages)]
    peak_in_flight = [most_in_flight(stage, tasks) for stage, tasks in enumerate(schedules)]
    wire = _Wire(schedule)
    position = [0] * schedule.num_stages
    rounds = 0
    while any(position[stage] < len(tasks) for stage, tasks in enumerate(schedules)):
        rounds += 1
        moved = False
        for stage, tasks in enumerate(schedules):
            if position[stage] < len(tasks) and wire.post(stage, tasks[position[stage]]):
                position[stage] += 1
                moved = True
        if not (wire.deliver() or moved):
            raise RuntimeError(f"deadlock: {positions(schedules, position)}")
    wire.check_empty()
    return Simulation(peak_in_flight, rounds)


class _Wire:
    """Messages between all stages, each of which moves when both ends have posted it."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        # By sending stage, receiving stage and direction: what was posted and has not moved.
        self._sends: dict[tuple[int, int, Kind], deque[Task]] = {}
        self._receives: dict[tuple[int, int, Kind], deque[Task]] = {}
        self._posted: dict[tuple[int, Kind], list[Task]] = {}  # all sends of a stage, by kind
        self._moved: set[tuple[int, Task]] = set()  # (stage, send or receive)
        self._computed: set[tuple[int, Task]] = set()  # (stage, send of what it has computed)

    def post(self, stage: int, task: Task) -> bool:
        """Whether a stage can do a task now; if it is a message, posts it."""
        if task.kind in SENDS:
            if (stage, task) not in self._computed:
                raise RuntimeError(f"stage {stage} does {task} before the computation whose result it sends")
            posted = self._posted.setdefault((stage, task.kind), [])
            window = self._schedule.send_window(task.kind, stage)
            if window < 1 or (len(posted) >= window and (stage, posted[-window]) not in self._moved):
                return False
            posted.append(task)
            self._sends.setdefault((stage, self._other_stage(stage, task), task.kind), deque()).append(task)
        elif task.kind in RECEIVES:
            channel = self._other_stage(stage, task), stage, OTHER_END[task.kind]
            self._receives.setdefault(channel, deque()).append(task)
        elif self._has_come(stage, task):
            if task.kind in SEND_AFTER:
                self._computed.add((stage, task._replace(kind=SEND_AFTER[task.kind])))
        else:
            return False
        return True

    def _has_come(self, stage: int, computation: Task) -> bool:
        """Whether a stage has what a computation needs, from another stage or from another chunk of its own."""
        if computation.kind not in RECEIVE_FOR:
            return True
        receive = computation._replace(kind=RECEIVE_FOR[computation.kind])
        sender = self._schedule.peer(stage, receive)
        if sender is not None and sender[0] == stage:
            return sender in self._computed
        return sender is None or (stage, receive) in self._moved

    def deliver(self) -> bool:
        """Moves all messages that both ends have posted; whether there were any."""
        before = len(self._moved)
        for (source, target, kind), sends in self._sends.items():
            receives = self._receives.get((source, target, kind), deque())
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                if self._schedule.peer(source, send) != (target, receive):
                    chunk = f" of chunk {receive.chunk}" if receive.chunk else ""
                    raise RuntimeError(
                        f"stage {source} sends {send} where stage {target} expects microbatch "
                        f"{receive.microbatch}{chunk}"
                    )
                self._moved |= {(source, send), (target, receive)}
        return len(self._moved) > before

    def check_empty(self) -> None:
        for (source, target, _), sends in self._sends.items():
            if sends:
                raise RuntimeError(f"stage {source} sends {sends[0]}, which stage {target} does not receive")
        for (source, target, _), receives in self._receives.items():
            if receives:
                raise RuntimeError(f"stage {target} expects {receives[0]}, which stage {source} does not send")

    def _other_stage(self, stage: int, task: Task) -> int:
        other_end = self._schedule.peer(stage, task)
        if other_end is None:
            raise RuntimeError(f"stage {stage} does {task}, but no stage is there at the other end")
        return other_end[0]
