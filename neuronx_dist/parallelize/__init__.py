"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

    from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize

    parallel = parallelize(Net(), {"x": example}, "autodist", ComputeConfig(plan_ngpus=2))
    optimizer = build_optimizer(parallel, torch.optim.AdamW)

api.py         `parallelize`, from end to end; config.py: `ComputeConfig` and options
program.py     the program and its division: what every step works on
record.py      a module's forward as a program: translate.py, of a recording's graph; builder.py, calls added in order
in_place.py    functions that write nothing, of the value that one in place has; memory.py: what a write makes of views
decompose.py   means as sums; interpret.py runs a program on plain tensors, in one process
strategies.py  the strategies of a call: congruence.py, the local call; conversions.py, between types
composites.py  functions of a shard that torch's need all of; composite_strategies.py: when they are right
choose.py      which strategy every call gets, exactly: tables.py, the costs as tables over variables; blocks.py
policies.py    policies by name: graph.py, the graph in a policy's hands; nodes.py; plans.py, a division as a file
emit.py        Python source: body.py, its lines; source_text.py, calls and values; stored.py, what a module keeps
stages.py      what each pipeline stage runs and sends; pipelined.py runs them by a schedule
verify.py      the source's types, and its values beside one process; emitted.py: a source imported without a file
module.py      what an emitted class inherits; constants.py: tensors that are a part of the code
generation.py  files, written once in a job and reused: files.py, keys.py, fingerprint.py
register.py    rules for functions of users: annotation.py, their notation
state_dicts.py merged and deduped: layouts.py, optimizer_layout.py; broadcast.py: weights sent to other units
optimizer.py   optimizers whose gradients are summed over units: gradient_sync.py, reducer.py
"""

from .api import parallelize
from .broadcast import broadcast_weights
from .config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from .graph import IRGraph
from .module import ParallelModule
from .optimizer import ParallelOptimizer, build_optimizer, sync_grad_when
from .register import register_op
from .state_dicts import (
    deduped_state_dict,
    deduped_state_dicts,
    load_deduped_state_dict,
    load_merged_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
)
from .verify import EmittedProgramError

__all__ = [
    "BroadcastGenFilesStrategy",
    "ComputeConfig",
    "EmittedProgramError",
    "IRGraph",
    "ParallelModule",
    "ParallelOptimizer",
    "ReuseType",
    "broadcast_weights",
    "build_optimizer",
    "deduped_state_dict",
    "deduped_state_dicts",
    "load_deduped_state_dict",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "merge_state_dicts",
    "parallelize",
    "register_op",
    "sync_grad_when",
]
