"""Pipeline schedules as data: what each stage does, in which order. Pure Python; the runtime only executes them.

    >>> schedule = OneFOneB(num_stages=2, num_microbatches=2)
    >>> print(format_schedule(schedule.tasks(stage=0)))
    F0 SF0 RB0 F1 SF1 RB1 B0 B1

tasks.py         what a stage does for a microbatch; how it prints
schedule.py      `Schedule`: the questions that runtime, layout, memory prediction and check ask
one_f_one_b.py, interleaved.py, gpipe.py, zb_h1.py, zb_v.py, inference.py
                 a schedule each: its order of computations, and its formulas
selection.py     which of them trains
messages.py      sends and receives, added to an order of computations
route.py         what a stage does and with whom, for a runtime, answered once
in_flight.py     how many forwards wait for their backward; holdings.py: all that a stage holds at one time
completeness.py  is every task there once, and none too early?
timing.py        when each task starts and ends, by the costs of tasks and messages
proof.py         all stages against each other, with the strictest transport there is
simulate.py      what a step takes: time, waiting, memory
written.py       a schedule that a user writes down as text; one_microbatch.py: the part of one that a check plays
words.py         numbers of things, in messages
lockstep.py      rounds, where there are no messages

Two rules make every schedule here free of deadlock, whatever the transport does:

- a receive is posted one computation ahead of the one that needs it, so that its sender finds it waiting;
- activations and gradients travel in channels of their own, each a queue from one stage to one other, and a sender
  waits only for the message of its kind that is `send_window` places back. By then the receiver has asked for it.

With several chunks two stages may send activations to each other (`Schedule.both_ways`: with a V always, else with two
stages). A communicator that has one queue for both ways between two ranks, as NCCL's, is then needed once for each way.
"""

from .gpipe import GPipe
from .inference import Inference
from .interleaved import Interleaved
from .lockstep import Round, rounds
from .one_f_one_b import OneFOneB
from .proof import prove
from .schedule import Schedule
from .selection import training_schedule
from .simulate import Simulation, simulate
from .tasks import Kind, Task, format_schedule, parse_schedule
from .timing import Costs, TimedTask
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
