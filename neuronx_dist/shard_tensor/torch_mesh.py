"""A mesh of this package where torch's functions take one: what only torch's class has is asked of torch's mesh.

`DeviceMesh` is a subclass of torch's without its state, so that it exists where ranks have no process groups. Torch's
mesh is made when a function of torch first asks for one of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh as TorchMesh

__all__ = ["answered_by_torch", "mesh_of_torch"]

# Attributes that only instances of torch's class have, in 2.9 to 2.15, and that its functions read. By name: others,
# which a debugger asks for, must not make a mesh of torch, for which all ranks have to take part; and torch.compile
# takes no mesh whose class has `__getattr__`.
_STATE = """
_coordinate_on_dim _device_type _dim_group_names _flatten_mapping _flatten_mesh_list _flatten_rank_map _hash _layout
_mesh_dim_names _pg_registry _preserve_rank_order _rank _rank_map _root_mesh _thread_id
""".split()


def answered_by_torch(cls: type) -> type:
    """Decorator of a subclass of torch's mesh: members that only torch's class defines become those of `to_torch()`."""
    members = vars(TorchMesh)
    of_instances = [
        name
        for name, member in members.items()
        if not name.startswith("__") and not isinstance(member, (staticmethod, classmethod))
    ]
    for name in (*of_instances, *_STATE):
        if name not in vars(cls):
            setattr(cls, name, _Member(name))
    return cls


class _Member:
    """Descriptor of a method or attribute of `to_torch()`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, mesh: Any, cls: Any) -> Any:
        return self if mesh is None else getattr(mesh.to_torch(), self.name)


def mesh_of_torch(mesh: Any, whole: Any, names: Sequence[str]) -> Any:
    """Makes torch's mesh of a mesh, over the same process groups.

    Args:
        whole: the mesh that it is a part of, by these names of dims; None: of none.

    Raises:
        RuntimeError: ranks have no process groups.
    """
    groups = mesh.get_all_groups() if mesh.communicators is not None else []
    if whole is not None and sorted(names, key=whole.mesh_dim_names.index) == [*names]:  # torch takes no other order
        return whole.to_torch()[tuple(names)]
    if groups and mesh.mesh_dim_names is not None:
        return TorchMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    return TorchMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
