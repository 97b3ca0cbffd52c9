"""XLA programs of many devices, checked and executed without the devices.

torch_xla's CPU client deadlocks on collectives between several devices (pytorch/xla#9089). Here each rank's program is
*lowered* to HLO by torch_xla, the ranks' programs are compared, and the programs are *executed* by jaxlib's CPU client,
on a virtual device for each rank:

    def loss_and_gradients(weight, x):                  # importable: a function of a module
        layer = ColumnParallelLinear(...)
        ...
        return loss, x.grad

    replayed = replay(loss_and_gradients, Mesh(4, tp=2), arguments_per_rank)
    replayed.outputs[3]                                    # what rank 3 would have
    print(replayed.table())                                # its collectives

`python -m neuronx_dist.xla_replay --help` does it for a function of a script.
"""

from ..call_site import TRANSPORT, hide
from .programs import Collective, Program, ProgramsDiffer, ReplicaGroupsWrong
from .replaying import Replayed, ReplayedLoop, close, lower, replay, replay_loop
from .state import training_state
from .worker import WorkerError

__all__ = [
    "Collective",
    "Program",
    "ProgramsDiffer",
    "Replayed",
    "ReplayedLoop",
    "ReplicaGroupsWrong",
    "WorkerError",
    "close",
    "lower",
    "replay",
    "replay_loop",
    "training_state",
]

hide(__name__, TRANSPORT)
