"""`DistributedManager`: joins the job and says which rank this is, under the names that PhysicsNeMo's scripts use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .. import comm
from ..comm import launch
from .device_mesh import DeviceMesh, current_mesh, init_device_mesh

__all__ = ["DistributedManager"]

_STATE = "distributed_manager"  # of a context


class DistributedManager:
    """This process's place in the job. Every instance is the same one; it holds nothing itself.

    Example:
        >>> DistributedManager.initialize()
        >>> manager = DistributedManager()
        >>> mesh = manager.initialize_mesh((-1,), ("domain",))

    Raises:
        RuntimeError: nobody has called `DistributedManager.initialize()`.
    """

    def __init__(self) -> None:
        if not self.is_initialized():
            raise RuntimeError("DistributedManager: call DistributedManager.initialize() first, on every rank")

    @classmethod
    def initialize(cls, device: str = "auto") -> None:
        """Joins the job that torchrun started, or makes one of a single rank; does nothing if a job was joined before.

        Args:
            device: as of `neuronx_dist.init_distributed`; a job that was joined before has its own.

        Raises:
            ValueError: a device that this machine has not.
        """
        if cls.is_initialized():
            return
        job_device = torch.device("cpu") if comm.is_initialized() else launch.init_distributed(device)
        current_mesh(job_device.type)
        comm.current().extras[_STATE] = {"device": job_device}

    @classmethod
    def is_initialized(cls) -> bool:
        """Returns whether `initialize` has been called in this job."""
        return comm.is_initialized() and _STATE in comm.current().extras

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return comm.current().rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as the launcher says (LOCAL_RANK); 0 without one."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return comm.current().mesh.world_size

    @property
    def distributed(self) -> bool:
        """Returns whether there is more than one rank."""
        return self.world_size > 1

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._state["device"]
        return device

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Makes the job's mesh, which `mesh` returns from now on; one size may be -1. All ranks call it.

        Raises:
            ValueError: the sizes do not make up the job's number of ranks, or a dim has no name.
        """
        if len(mesh_shape) != len(mesh_dim_names):
            raise ValueError(
                f"initialize_mesh: mesh_shape {tuple(mesh_shape)} has {len(mesh_shape)} dims, but mesh_dim_names "
                f"{tuple(mesh_dim_names)} has {len(mesh_dim_names)} names: pass one name for each dim"
            )
        mesh = init_device_mesh(self.device.type, mesh_shape, mesh_dim_names=mesh_dim_names)
        self._state["mesh"] = mesh
        return mesh

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of `initialize_mesh`, else one dim over all ranks; `mesh["domain"]` is one dim of the mesh."""
        mesh: DeviceMesh = self._state.get("mesh") or current_mesh(self.device.type)
        return mesh

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = comm.current().extras[_STATE]
        return state
