"""Passing tensors around the ranks of a mesh dim, one place at a time; differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from .. import comm
from ..comm import Communicator
from .device_mesh import DeviceMesh

__all__ = ["PassingHandle", "RingPassingConfig", "perform_ring_iteration", "perform_ring_iteration_async"]

DIRECTIONS = ("forward", "backward")
METHODS = ("p2p", "a2a")


@dataclass(frozen=True)
class RingPassingConfig:
    """The ring's mesh dim, and the direction.

    Attributes:
        mesh_dim: of the device mesh, by index or name.
        mesh_size: ranks along it; None: as many as there are. It is compared with the mesh.
        ring_direction: "forward": to the next rank; "backward": to the one before.
        communication_method: "p2p" or "a2a"; both are the same exchange here, in which only neighbours send. The
            asynchronous form refuses "a2a", as PhysicsNeMo's.

    Raises:
        ValueError: a direction or a method that there is not.
    """

    mesh_dim: int | str = 0
    mesh_size: int | None = None
    ring_direction: str = "forward"
    communication_method: str = "p2p"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("ring_direction", self.ring_direction, DIRECTIONS),
            ("communication_method", self.communication_method, METHODS),
        ):
            if value not in known:
                raise ValueError(f"RingPassingConfig: {name}={value!r}: use one of {', '.join(known)}")


class PassingHandle:
    """A tensor on its way. `wait()` returns the arriving tensor, once, in the graph of the one that was passed.

    It unpacks as PhysicsNeMo's pair of a buffer, in no graph, and the list of what is awaited before it is read.

    Example:
        >>> received, works = perform_ring_iteration_async(x, mesh, config)
        >>> for work in works:
        >>>     work.wait()
    """

    def __init__(self, arguments: tuple[Any, ...], received: torch.Tensor, handle: Any) -> None:
        self._arguments, self._received, self._handle = arguments, received, handle

    def __iter__(self) -> Iterator[Any]:
        yield self._received
        yield [self._handle]

    def wait(self) -> torch.Tensor:
        """Returns the tensor that the previous rank passed; gradients go back to that rank."""
        result: torch.Tensor = _Pass.apply(*self._arguments, (self._received.detach(), self._handle))
        return result


def perform_ring_iteration(
    tensor: torch.Tensor, mesh: DeviceMesh, ring_config: RingPassingConfig, recv_shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Passes `tensor` to the next rank, and returns the tensor of the previous rank.

    Args:
        recv_shape: of what comes; None: as `tensor`'s. Shards may differ in size.

    Raises:
        ValueError: the configuration is of a mesh of another size.
        CommError: the rank before sends another number of elements.
    """
    config = replace(ring_config, communication_method="p2p")
    return perform_ring_iteration_async(tensor, mesh, config, recv_shape=recv_shape).wait()


def perform_ring_iteration_async(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_tensor: torch.Tensor | None = None,
    recv_shape: Sequence[int] | None = None,
) -> PassingHandle:
    """Starts to pass `tensor` to the next rank; ranks can compute meanwhile. Every rank waits for its handle.

    Args:
        recv_tensor: contiguous buffer for what comes; None: a new one. Autograd sees that it is written.
        recv_shape: of what comes, without a buffer; None: as `tensor`'s.

    Raises:
        ValueError: the configuration is of a mesh of another size, or says "a2a".
    """
    if ring_config.communication_method != "p2p":
        raise ValueError(
            f"perform_ring_iteration_async: communication_method={ring_config.communication_method!r}: pass 'p2p'"
        )
    communicator = mesh.communicator(ring_config.mesh_dim)
    if ring_config.mesh_size is not None and ring_config.mesh_size != communicator.size:
        raise ValueError(
            f"RingPassingConfig: mesh_size={ring_config.mesh_size}, but mesh dim {ring_config.mesh_dim!r} of {mesh} "
            f"has {communicator.size} ranks"
        )
    step = 1 if ring_config.ring_direction == "forward" else -1
    if recv_tensor is not None:
        recv_shape = recv_tensor.shape
        torch.autograd.graph.increment_version(recv_tensor)
    shape = torch.Size(tensor.shape if recv_shape is None else recv_shape)
    received, handle = _start_passing(tensor.detach(), communicator, step, shape, recv_tensor)
    return PassingHandle((tensor, communicator, step, shape), received, handle)


def _start_passing(
    x: torch.Tensor,
    communicator: Communicator,
    step: int,
    shape: torch.Size,
    received: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    size, rank = communicator.size, int(communicator.rank)
    received = x.new_empty(shape) if received is None else received
    nothing = x.new_empty(0)
    sends, recvs = [nothing] * size, [nothing] * size
    sends[(rank + step) % size], recvs[(rank - step) % size] = x, received
    return received, _Started(comm.exchange(sends, recvs, communicator, async_op=True), x, received)


class _Started:
    """An exchange under way, with its memory: without that, messages that nobody awaits would stop later ones."""

    unfinished: ClassVar[set[_Started]] = set()

    def __init__(self, handle: Any, *memory: torch.Tensor) -> None:
        self._handle, self._memory = handle, memory
        self.unfinished.add(self)

    def wait(self) -> None:
        self._handle.wait()
        self.unfinished.discard(self)


class _Pass(torch.autograd.Function):
    """Autograd function of one step; the gradient goes around the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, communicator: Communicator, step: int, shape: torch.Size, started: Any
    ) -> torch.Tensor:
        ctx.arguments = communicator, step, x.shape
        received, handle = started or _start_passing(x, communicator, step, shape)
        handle.wait()
        result: torch.Tensor = received
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        communicator, step, shape = ctx.arguments
        return _Pass.apply(grad, communicator, -step, shape, None), None, None, None, None
