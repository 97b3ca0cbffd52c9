"""Mesh, rank and communicators: a process-wide default, and an override for the current thread.

`initialize_model_parallel` sets the default. `scopes.as_rank(mesh, rank)` overrides it, so that one process can play
any rank: the checker, and ranks as threads. Autograd functions capture their communicator in forward and never look
it up in backward, which may run in another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch.autograd import set_multithreading_enabled
from torch.compiler import is_dynamo_compiling

from ..mesh import Axis, Groups, Mesh, part_of
from .base import Backend, Communicator
from .ranks.rank_numbers import concrete, is_member

__all__ = ["AxisLike", "Context", "communicator", "current", "is_initialized", "set_default", "use"]

AxisLike = Axis | Communicator | Any  # Any: a torch ProcessGroup


class Context:
    """A rank's place in a mesh, and its communicators: made at their first use, by all ranks together, and cached."""

    def __init__(self, mesh: Mesh, rank: int, backend: Backend) -> None:
        mesh.coordinates(rank)  # raises for a rank outside the world
        self.mesh = mesh
        self.rank = backend.current_rank(mesh, rank)
        self.backend = backend
        # Objects that live as long as the mesh: random streams, groups that a model requested.
        self.extras: dict[str, Any] = {}
        self._communicators: dict[Hashable, Communicator] = {}

    def communicator(self, axis: AxisLike) -> Communicator:
        """Returns the communicator along an axis: a name, a tuple of names, or a torch ProcessGroup."""
        try:
            return self._communicators[axis]
        except (KeyError, TypeError):
            pass
        if isinstance(axis, Communicator):
            return axis
        if is_dynamo_compiling():
            raise RuntimeError(
                f"compiled code cannot create the group over {axis!r}, because all its ranks must take part: call "
                f"neuronx_dist.comm.communicator({axis!r}) before the compiled code runs"
            )
        if isinstance(axis, (str, tuple)):
            label = axis if isinstance(axis, str) else ",".join(axis)
            communicator = self.backend.communicator(label, self.mesh.groups(axis), self.rank)
            communicator.axis_sizes = self.mesh.sizes(axis)
        else:
            communicator = self.backend.wrap(axis, self.rank)
            communicator.axis_sizes = self._sizes_of(communicator.ranks)
        self._communicators[axis] = communicator
        return communicator

    @property
    def typed_mesh(self) -> Mesh:
        """Returns the mesh as types see it: with the parts of tp over which layers of this job have replicas."""
        parts = [part_of(axis) for axis in self._communicators if isinstance(axis, str)]
        cuts = dict.fromkeys(cut for part in parts if part.axis == "tp" for cut in part.cuts)
        nested = sorted(cuts, reverse=True)
        if any(outer % inner for outer, inner in pairwise(nested)):  # the parts of two layers have no common parts
            nested = [*cuts][:1]
        return replace(self.mesh, tp_replicas=tuple(nested)) if nested else self.mesh

    def register(self, group: Any, communicator: Communicator) -> None:
        """Makes `communicator` the one of a torch ProcessGroup from now on."""
        self._communicators[group] = communicator

    def new_group(self, groups: Sequence[Sequence[int]], label: str) -> Communicator | None:
        """Returns a communicator over explicit rank lists: every rank of the world calls this, in the same order."""
        if isinstance(groups, Groups) and groups.mesh == self.mesh:  # no rank is left out
            communicator = self.backend.communicator(label, groups, self.rank, separate=True)
            communicator.axis_sizes = self.mesh.sizes(groups.axis)
            return communicator
        seen = [rank for group in groups for rank in group]
        members = set(seen)
        if len(members) != len(seen) or not members <= set(range(self.mesh.world_size)):
            raise ValueError(
                f"new_group {label!r}: {groups} must be disjoint lists of ranks below {self.mesh.world_size}"
            )
        others = [[rank] for rank in range(self.mesh.world_size) if rank not in members]
        communicator = self.backend.communicator(label, [*groups, *others], self.rank, separate=True)
        if not is_member(self.rank, seen):
            return None
        communicator.axis_sizes = self._sizes_of(next(group for group in groups if concrete(self.rank) in group))
        return communicator

    def _sizes_of(self, ranks: Sequence[int]) -> dict[str, int]:
        """Returns the sizes of the axes that a group of these ranks spans."""
        axis = self.mesh.axis_of(ranks)
        return {} if axis is None else self.mesh.sizes(axis)


_default: Context | None = None
_local = threading.local()
# Contexts by rank, and the rank of the calling thread, if ranks are threads of one process (XLA). An autograd thread
# has no context, but it knows the device that it works for.
_by_rank: dict[int, Context] = {}
_whoami: Callable[[], int] | None = None


def set_default(context: Context | None) -> None:
    """Sets (or, with None, forgets) the process-wide context."""
    global _default
    _default = context


def set_of_thread(context: Context | None, whoami: Callable[[], int]) -> None:
    """Sets (or, with None, forgets) the context of the rank that `whoami()` says this thread belongs to."""
    global _whoami
    _whoami = whoami
    if context is None:
        _by_rank.pop(whoami(), None)
    else:
        _by_rank[context.rank] = context


def default() -> Context | None:
    return _by_rank.get(_whoami()) if _by_rank and _whoami is not None else _default


def is_initialized() -> bool:
    """Whether this thread has a mesh: of `initialize_model_parallel`, or of `as_rank`."""
    return bool(getattr(_local, "stack", None)) or default() is not None


def current() -> Context:
    """Returns the context of this thread.

    Raises:
        RuntimeError: there is none; the message says what to call.
    """
    stack: list[Context] | None = getattr(_local, "stack", None)
    if stack:
        return stack[-1]
    context = default()
    if context is None:
        raise RuntimeError(
            "model parallel is not initialized: call neuronx_dist.initialize_model_parallel(...) after "
            "torch.distributed.init_process_group, or work inside `with neuronx_dist.comm.as_rank(mesh, rank):`"
        )
    return context


def communicator(axis: AxisLike) -> Communicator:
    """Returns the current context's communicator along `axis`; a Communicator is returned unchanged."""
    if isinstance(axis, Communicator):
        return axis
    return current().communicator(axis)


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Makes `context` current in this thread, and in the backward passes that this thread starts.

    Autograd runs the backward of a GPU's tensors in a thread of the device, which has no context, and in which ranks
    that are threads of one process would wait for each other for ever: here it runs in the calling thread.
    """
    stack: list[Context] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    stack.append(context)
    try:
        with set_multithreading_enabled(False):
            yield context
    finally:
        stack.pop()
