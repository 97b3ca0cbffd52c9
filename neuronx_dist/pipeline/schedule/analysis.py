"""Numbers that follow from orders of tasks alone: faults, forwards in flight, memory held, the times of tasks.

`Schedule` answers by these functions, which take tasks and not a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tasks import COMPUTATIONS, RECEIVE_FOR, RECEIVES, SEND_AFTER, SENDS, Kind, Task

__all__ = [
    "Cost",
    "Costs",
    "MemoryInUse",
    "TimedTask",
    "bubble_of",
    "fault_of",
    "memory_of",
    "most_held",
    "most_in_flight",
    "timeline_of",
]

Cost = float | Callable[[int, int], float]
_Amounts = tuple[int, ...]

_HALVES = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


# --- tasks that are missing, doubled or too early


def fault_of(orders: Sequence[Sequence[Task]], num_chunks: int, num_microbatches: int) -> str | None:
    """The first task that a stage leaves out, does twice or does too early, in words; None: there is none.

    Every stage does the forward of every microbatch in each of its chunks. If any stage does a backward, each of these
    forwards has one, whole or in halves, the input half first.

    Args:
        orders: the computations of each stage.
    """
    trains = any(task.kind is not Kind.FORWARD for order in orders for task in order)
    for stage, order in enumerate(orders):
        fault = _fault_on_stage(order, num_chunks, num_microbatches, trains)
        if isinstance(fault, Task):
            others = [f", and stage {other} does {fault}" for other, tasks in enumerate(orders) if fault in tasks]
            return f"stage {stage} never does {fault}" + "".join(others[:1])
        if fault is not None:
            return f"stage {stage} {fault}"
    return None


def _fault_on_stage(order: Sequence[Task], num_chunks: int, num_microbatches: int, trains: bool) -> str | Task | None:
    """The fault in words, or the task that is left out; None: there is no fault."""
    missing: dict[tuple[int, int], frozenset[Kind]] = {}  # (chunk, microbatch) -> halves of its backward to come
    for task in order:
        key = task.chunk, task.microbatch
        if task.kind not in COMPUTATIONS:
            return f"has {task} among its computations, but it is a message: `tasks` adds messages"
        if not 0 <= task.microbatch < num_microbatches:
            return f"does {task}, but microbatches are 0..{num_microbatches - 1}"
        if not 0 <= task.chunk < num_chunks:
            return f"does {task}, but the chunks of a stage are 0..{num_chunks - 1}"
        if task.kind is Kind.FORWARD:
            if key in missing:
                return f"does {task} twice"
            missing[key] = _HALVES
            continue
        halves = _HALVES if task.kind is Kind.BACKWARD else frozenset({task.kind})
        early = task.kind is Kind.BACKWARD_WEIGHT and Kind.BACKWARD_INPUT in missing.get(key, ())
        if early or not halves <= missing.get(key, frozenset()):
            return f"does {task} before the task that it depends on, or twice"
        missing[key] -= halves
    for microbatch in range(num_microbatches):
        for chunk in range(num_chunks):
            if (chunk, microbatch) not in missing:
                return Task(Kind.FORWARD, chunk, microbatch)
            halves = missing[chunk, microbatch]
            if trains and halves:
                kind = Kind.BACKWARD if len(halves) == 2 else next(iter(halves))
                return Task(kind, chunk, microbatch)
    return None


# --- what a stage keeps


def most_in_flight(order: Sequence[Task]) -> int:
    """The most forwards of a stage whose backward is not over; 0 for a stage without backwards."""
    if all(task.kind is Kind.FORWARD for task in order):
        return 0
    most = now = 0
    for task in order:
        if task.kind is Kind.FORWARD:
            now += 1
            most = max(most, now)
        elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            now -= 1
    return most


def most_held(
    tasks: Sequence[Task], num_chunks: int, send_window: Callable[[Kind], int]
) -> dict[tuple[Kind, int], set[_Amounts]]:
    """The largest amounts that a stage holds during computations of each kind and chunk.

    Amounts are, for each chunk, the number of forwards before their backward, the number between the halves of it, and
    1 if there are gradients of weights; then messages: activations and gradients that are on their way from this stage,
    and activations and gradients that it expects.

    Args:
        tasks: of the stage, messages included.
        send_window: the most sends of a kind that are on their way.
    """
    undivided, halved, has_gradients = [0] * num_chunks, [0] * num_chunks, [0] * num_chunks
    messages = dict.fromkeys((Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.RECV_BACKWARD), 0)
    held: dict[tuple[Kind, int], set[_Amounts]] = {}
    for task in tasks:
        kind, chunk = task.kind, task.chunk
        if kind in SENDS:
            messages[kind] = min(send_window(kind), messages[kind] + 1)
            continue
        if kind in RECEIVES:
            messages[kind] += 1
            continue
        if kind is Kind.FORWARD:
            undivided[chunk] += 1
        held.setdefault((kind, chunk), set()).add((*undivided, *halved, *has_gradients, *messages.values()))
        if kind in RECEIVE_FOR:
            messages[RECEIVE_FOR[kind]] = max(0, messages[RECEIVE_FOR[kind]] - 1)
        if kind is Kind.BACKWARD_WEIGHT:
            halved[chunk] -= 1
        elif kind is not Kind.FORWARD:
            undivided[chunk] -= 1
            halved[chunk] += kind is Kind.BACKWARD_INPUT
        has_gradients[chunk] |= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return {computation: _largest(amounts) for computation, amounts in held.items()}


def _largest(every: Iterable[_Amounts]) -> set[_Amounts]:
    """The Pareto-maximal tuples."""
    largest: set[_Amounts] = set()
    for amounts in sorted(every, reverse=True):  # a tuple that exceeds another one comes before it
        if not any(all(a >= b for a, b in zip(other, amounts)) for other in largest):
            largest.add(amounts)
    return largest


# --- time


@dataclass(frozen=True)
class Costs:
    """Costs of tasks and messages, in any unit of time and of memory.

    Each cost is a number or a function: of a computation `(stage, chunk) -> cost`, of a message
    `(source stage, target stage) -> cost`.

    Attributes:
        forward, backward_input, backward_weight: time of one task on one chunk. A whole backward takes the sum of its
            halves.
        message: time from the end of the task that makes a tensor to the earliest start of the task that needs it,
            where these are on two stages. A send costs its stage nothing: it computes on, and never waits for one.
        activation: memory that a forward keeps for its backward.
        weight_activation: the part of `activation` that stays after the input half of the backward; None: all of it.
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    message: Cost = 0.0
    activation: Cost = 1.0
    weight_activation: Cost | None = None

    def time(self, stage: int, task: Task) -> float:
        """Time of a computation."""
        if task.kind is Kind.FORWARD:
            return _value(self.forward, stage, task.chunk)
        time = 0.0
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            time += _value(self.backward_input, stage, task.chunk)
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            time += _value(self.backward_weight, stage, task.chunk)
        return time

    def kept(self, stage: int, task: Task) -> float:
        """Memory that a computation keeps or, if negative, frees."""
        activation = _value(self.activation, stage, task.chunk)
        cost = self.activation if self.weight_activation is None else self.weight_activation
        weight_activation = _value(cost, stage, task.chunk)
        if task.kind is Kind.FORWARD:
            return activation
        if task.kind is Kind.BACKWARD:
            return -activation
        return weight_activation - activation if task.kind is Kind.BACKWARD_INPUT else -weight_activation

    def latency(self, source: int, target: int) -> float:
        """Time of a message from one stage to another; 0 within a stage."""
        return 0.0 if source == target else _value(self.message, source, target)


def _value(cost: Cost, first: int, second: int) -> float:
    return cost(first, second) if callable(cost) else cost


class TimedTask(NamedTuple):
    """A computation with its start and its end."""

    task: Task
    start: float
    end: float


def timeline_of(
    orders: Sequence[Sequence[Task]], peer: Callable[[int, Task], tuple[int, Task] | None], costs: Costs
) -> list[list[TimedTask]]:
    """Times of all computations, by stage, each as early as its stage and its input allow.

    Args:
        orders: the computations of each stage.
        peer: `Schedule.peer`.

    Raises:
        RuntimeError: computations wait for each other, or for a message that never comes; the message names them.
    """
    timeline: list[list[TimedTask]] = [[] for _ in orders]
    arrivals: dict[tuple[int, Task], float] = {}  # by stage and receive
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            timed = timeline[stage]
            for task in order[len(timed) :]:
                arrival = _arrival(stage, task, peer, arrivals)
                if arrival is None:
                    break
                start = max(arrival, timed[-1].end if timed else 0.0)
                timed.append(TimedTask(task, start, end := start + costs.time(stage, task)))
                progress = True
                if task.kind in SEND_AFTER:
                    other_end = peer(stage, task._replace(kind=SEND_AFTER[task.kind]))
                    if other_end is not None:
                        arrivals[other_end] = end + costs.latency(stage, other_end[0])
    waiting = [
        f"stage {stage} at {order[len(timed)]}"
        for stage, (order, timed) in enumerate(zip(orders, timeline))
        if len(timed) < len(order)
    ]
    if waiting:
        raise RuntimeError(f"these wait for tasks that never come: {', '.join(waiting)}")
    return timeline


def _arrival(
    stage: int,
    task: Task,
    peer: Callable[[int, Task], tuple[int, Task] | None],
    arrivals: dict[tuple[int, Task], float],
) -> float | None:
    """Time at which the input of a computation has arrived; None: not yet known."""
    if task.kind not in RECEIVE_FOR:
        return 0.0
    receive = task._replace(kind=RECEIVE_FOR[task.kind])
    return arrivals.get((stage, receive)) if peer(stage, receive) is not None else 0.0


def bubble_of(timeline: Sequence[Sequence[TimedTask]]) -> float:
    """Share of a step in which a stage waits, averaged over stages; 0 for a step that takes no time."""
    step_time = max((timed[-1].end for timed in timeline if timed), default=0.0)
    busy = sum(task.end - task.start for timed in timeline for task in timed)
    return 1 - busy / (len(timeline) * step_time) if step_time else 0.0


class MemoryInUse(NamedTuple):
    """Amount that a stage keeps from `time` on, until the next change."""

    time: float
    amount: float


def memory_of(stage: int, timed: Sequence[TimedTask], costs: Costs) -> list[MemoryInUse]:
    """Activations that a stage keeps over time: from the start of a forward to the end of its backward, by halves.

    Without any backward a stage keeps nothing.
    """
    changes = [MemoryInUse(0.0, 0.0)]
    if all(computation.task.kind is Kind.FORWARD for computation in timed):
        return changes
    amount = 0.0
    for computation in timed:
        change = costs.kept(stage, computation.task)
        amount += change
        if change:
            begins = computation.task.kind is Kind.FORWARD
            changes.append(MemoryInUse(computation.start if begins else computation.end, amount))
    return changes
