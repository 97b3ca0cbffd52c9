"""Any module becomes a parallel program: recorded, divided by the typing rules, chosen exactly, emitted, checked.

    from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize

    parallel = parallelize(Net(), {"x": example}, "autodist", ComputeConfig(plan_ngpus=2))
    optimizer = build_optimizer(parallel, torch.optim.AdamW)

The files, in the order in which they work:

start       api.py: `parallelize`, from end to end; config.py: `ComputeConfig`, options; program.py: what all work on
record      record.py: a forward as a program; translate.py: from a recording's graph; builder.py: calls in order;
            in_place.py, memory.py: writes in place as values; decompose.py: means as sums; interpret.py: a program run
derive      strategies.py: of a call; derivation.py: from its rule; congruence.py: integers of the local call;
            composites.py, composite_strategies.py: functions of a shard; random_numbers.py: streams;
            register.py, annotation.py: users' functions
choose      policies.py: by name; graph.py, nodes.py: in a policy's hands; plans.py: a division as a `Plan`;
            choose.py: the least cost; tables.py: costs as tables; conversions.py: between types; blocks.py: strides;
            two axes: local_program.py: what a rank of the first runs; second_axis.py: its strategies over the second;
            two_axes.py: what a policy says of it
emit        emit.py: the class; body.py: its lines; source_text.py: calls as text; stages.py: of a pipeline;
            stored.py: parameters and buffers; constants.py: constants as text
verify      verify.py: types; boundaries.py: what stages pass on; whole_mesh.py: a step of the whole job;
            compare.py: values beside one process; toy.py: at toy sizes; sizes.py, shrink.py: a program made small;
            fold.py: two of its equal blocks; same_text.py: its text beside the file's;
            emitted.py: source imported without a file
load        generation.py: files, once in a job; files.py: a folder; keys.py, fingerprint.py: what they depend on;
            module.py: what an emitted class inherits; broadcast.py: weights to other units
train       optimizer.py, gradient_sync.py, reducer.py: gradients summed over units; pipelined.py: stages by a schedule;
            buffers.py: dummy batches; devices.py: where tensors are
save        state_dicts.py: merged, deduped; layouts.py, optimizer_layout.py: how they are laid out
"""

from .api import parallelize
from .broadcast import broadcast_weights
from .compare import EmittedProgramError
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
