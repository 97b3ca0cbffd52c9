"""Ranks and groups of a job, also before `initialize_model_parallel`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ... import comm
from ...comm.backends.local_device import device_type, select
from ...mesh import Mesh

__all__ = ["communicator", "in_world", "local_device", "local_rank", "local_size", "rank", "size"]

_AXES = ("tp", "dp", "pp", "cp", ("dp", "cp"), "ep", "edp", "world")


def size() -> int:
    """Returns the number of ranks of the job: 1 before a process group is made."""
    if comm.is_initialized():
        return comm.size("world")
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns this process's rank."""
    if comm.is_initialized():
        return comm.rank("world")
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def local_rank() -> int:
    """Returns this process's index on its host."""
    return int(os.environ.get("LOCAL_RANK", rank() % local_size()))


def local_device() -> torch.device:
    """Returns this rank's device."""
    if comm.is_initialized():
        return comm.current().backend.device
    return select(device_type("auto"))


@contextmanager
def in_world() -> Iterator[None]:
    """Makes a mesh for the time of a call, if there is none yet.

    Raises:
        RuntimeError: there is no process group, in a job of several ranks.
    """
    if comm.is_initialized():
        yield
        return
    if not dist.is_initialized():
        if size() > 1:
            raise RuntimeError(
                'there is no process group yet: call torch.distributed.init_process_group("xla") before functions '
                "that communicate"
            )
        comm.launch.init_distributed()
    comm.launch.connect(Mesh(dist.get_world_size()), lazy=True)
    try:
        yield
    finally:
        comm.launch.disconnect()


def communicator(groups: Sequence[Sequence[int]] | None) -> Any:
    """Returns what the ranks of lists communicate over: an axis of the mesh, if one has these groups, else a new group.

    Args:
        groups: disjoint lists of ranks, equal on all ranks; None: all ranks.

    Raises:
        ValueError: this rank is in none of them.
    """
    if groups is None:
        return "world"
    lists = sorted(sorted(group) for group in groups)
    mesh = comm.current().mesh
    for axis in _AXES:
        if sorted(sorted(group) for group in mesh.groups(axis)) == lists:
            return axis
    communicators = comm.current().__dict__.setdefault("_groups_of_lists", {})
    key = repr(lists)
    if key not in communicators:
        communicators[key] = comm.new_group(lists, "groups")
    if communicators[key] is None:
        raise ValueError(f"rank {comm.rank('world')} is in none of the groups {groups}")
    return communicators[key]
