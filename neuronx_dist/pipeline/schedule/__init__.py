"""Pipeline schedules as data: what each stage does, in which order. Pure Python; the runtime only executes them.

A schedule is a list of tasks for one stage. `F3` is the forward of microbatch 3, `B3` its backward; `RF3` posts the
receive of its activations, `SF3` starts sending them on; `RB3` and `SB3` do the same for the gradients that travel
back.

    >>> print(format_schedule(one_f_one_b(stage=0, num_stages=2, num_microbatches=2)))
    F0 SF0 RB0 F1 SF1 RB1 B0 B1

Two rules make every schedule here free of deadlock, whatever the transport does:

- a receive is posted one computation ahead of the one that needs it, so that its sender finds it waiting;
- activations and gradients travel in channels of their own, each a queue, and a sender waits only for messages that are
  `send_window` places back in the same queue. By then the receiver has asked for them.

`simulate` runs the schedules of all stages against each other, with the strictest transport there is.

Where there are no messages, all stages go in lockstep, and transfers in which all ranks take part come after a round:
`rounds` says what each stage does in each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

__all__ = [
    "Kind",
    "Round",
    "Simulation",
    "Task",
    "format_schedule",
    "inference",
    "one_f_one_b",
    "rounds",
    "send_window",
    "simulate",
]


class Kind(Enum):
    """What a task does; the value is what it prints as."""

    RECV_FORWARD = "RF"
    FORWARD = "F"
    SEND_FORWARD = "SF"
    RECV_BACKWARD = "RB"
    BACKWARD = "B"
    SEND_BACKWARD = "SB"


class Task(NamedTuple):
    """One thing that a stage does for one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def format_schedule(tasks: Sequence[Task]) -> str:
    """The tasks on one line."""
    return " ".join(map(str, tasks))


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """The 1F1B schedule (PipeDream-flush; Narayanan et al., 2021) of one stage.

    Warm up with `num_stages - stage - 1` forwards, then alternate forward and backward, then drain the backwards. At
    most `num_stages - stage` microbatches are between their forward and their backward.

    Raises:
        ValueError: there is no such stage, or no microbatch.
    """
    _check(stage, num_stages, num_microbatches)
    warmup = min(num_stages - stage - 1, num_microbatches)
    order = [Task(Kind.FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches - warmup):
        order.append(Task(Kind.FORWARD, warmup + microbatch))
        order.append(Task(Kind.BACKWARD, microbatch))
    order += [Task(Kind.BACKWARD, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)]
    return _with_messages(order, stage, num_stages)


def inference(stage: int, num_stages: int, num_microbatches: int) -> list[Task]:
    """Forwards only.

    Raises:
        ValueError: there is no such stage, or no microbatch.
    """
    _check(stage, num_stages, num_microbatches)
    order = [Task(Kind.FORWARD, microbatch) for microbatch in range(num_microbatches)]
    return _with_messages(order, stage, num_stages)


def send_window(kind: Kind, stage: int, num_stages: int) -> int:
    """How many sends of one kind a stage has under way before it waits for the oldest of them.

    Activations: as many as there are microbatches in flight, which is when the gradient of the oldest has come back, so
    the wait never blocks. Gradients: two; the second is sent when the stage before has used the first.
    """
    return num_stages - stage if kind is Kind.SEND_FORWARD else 2


def _check(stage: int, num_stages: int, num_microbatches: int) -> None:
    if not 0 <= stage < num_stages:
        raise ValueError(f"there is no stage {stage} in a pipeline of {num_stages} (0..{num_stages - 1})")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")


def _with_messages(order: Sequence[Task], stage: int, num_stages: int) -> list[Task]:
    """Adds sends right after what they send, and receives before the computation that comes before their use."""
    receives, sends = {}, {}
    if stage > 0:
        receives[Kind.FORWARD], sends[Kind.BACKWARD] = Kind.RECV_FORWARD, Kind.SEND_BACKWARD
    if stage < num_stages - 1:
        receives[Kind.BACKWARD], sends[Kind.FORWARD] = Kind.RECV_BACKWARD, Kind.SEND_FORWARD

    def receive(task: Task) -> list[Task]:
        return [Task(receives[task.kind], task.microbatch)] if task.kind in receives else []

    tasks = receive(order[0])
    for position, task in enumerate(order):
        if position + 1 < len(order):
            tasks += receive(order[position + 1])
        tasks.append(task)
        if task.kind in sends:
            tasks.append(Task(sends[task.kind], task.microbatch))
    return tasks


# --- in lockstep ------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What each stage does in a round, if anything, and which transfers come after it."""

    tasks: tuple[Task | None, ...]
    forward: bool  # a stage has activations for the next
    backward: bool  # a stage has gradients for the one before

    def __str__(self) -> str:
        return " ".join(str(task or "-") for task in self.tasks) + " >" * self.forward + " <" * self.backward


def rounds(schedules: Sequence[Sequence[Task]]) -> list[Round]:
    """The forwards and backwards of all stages in lockstep: each does its next one if what that needs has come.

    What a stage makes in a round has come to its neighbour when the next round begins. 1F1B takes
    `2 * (num_microbatches + num_stages - 1)` rounds.

        >>> for each in rounds([one_f_one_b(stage, num_stages=2, num_microbatches=2) for stage in range(2)]):
        ...     print(each)
        F0 - >
        F1 F0 >
        - B0 <
        B0 F1
        - B1 <
        B1 -

    Raises:
        RuntimeError: nothing can run (a deadlock), with the task that each stage stands at.
    """
    orders = [[task for task in tasks if task.kind in (Kind.FORWARD, Kind.BACKWARD)] for tasks in schedules]
    last = len(orders) - 1
    position = [0] * len(orders)
    done: list[set[Task]] = [set() for _ in orders]
    found = []

    def ready(stage: int, task: Task) -> bool:
        if task.kind is Kind.FORWARD:
            return stage == 0 or task in done[stage - 1]
        return stage == last or task in done[stage + 1]

    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        tasks: list[Task | None] = []
        for stage, order in enumerate(orders):
            task = order[position[stage]] if position[stage] < len(order) else None
            tasks.append(task if task is not None and ready(stage, task) else None)
        for stage, task in enumerate(tasks):
            if task is not None:
                done[stage].add(task)
                position[stage] += 1
        if not any(tasks):
            raise RuntimeError(f"deadlock: {_positions(orders, position)}")
        found.append(
            Round(
                tuple(tasks),
                any(task is not None and task.kind is Kind.FORWARD for task in tasks[:-1]),
                any(task is not None and task.kind is Kind.BACKWARD for task in tasks[1:]),
            )
        )
    return found


def _positions(schedules: Sequence[Sequence[Task]], position: Sequence[int]) -> str:
    return ", ".join(
        f"stage {stage} at {tasks[position[stage]] if position[stage] < len(tasks) else 'the end'}"
        for stage, tasks in enumerate(schedules)
    )


# --- proving that it runs ---------------------------------------------------------------------------------------------


class Simulation(NamedTuple):
    """What `simulate` found: the most microbatches between forward and backward, by stage; the number of rounds."""

    peak_in_flight: list[int]
    rounds: int


def simulate(schedules: Sequence[Sequence[Task]]) -> Simulation:
    """Runs the schedules of all stages against each other, one task per stage and round where it can run.

    The transport is the strictest: a message moves only when both ends have posted it, messages of one channel move in
    the order in which each end posted them, and a stage that has `send_window` sends under way blocks at the next one.

    Raises:
        RuntimeError: nothing can run (a deadlock), with the task that each stage stands at; or both ends of a channel
            disagree about the microbatch.
    """
    num_stages = len(schedules)
    position = [0] * num_stages
    posted: dict[tuple[Kind, int], deque[int]] = {}  # sends and receives not matched yet, by kind and stage
    arrived: set[tuple[Kind, int, int]] = set()
    peak, rounds = [0] * num_stages, 0
    kept: list[set[int]] = [set() for _ in range(num_stages)]

    def queue(kind: Kind, stage: int) -> deque[int]:
        return posted.setdefault((kind, stage), deque())

    def deliver() -> None:
        directions = ((Kind.SEND_FORWARD, Kind.RECV_FORWARD, 1), (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD, -1))
        for send, recv, step in directions:
            for stage in range(num_stages):
                sent, expected = queue(send, stage), queue(recv, stage + step)
                while sent and expected:
                    if sent[0] != expected[0]:
                        raise RuntimeError(
                            f"stage {stage} sends {send.value}{sent[0]} where stage {stage + step} expects microbatch "
                            f"{expected[0]}"
                        )
                    arrived.add((recv, stage + step, expected.popleft()))
                    sent.popleft()

    def run(stage: int, task: Task) -> bool:
        kind, microbatch = task
        if kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            queue(kind, stage).append(microbatch)
        elif kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            if len(queue(kind, stage)) >= send_window(kind, stage, num_stages):
                return False
            queue(kind, stage).append(microbatch)
        elif kind is Kind.FORWARD:
            if stage > 0 and (Kind.RECV_FORWARD, stage, microbatch) not in arrived:
                return False
            kept[stage].add(microbatch)
        else:
            if stage < num_stages - 1 and (Kind.RECV_BACKWARD, stage, microbatch) not in arrived:
                return False
            kept[stage].remove(microbatch)
        return True

    while any(position[stage] < len(schedules[stage]) for stage in range(num_stages)):
        rounds += 1
        moved = False
        for stage, tasks in enumerate(schedules):
            if position[stage] < len(tasks) and run(stage, tasks[position[stage]]):
                position[stage] += 1
                moved = True
                peak[stage] = max(peak[stage], len(kept[stage]))
        before = len(arrived)
        deliver()
        if not moved and len(arrived) == before:
            raise RuntimeError(f"deadlock: {_positions(schedules, position)}")
    return Simulation(peak, rounds)
