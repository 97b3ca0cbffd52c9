"""Pipeline schedules as data: what each stage does, in which order. Pure Python; the runtime only executes them.

    >>> schedule = OneFOneB(num_stages=2, num_microbatches=2)
    >>> print(format_schedule(schedule.tasks(stage=0)))
    F0 SF0 RB0 F1 SF1 RB1 B0 B1

tasks.py       what a stage does for a microbatch; how it prints
schedule.py    `Schedule`: the questions that runtime, layout, memory prediction and check ask; `Route`, for a runtime
one_f_one_b.py, interleaved.py, gpipe.py, zb_h1.py, zb_v.py
               a schedule each: its order of computations, and its formulas
derived.py     parts of another schedule: forwards only (evaluation), one microbatch (a check)
written.py     a schedule that a user writes down as text
selection.py   the schedule of training, by name
analysis.py    what follows from orders of tasks: faults, forwards in flight, memory held, times of tasks
proof.py       all stages against each other, with the strictest transport there is; the time and memory of a step
lockstep.py    rounds, where there are no messages

Two rules make every schedule here free of deadlock, whatever the transport does:

- a receive is posted one computation ahead of the one that needs it, so that its sender finds it waiting;
- activations and gradients travel in channels of their own, each a queue from one stage to one other, and a sender
  waits only for the message of its kind that is `send_window` places back. By then the receiver has asked for it.

With several chunks two stages may send activations to each other (`Schedule.both_ways`: with a V always, else with two
stages). A communicator that has one queue for both ways between two ranks, as NCCL's, is then needed once for each way.
"""

from .analysis import Costs, TimedTask
from .derived import Inference
from .gpipe import GPipe
from .interleaved import Interleaved
from .lockstep import Round, rounds
from .one_f_one_b import OneFOneB
from .proof import Simulation, prove, simulate
from .schedule import Schedule
from .selection import training_schedule
from .tasks import Kind, Task, format_schedule, parse_schedule
from .written import WrittenSchedule
from .zb_h1 import ZeroBubbleH1
from .zb_v import ZeroBubbleV

__all__ = [
    "Costs",
    "GPipe",
    "Inference",
    "Interleaved",
    "Kind",
    "OneFOneB",
    "Round",
    "Schedule",
    "Simulation",
    "Task",
    "TimedTask",
    "WrittenSchedule",
    "ZeroBubbleH1",
    "ZeroBubbleV",
    "format_schedule",
    "parse_schedule",
    "prove",
    "rounds",
    "simulate",
    "training_schedule",
]
