"""Whole models proven right in one process, before a job starts: `neuronx_dist.spmd.check`.

fakes.py     tensors with shapes and no values in the place of a model's
trace.py     what a program calls
program.py   plays one rank on fake tensors, in phases that can be played again for another rank
explore.py   which ranks to play: those whose program can differ, because it looked at a coordinate
gate.py      no gradient may be a part of a sum when the optimizer uses it
sources.py   types of inputs, and of what stages send one another
compare.py   all ranks' collectives, group by group; messages between stages; the schedule
branches.py  what ranks do differently beside communicating
numeric.py   the same step with real values at toy size, on threads and in one process
report.py    what was found; api.py: `check`
"""

from ..call_site import hide
from ..lazy_names import lazy_names

__all__ = ["Problem", "Report", "check"]

hide(__name__)

__getattr__ = lazy_names(
    __name__, {"Problem": "checking.report", "Report": "checking.report", "check": "checking.api"}
)
