"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

    from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize

    parallel = parallelize(Net(), {"x": example}, "autodist", ComputeConfig(plan_ngpus=2))
    optimizer = build_optimizer(parallel, torch.optim.AdamW)

The rooms, in the order in which they work (`program/` records the forward):

api.py          `parallelize`, from end to end; config.py: `ComputeConfig`, options
explain.py      `explain`: what a plan costs
example.py      the module and its example arguments; original.py: what they must be
annotations/    users' functions: `register_op`
choose/         the strategies of each call, and the cheapest ones
policy/         the policies' names and verbs; a division as a `Plan`
emit/           the division as Python source; composites.py: functions of a shard that it calls
prove/          types of the emitted source on the whole mesh, and its values beside one process
generated/      the files, written once in a job and used again
train/          the emitted module at run time: optimizer, gradients, pipelines, state dicts
cli/            nnScaler's trainer, which takes a configuration
"""

from .annotations.register import register_op
from .api import parallelize
from .config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from .explain import Explanation, explain
from .policy.graph import IRGraph
from .prove.value_comparison import EmittedProgramError
from .train.broadcast import broadcast_weights
from .train.optimizer import ParallelOptimizer, build_optimizer, sync_grad_when
from .train.parallel_module import ParallelModule
from .train.state_dicts import (
    deduped_state_dict,
    deduped_state_dicts,
    load_deduped_state_dict,
    load_merged_state_dict,
    load_merged_state_dicts,
    load_sharded_state_dict,
    merge_state_dicts,
)

__all__ = [
    "BroadcastGenFilesStrategy",
    "ComputeConfig",
    "EmittedProgramError",
    "Explanation",
    "IRGraph",
    "ParallelModule",
    "ParallelOptimizer",
    "ReuseType",
    "broadcast_weights",
    "build_optimizer",
    "deduped_state_dict",
    "deduped_state_dicts",
    "explain",
    "load_deduped_state_dict",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "load_sharded_state_dict",
    "merge_state_dicts",
    "parallelize",
    "register_op",
    "sync_grad_when",
]
