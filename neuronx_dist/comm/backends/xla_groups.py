"""XLA ranks as processes: torchrun's world, and process groups of torch_xla's `xla` backend.

Such a group carries the replica groups of all ranks (`_mesh`), since all have one program. Each rank makes only its
group, by `new_group(its_ranks, pg_options={"xla_pg_options": {"mesh": all_groups}})`, as in NeuronX Distributed.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from .. import context
from ..base import Communicator
from ..errors import CommError

__all__ = ["check_launched", "process_group", "replica_groups"]


def check_launched(size: int) -> None:
    """Refuses a job of several processes in which torch_xla sees another number of devices.

    torch_xla's rendezvous takes the size of the world from the runtime, not from torchrun: processes whose devices do
    not know of each other (those of PJRT_DEVICE=CPU never do) would each train alone, without a message.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and launched != size:
        raise CommError(
            f"torchrun started {launched} processes (WORLD_SIZE), torch_xla sees a world of {size} with PJRT_DEVICE="
            f"{os.environ.get('PJRT_DEVICE')}: start one process for each XLA device. On the CPU processes have no XLA "
            "world in common: use neuronx_dist.xla_replay there"
        )


def replica_groups(group: Any) -> list[list[int]]:
    """Returns the groups of all ranks along the axis of a torch group.

    Raises:
        TypeError: the group is not of the `xla` backend, or does not know the groups of the other ranks.
    """
    how = (
        "on XLA an axis is a mesh axis name, a tuple of names, a Communicator, or a ProcessGroup made with "
        "pg_options={'xla_pg_options': {'mesh': all_groups}}"
    )
    mesh = getattr(group, "_mesh", None)
    if mesh is None:
        raise TypeError(f"{how}; got {group!r}")
    if not mesh:  # the default group
        return [list(range(group.size()))]
    if len(mesh) == 1 and dist.is_initialized() and len(mesh[0]) < dist.get_world_size():
        # The result of torch_xla's new_group(ranks) alone: ranks in other groups would have other programs.
        raise TypeError(
            f"{how}; this ProcessGroup lists only the group of this rank, {mesh[0]}, of {dist.get_world_size()} ranks"
        )
    return [list(ranks) for ranks in mesh]


def process_group(communicator: Communicator) -> Any:
    """Returns a torch group over the ranks of a communicator, for scripts that use torch.distributed.

    Returns the communicator itself where torch.distributed does not know the XLA devices (ranks as threads, one
    device).
    """
    if not dist.is_initialized() or dist.get_backend() != "xla":
        return communicator
    here = context.current()
    groups = here.extras.setdefault("process_groups", {})
    if communicator not in groups:
        options = {"xla_pg_options": {"mesh": getattr(communicator, "groups", None)}}
        group = groups[communicator] = dist.new_group(list(communicator.ranks), pg_options=options)
        here.register(group, communicator)  # sets the group's name, which torch_xla's new_group cannot
    return groups[communicator]
