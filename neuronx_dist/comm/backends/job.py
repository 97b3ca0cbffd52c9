"""A rank of a torch.distributed job: its backend, with the watch for other ranks' failures."""

from __future__ import annotations

import datetime
import itertools
import os
from typing import Any

import torch.distributed as dist

from .. import backends
from ..failure import FailureMonitor
from .c10d import C10dBackend

__all__ = ["connect", "connection_number"]

_connections = itertools.count(1)


def connect(timeout: float | None = None) -> C10dBackend:
    """A backend for a new mesh, all of whose groups are new. Its `close()` ends the watch too.

    Args:
        timeout: seconds after which a collective gives up on a silent rank; see `C10dBackend`.
    """
    store, rank, world_size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    number = connection_number(store, rank)
    monitor = None
    if world_size > 1:
        monitor = FailureMonitor(store, rank, world_size, number)
        monitor.start()
    limit = datetime.timedelta(seconds=timeout) if timeout is not None else None
    try:
        watch = backends.agreement.watcher(monitor) if os.environ.get("NEURONX_DIST_DEBUG") else None
    except BaseException:
        if monitor is not None:
            monitor.stop()
        raise
    return C10dBackend(limit, monitor, watch, number)


def connection_number(store: Any, rank: int) -> int:
    """How many meshes this rank has connected in its job: what an earlier one left in the store is not read again."""
    here = next(_connections)
    try:
        return int(store.add(f"neuronx_dist/connections/{rank}", 1))
    except RuntimeError:  # a store that holds nothing (torch's FakeStore)
        return here
