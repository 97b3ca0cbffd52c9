"""XLA programs of many devices, checked and executed without the devices.

torch_xla's CPU client deadlocks on collectives between several devices (pytorch/xla#9089). Here each rank's program is
*lowered* to HLO by torch_xla, the ranks' programs are compared, and the programs are *executed* by jaxlib's CPU client,
on a virtual device for each rank:

    def loss_and_gradients(weight, x):                  # importable: a function of a module
        layer = ColumnParallelLinear(...)
        ...
        return loss, x.grad

    replayed = replay(loss_and_gradients, Mesh(4, tp=2), arguments_per_rank)
    replayed.outputs[3]                                    # the outputs of rank 3
    print(replayed.table())                                # its collectives

`python -m neuronx_dist.xla_replay --help` describes the same for a function of a script.

lowering.py    the process that lowers; cutting.py: the cuts between programs; host_reads.py: values read on the host
traces.py      the programs and values that lowering reports; programs.py: a program, its collectives, its checks
alignment.py   the ranks that run a program together, and the order of programs
execution.py   the process that executes; worker.py: requests to both processes
replaying.py   the public calls; __main__.py: the command
"""

from ..call_site import TRANSPORT, hide
from .programs import Collective, Program, ProgramsDiffer, ReplicaGroupsWrong
from .replaying import Replayed, ReplayedLoop, close, lower, replay, replay_loop, training_state
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
