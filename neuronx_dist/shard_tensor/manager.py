"""`DistributedManager`: joins the job, says which rank this is, and has its mesh and groups by name.

Names, arguments and results are those of PhysicsNeMo's scripts. `mesh` is a property.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .. import comm
from ..comm import Communicator, launch
from ..comm.backends import local_device
from ..comm.launchers import Place, device_with, environment_of, place_of
from .device_mesh import DeviceMesh, current_mesh, group_over, init_device_mesh

__all__ = ["DistributedManager", "UndefinedGroupError", "UninitializedManagerError"]

_STATE = "distributed_manager"  # of a context


class UninitializedManagerError(RuntimeError):
    """Error of a manager that is used before `DistributedManager.initialize()`."""


class UndefinedGroupError(ValueError):
    """Error of a name that no group has."""


class DistributedManager:
    """This process's place in the job. Every instance is the same one; it holds nothing itself.

    Example:
        >>> DistributedManager.initialize()
        >>> manager = DistributedManager()
        >>> mesh = manager.initialize_mesh((-1,), ("domain",))

    Raises:
        UninitializedManagerError: nobody has called `DistributedManager.initialize()`.
    """

    def __init__(self) -> None:
        if not self.is_initialized():
            raise UninitializedManagerError(
                "DistributedManager: call DistributedManager.initialize() first, on every rank"
            )

    # --- joining and leaving

    @classmethod
    def initialize(cls, device: str = "auto") -> None:
        """Joins the job that a launcher started, or makes one of a single rank; does nothing if one was joined before.

        The launcher is torchrun, SLURM or Open MPI, the first whose variables are set;
        PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD (ENV, SLURM, OPENMPI) selects one (`comm/launchers.py`).

        Args:
            device: as of `neuronx_dist.init_distributed`; a job that was joined before has its own.

        Raises:
            ValueError: a device that this machine has not, or a variable of the launcher that is not set.
        """
        if not cls.is_initialized():
            cls._join(place_of(), device)

    @classmethod
    def initialize_env(cls) -> None:
        """Joins the job by torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""
        cls._join(place_of("ENV"))

    @classmethod
    def initialize_slurm(cls, port: str | int | None = None) -> None:
        """Joins the job by SLURM's variables; the address is SLURM_LAUNCH_NODE_IPADDR, or MASTER_ADDR."""
        cls._join(place_of("SLURM", port=port))

    @classmethod
    def initialize_open_mpi(cls, addr: str | None = None, port: str | int | None = None) -> None:
        """Joins the job by Open MPI's variables; `addr` and `port` are those of rank 0."""
        cls._join(place_of("OPENMPI", address=addr, port=port))

    @classmethod
    def setup(
        cls,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: str | int = "12355",
        backend: str | None = None,
        method: str = "env",
    ) -> None:
        """Joins a job at a place that the caller knows; does nothing if one was joined before.

        Args:
            local_rank: None: `rank`, as on a single host.
            backend: that of torch.distributed for the device that is wanted; None: by the machine.
            method: a name for it, in `str(manager)`.

        Raises:
            ValueError: torch.distributed has no such backend.
        """
        device = "auto" if backend is None else device_with(backend)
        place = Place(method, rank, world_size, rank if local_rank is None else local_rank, addr, str(port))
        cls._join(place, device)

    @classmethod
    def _join(cls, place: Place | None, device: str = "auto") -> None:
        if cls.is_initialized():
            return
        with environment_of(place):
            job_device = torch.device("cpu") if comm.is_initialized() else launch.init_distributed(device)
        current_mesh(job_device.type)
        comm.current().extras[_STATE] = {
            "device": job_device,
            "place": place,
            "groups": {},
            "group_ranks": {},
            "broadcast_buffers": False,
            "find_unused_parameters": False,
        }

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Leaves the job: its process groups end, and `initialize` may join another one. May be called twice.

        Args:
            barrier: whether to wait for the other ranks first.
        """
        if not comm.is_initialized():
            return
        if barrier:
            comm.barrier()
        context = comm.current()
        context.extras.pop(_STATE, None)
        if context is comm.context.default():  # else ranks are threads, or are played
            launch.disconnect()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    @staticmethod
    def get_available_backend() -> str:
        """Returns the backend of torch.distributed that `initialize` takes on this machine."""
        return local_device.backend_of(local_device.device_type("auto"))

    @classmethod
    def is_initialized(cls) -> bool:
        """Returns whether `initialize` has been called in this job."""
        return comm.is_initialized() and _STATE in comm.current().extras

    # --- the rank

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return comm.current().rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as the launcher says (torchrun: LOCAL_RANK); 0 without one."""
        if self._place is not None and self._place.address is not None:
            return self._place.local_rank
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return comm.current().mesh.world_size

    @property
    def distributed(self) -> bool:
        """Returns whether a launcher started the job, of one rank too, or there is more than one rank."""
        return self._place is not None or self.world_size > 1

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self._state["device"]
        return device

    @property
    def cuda(self) -> bool:
        """Returns whether this rank's device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def _initialization_method(self) -> str:
        return "None" if self._place is None else self._place.method

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, started by {self._initialization_method}, on {self.device}"

    # --- the mesh

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
    def global_mesh(self) -> DeviceMesh:
        """The mesh of `initialize_mesh`; where there is none it becomes one of the dim "world". All ranks ask."""
        if "mesh" not in self._state:
            self.initialize_mesh((-1,), ("world",))
        return self.mesh

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Sizes of the mesh by name of its dims; empty before `initialize_mesh`."""
        mesh: DeviceMesh | None = self._state.get("mesh")
        return {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape))

    def mesh_names(self) -> list[str]:
        """Returns the names of the mesh's dims."""
        return list(self.mesh_dims)

    def mesh_sizes(self) -> list[int]:
        """Returns the sizes of the mesh's dims."""
        return list(self.mesh_dims.values())

    def get_mesh_group(self, mesh: DeviceMesh) -> Any:
        """Returns the group of all ranks of a mesh, as `group` does. Made once, by all ranks of the job."""
        return _torch_group(group_over(mesh, mesh))

    # --- groups by name

    @property
    def group_names(self) -> list[str]:
        """Names of the groups that were made."""
        return list(self._state["groups"])

    def group(self, name: str | None = None) -> Any:
        """Returns the torch ProcessGroup of a name, for torch.distributed and for every function of this package.

        The name is that of a group that was made, or of a dim of the mesh of `initialize_mesh`.

        Returns the Communicator, which functions of this package take, where ranks are threads; None, which means all
        ranks, for no name.

        Raises:
            UndefinedGroupError: no group of the name was made.
        """
        return None if name is None else _torch_group(self._communicator(name))

    def group_size(self, name: str | None = None) -> int:
        """Returns the number of ranks of a group; without a name, of the job."""
        return self.world_size if name is None else int(self._communicator(name).size)

    def group_rank(self, name: str | None = None) -> int:
        """Returns this rank's index in a group; without a name, in the job."""
        return self.rank if name is None else int(self._communicator(name).rank)

    def group_name(self, group: Any = None) -> str | None:
        """Returns the name of a group; None for the group of all ranks.

        Raises:
            UndefinedGroupError: the group has no name.
        """
        if group is None:
            return None
        for name in self._state["groups"]:
            if self.group(name) is group:
                return str(name)
        raise UndefinedGroupError(f"{group} is none of the groups {self.group_names}")

    @classmethod
    def create_process_subgroup(
        cls, name: str, size: int, group_name: str | None = None, verbose: bool = False
    ) -> None:
        """Divides all ranks, or those of each group `group_name`, into groups of `size` neighbours. All ranks call it.

        Raises:
            ValueError: the name is taken; `size` does not divide the number of ranks.
            UndefinedGroupError: there is no group `group_name`.
        """
        manager = cls()
        parents = [list(range(manager.world_size))] if group_name is None else manager._ranks(group_name)
        if size < 1 or len(parents[0]) % size:
            raise ValueError(f"create_process_subgroup {name!r}: size {size} does not divide {len(parents[0])} ranks")
        manager._create(name, [ranks[i : i + size] for ranks in parents for i in range(0, len(ranks), size)], verbose)

    @classmethod
    def create_orthogonal_process_group(
        cls, orthogonal_group_name: str, group_name: str, verbose: bool = False
    ) -> None:
        """Makes groups of the ranks that have one index in the groups `group_name`. All ranks call it.

        Raises:
            ValueError: the name is taken.
            UndefinedGroupError: there is no group `group_name`.
        """
        manager = cls()
        rows = [list(ranks) for ranks in zip(*manager._ranks(group_name))]
        manager._create(orthogonal_group_name, rows, verbose)

    @classmethod
    def create_group_from_node(cls, node: Any, parent: str | None = None, verbose: bool = False) -> str:
        """Makes the groups of a `ProcessGroupNode`, and those orthogonal to it, whose name it returns.

        Raises:
            ValueError: the node has no size: `set_leaf_group_sizes` of the config gives it one.
        """
        if node.size is None:
            raise ValueError(f"create_group_from_node: {node} has no size: call config.set_leaf_group_sizes first")
        cls.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        cls.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @classmethod
    def create_groups_from_config(cls, config: Any, verbose: bool = False) -> None:
        """Makes the groups of a `ProcessGroupConfig`, each child orthogonal to those before it. All ranks call it."""
        cls.create_group_from_node(config.root, verbose=verbose)
        nodes = [config.root]
        for node in nodes:  # breadth first
            parent = node.name
            for child in config.children(node.name):
                parent = cls.create_group_from_node(child, parent, verbose)
                nodes.append(child)

    def _create(self, name: str, rows: list[list[int]], verbose: bool) -> None:
        if name in self._state["groups"]:
            raise ValueError(f"group {name!r} exists already: pass another name")
        self._state["groups"][name] = comm.new_group(rows, name)
        self._state["group_ranks"][name] = rows
        if verbose and self.rank == 0:
            print(f"group {name!r}: ranks {rows}")

    def _ranks(self, name: str) -> list[list[int]]:
        """Returns the ranks of each group of a name."""
        size = self._communicator(name).size
        if name in self._state["groups"]:
            ranks: list[list[int]] = self._state["group_ranks"][name]
            return ranks
        dim = self.mesh_names().index(name)
        rows: list[list[int]] = self.mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist()
        return rows

    def _communicator(self, name: str) -> Communicator:
        if name not in self._state["groups"]:
            if name in self.mesh_dims:
                return self.mesh.communicator(name)
            raise UndefinedGroupError(
                f"no group {name!r} was made: the groups are {self.group_names}; create_process_subgroup makes one"
            )
        communicator: Communicator = self._state["groups"][name]
        return communicator

    # --- settings for DistributedDataParallel: stored for the script that reads them

    @property
    def broadcast_buffers(self) -> bool:
        """Setting for DistributedDataParallel, which the script passes on."""
        return bool(self._state["broadcast_buffers"])

    @broadcast_buffers.setter
    def broadcast_buffers(self, broadcast: bool) -> None:
        self._state["broadcast_buffers"] = broadcast

    @property
    def find_unused_parameters(self) -> bool:
        """Setting for DistributedDataParallel, which the script passes on."""
        return bool(self._state["find_unused_parameters"])

    @find_unused_parameters.setter
    def find_unused_parameters(self, find_params: bool) -> None:
        self._state["find_unused_parameters"] = find_params

    @property
    def _place(self) -> Place | None:
        place: Place | None = self._state["place"]
        return place

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = comm.current().extras[_STATE]
        return state


def _torch_group(communicator: Communicator | None) -> Any:
    return None if communicator is None else comm.current().backend.process_group(communicator)
