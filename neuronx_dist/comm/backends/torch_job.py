"""Backend of a rank in a torch.distributed job, with the watch for other ranks' failures."""

from __future__ import annotations

import datetime
import itertools
import os
from typing import Any

import torch.distributed as dist

from ...torch_internals.distributed import default_store
from .. import backends
from ..health.failure import FailureMonitor
from .c10d import C10dBackend

__all__ = ["connect", "connection_number"]

_connections = itertools.count(1)


def connect(timeout: float | None = None) -> C10dBackend:
    """Returns a backend for a new mesh, all of whose groups are new. Its `close()` also ends the watch.

    Args:
        timeout: seconds after which a collective gives up on a silent rank; see `C10dBackend`.
    """
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    number = connection_number(store, rank)
    monitor = None
    if world_size > 1:
        monitor = FailureMonitor(_connection_of_its_own(store), rank, world_size, number)
        monitor.start()
    limit = datetime.timedelta(seconds=timeout) if timeout is not None else None
    try:
        watch = backends.call_agreement.watcher(monitor) if os.environ.get("NEURONX_DIST_DEBUG") else None
    except BaseException:
        if monitor is not None:
            monitor.stop()
        raise
    return C10dBackend(limit, monitor, watch, number)


def connection_number(store: Any, rank: int) -> int:
    """Returns how often this rank has connected to a mesh: a prefix that keeps entries of earlier meshes apart."""
    here = next(_connections)
    try:
        return int(store.add(f"neuronx_dist/connections/{rank}", 1))
    except RuntimeError:  # a store that holds nothing (torch's FakeStore)
        return here


def _connection_of_its_own(store: Any) -> Any:
    """Returns a store with the same entries, whose requests do not wait for those of other threads.

    A rank that waits for others to make a group holds the lock of the default store.
    """
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):  # torch's FakeStore
        return store
