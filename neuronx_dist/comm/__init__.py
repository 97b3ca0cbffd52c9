"""Plain collectives on one backend: c10d (gloo, NCCL), xla, threads (ranks of one process), shapes (no group at all).

verbs/          one function per verb
context.py      which mesh, which rank, which communicators; scopes.py: what a `with` changes
recording.py    the one point that every collective passes; base.py: what a backend is; errors.py: errors
backends/       c10d, xla, threads, shapes; launch.py: joining a job; run_command.py, run_network.py: `neuronx-dist run`
local_store.py  the store of a job on one host; launchers.py: starts by the variables of torchrun, SLURM, Open MPI
doctor/         `neuronx-dist doctor`: what this machine lacks
ranks/          numbers that differ from rank to rank, for playing one rank in place of many
health/         ranks that fail, wait or are lost
host.py, rank_selection.py, generators.py   host tensors, a rank's part of a tensor, random generators, on any device

Nothing here is differentiable; see `neuronx_dist.spmd`.
"""

from collections.abc import Sequence

from ..call_site import TRANSPORT, hide
from ..lazy_names import lazy_names
from . import context
from .base import Communicator, Handle
from .context import Context, communicator, current, is_initialized
from .errors import CommError, CommTimeout, RemoteRankError
from .recording import Call
from .verbs.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    permute,
    recv,
    reduce_scatter,
    send,
)

__all__ = [
    "Call",
    "CommDeadlock",
    "CommError",
    "CommTimeout",
    "Communicator",
    "Context",
    "Handle",
    "RemoteRankError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "as_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communicator",
    "context",
    "current",
    "exchange",
    "gather_objects",
    "is_initialized",
    "new_group",
    "permute",
    "rank",
    "record",
    "recv",
    "reduce_scatter",
    "send",
    "size",
    "threads",
]

hide(__name__, TRANSPORT)

__getattr__ = lazy_names(
    __name__,
    {
        "CommDeadlock": "comm.backends.threads",
        "threads": "comm.backends",
        "exchange": "comm.verbs.exchange",
        "launch": "comm",
        **dict.fromkeys(("as_rank", "record"), "comm.scopes"),
    },
)


def size(axis: context.AxisLike) -> int:
    """Number of ranks along `axis` in the current mesh."""
    if isinstance(axis, (str, tuple)):
        return current().mesh.size(axis)
    return communicator(axis).size


def rank(axis: context.AxisLike) -> int:
    """This rank's index along `axis` in the current mesh."""
    if isinstance(axis, (str, tuple)):
        return current().mesh.coordinate(axis, current().rank)
    return communicator(axis).rank


def new_group(groups: Sequence[Sequence[int]], label: str = "group") -> Communicator | None:
    """Returns a communicator over explicit rank lists, None for a rank that is in none of them.

    Every rank of the world calls this, in the same order.
    """
    return current().new_group(groups, label)
