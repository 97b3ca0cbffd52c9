"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

program.py   the program and its division: what every step works on
record.py    a module's forward as a program: translate.py, of a recording's graph; builder.py, calls added in order
in_place.py  functions that write nothing, of the value that one in place has; memory.py: what a write makes of views
choose.py    which strategy every call gets, exactly: tables.py, the costs as tables over variables
policies.py  policies by name: graph.py, the graph in a policy's hands; nodes.py; plans.py, a division as a file
interpret.py runs a program on plain tensors, in one process
    from neuronx_dist.parallelize import ComputeConfig, parallelize

    parallel = parallelize(Net(), {"x": example}, "autodist", ComputeConfig(plan_ngpus=2))

api.py        `parallelize`, from end to end
program.py    the program and its division: what every step works on
record.py     a forward becomes a program (translate.py, builder.py, in_place.py, memory.py; run alone: interpret.py)
strategies.py the strategies of a call (congruence.py: integers of the local call; conversions.py: between types)
choose.py     one strategy for each call (tables.py)
emit.py       Python source (body.py: its lines; source_text.py: calls and values; stored.py: what a module keeps)
verify.py     the source's types and values (emitted.py imports it without a file)
module.py     what an emitted class inherits (constants.py)
config.py     `ComputeConfig` and options
generation.py files: written once in a job, reused (files.py, keys.py, fingerprint.py)
"""

from .api import parallelize
from .config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from .module import ParallelModule
from .verify import EmittedProgramError

__all__ = [
    "BroadcastGenFilesStrategy",
    "ComputeConfig",
    "EmittedProgramError",
    "ParallelModule",
    "ReuseType",
    "parallelize",
]
