"""`DeviceMesh`: ranks as a grid with a group along each dim.

It is made from rank numbers, from axes of the current mesh, or from torch's mesh.

A device mesh belongs to the context (the job's, or that of a rank that is played or is a thread): equal ranks and names
give the same object, so that layouts are compared by `is`. Its groups are made when it is, by all ranks of the world.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from .. import comm
from ..comm import Communicator, launch
from ..comm.context import Context
from ..comm.ranks.rank_numbers import concrete
from ..mesh import DENSE_AXES, Axis, Mesh
from ..spmd import no_typecheck
from ..spmd.watching import active
from ..torch_internals.fake_tensors import unset_fake_temporarily
from ..weights import wrappers
from .bounded import Bounded
from .torch_mesh import answered_by_torch, mesh_of_torch

__all__ = ["DeviceMesh", "as_mesh", "current_mesh", "group_over", "init_device_mesh", "with_values"]

_TABLE = "device_meshes"  # of a context
_FLATTENED = "flattened dims of device meshes"  # the same: by name, the dims that were merged, the latest first
_local = threading.local()


@answered_by_torch
class DeviceMesh(TorchMesh):
    """A grid of ranks, row-major, for tensors that are placed on it; torch's functions take it (`torch_mesh.py`).

    Args:
        device_type: of the tensors: "cpu", "cuda", "xla", "neuron", or any other that torch knows.
        mesh: global ranks as a list or tensor, nested for several dims.
        mesh_dim_names: a name for each dim.

    Attributes:
        device_type, mesh_dim_names: as given.
        shape: number of ranks along each dim.
        ndim: number of dims.
        mesh: the global ranks as a tensor `[*shape]`.
        communicators: this rank's group along each dim; None where this rank is no part of the mesh.

    Raises:
        ValueError: ranks that repeat or are none of the job's; names that are not one for each dim.
    """

    device_type: str = ""
    mesh_dim_names: tuple[str, ...] | None = None
    shape: tuple[int, ...] = ()
    ndim: int = 0
    mesh: torch.Tensor = None  # type: ignore[assignment]
    communicators: tuple[Communicator, ...] | None
    plans: Bounded  # of operations on layouts of this mesh, by who computed them
    tables: dict[str, Any]  # other things that live as long as the mesh
    _of_rank: int

    def __new__(cls, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        with with_values():
            ranks = torch.as_tensor(mesh, dtype=torch.int64, device="cpu")
        return _interned(device_type, ranks, None if mesh_dim_names is None else tuple(mesh_dim_names))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: equal arguments return one object."""

    @classmethod
    def from_axes(cls, axes: Axis = "world", *, device_type: str = "cpu") -> DeviceMesh:
        """Returns a mesh of axes of the current mesh, with their names: this rank's part of it.

        Example:
            >>> DeviceMesh.from_axes(("dp", "tp"))
        """
        context = _context()
        names = (axes,) if isinstance(axes, str) else axes
        sizes = [context.mesh.size(name) for name in names]
        with with_values():
            ranks = torch.tensor(context.mesh.group_of(axes, concrete(context.rank)), device="cpu").view(sizes)
        return _interned(device_type, ranks, tuple(names), names)

    @classmethod
    def from_torch(cls, mesh: Any) -> DeviceMesh:
        """Returns the mesh with the ranks and names of a `torch.distributed.DeviceMesh`."""
        return cls(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)

    def to_torch(self) -> Any:
        """Returns this mesh as a plain `torch.distributed.DeviceMesh` over the same process groups, made once.

        A part of a mesh is one in torch, too: `mesh["dp"].to_torch()` is `mesh.to_torch()["dp"]`.
        """
        if "torch" not in self.tables:
            self.tables["torch"] = mesh_of_torch(self, *self.tables.get("part of", (None, ())))
        return self.tables["torch"]

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks along one dim, or of the mesh."""
        return prod(self.shape) if mesh_dim is None else self.shape[self._index(mesh_dim)]

    def get_coordinate(self) -> list[int] | None:  # type: ignore[override]
        """Returns this rank's index along each dim; None for a rank outside of the mesh."""
        return None if self.communicators is None else [communicator.rank for communicator in self.communicators]

    def coordinate_of(self, number: int) -> tuple[int, ...]:
        """Returns the index along each dim of the rank `mesh.flatten()[number]`."""
        result: list[int] = []
        for size in reversed(self.shape):
            number, index = divmod(number, size)
            result.append(index)
        return tuple(reversed(result))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Returns this rank's index along a dim; `mesh_dim` may be left out if there is one dim."""
        return self.communicator(mesh_dim).rank

    def get_rank(self) -> int:
        """Returns this rank's number in the job."""
        return _context().rank

    def communicator(self, mesh_dim: int | str | None = None) -> Communicator:
        """Returns this rank's group along a dim, for every function of this package that communicates."""
        if self.communicators is None:
            raise RuntimeError(f"rank {_context().rank} is not in {self}")
        return self.communicators[self._index(mesh_dim)]

    def groups_over(self, mesh_dims: tuple[int, ...]) -> tuple[tuple[Communicator, tuple[int, ...]], ...]:
        """Returns the groups that reduce over some dims, one after the other, and the dims of each.

        It is one group over all of these dims, row-major, where the job's axes have it. The type checker knows dims
        that are no axes one by one only.
        """
        checked = active() is not None
        table = self.tables.setdefault("groups over dims", {})
        key = (mesh_dims, checked)
        if key not in table:
            group = None if len(mesh_dims) < 2 else self._group_over(mesh_dims, checked)
            table[key] = (
                tuple((self.communicator(m), (m,)) for m in mesh_dims) if group is None else ((group, mesh_dims),)
            )
        result: tuple[tuple[Communicator, tuple[int, ...]], ...] = table[key]
        return result

    def _group_over(self, mesh_dims: tuple[int, ...], checked: bool) -> Communicator | None:
        context = _context()
        if checked and any(context.mesh.axis_of(self.communicator(m).ranks) is None for m in mesh_dims):
            return None
        with no_typecheck():
            axis = _axis_of(context, _rows(self.mesh, mesh_dims))
        return None if axis is None else context.communicator(axis)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Returns the torch ProcessGroup along a dim.

        Raises:
            RuntimeError: ranks have no process groups (they are threads, or are played): use `communicator`.
        """
        backend = _context().backend
        group = backend.process_group(self.communicator(mesh_dim))
        if isinstance(group, Communicator):
            raise RuntimeError(
                f"{self} has no process group on the backend {backend.name}: pass mesh.communicator({mesh_dim!r}) to a "
                "verb of neuronx_dist.comm, or to a differentiable operator of neuronx_dist.spmd"
            )
        return group

    def get_all_groups(self) -> list[Any]:
        """Returns the torch ProcessGroup along each dim; errors are those of `get_group`."""
        return [self.get_group(m) for m in range(self.ndim)]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceMesh) or not isinstance(other, TorchMesh):
            return self is other
        return bool(self.to_torch() == other)

    __hash__ = object.__hash__

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Returns this rank's part of the mesh along some of its dims; one name may be that of a `_flatten`."""
        chosen = (names,) if isinstance(names, str) else tuple(names)
        if len(chosen) == 1 and chosen[0] not in (self.mesh_dim_names or ()):
            for merged in _context().extras.get(_FLATTENED, {}).get(chosen[0], ()):
                if {*merged} <= {*(self.mesh_dim_names or ())}:
                    return self[merged]._flatten(chosen[0])
        dims = [self._index(name) for name in chosen]
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {_context().rank} is not in {self}")
        index = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(self.ndim))
        sorted_dims = sorted(dims)
        with with_values():
            ranks = self.mesh[index].permute([sorted_dims.index(dim) for dim in dims])
        result = _interned(self.device_type, ranks, chosen, [self.communicator(dim) for dim in dims])
        if result is not self:
            result.tables.setdefault("part of", (self, chosen))
        return result

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:  # type: ignore[override]
        """Returns the mesh with its dims merged into one, row-major, so that `mesh[mesh_dim_name]` is it from now on.

        Args:
            mesh_dim_name: None: the names of the dims, as "dp_cp".

        Raises:
            ValueError: the dims have no names.
        """
        if self.mesh_dim_names is None:
            raise ValueError(f"{self}: _flatten needs mesh_dim_names")
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        merged = _context().extras.setdefault(_FLATTENED, {}).setdefault(name, [])
        if self.mesh_dim_names not in merged:
            merged.insert(0, self.mesh_dim_names)
        with with_values():
            ranks = self.mesh.flatten()
        return _interned(self.device_type, ranks, (name,))

    def _unflatten(  # type: ignore[override]
        self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Returns the mesh with one dim as several, row-major.

        Raises:
            ValueError: the sizes do not make up the dim, or are not as many as the names; the dims have no names.
        """
        dim, sizes = self._index(dim), tuple(mesh_sizes)
        if self.mesh_dim_names is None or len(sizes) != len(mesh_dim_names) or prod(sizes) != self.shape[dim]:
            raise ValueError(
                f"{self}: _unflatten needs mesh_dim_names, and sizes whose product is {self.shape[dim]}, one for each "
                f"new name; sizes are {sizes}, names {tuple(mesh_dim_names)}"
            )
        names = (*self.mesh_dim_names[:dim], *mesh_dim_names, *self.mesh_dim_names[dim + 1 :])
        with with_values():
            ranks = self.mesh.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        known = self.communicators
        groups = None if known is None else [*known[:dim], *[None] * len(sizes), *known[dim + 1 :]]
        return _interned(self.device_type, ranks, names, groups)

    def _index(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(f"{self} has {self.ndim} dims: pass mesh_dim, an index or a name")
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise ValueError(f"{self} has no dim {mesh_dim!r}; its dims are {self.mesh_dim_names}")
            return (self.mesh_dim_names or ()).index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise ValueError(f"{self} has no dim {mesh_dim}")
        return mesh_dim % self.ndim

    def __enter__(self) -> DeviceMesh:
        _local.__dict__.setdefault("stack", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _local.stack.pop()

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{names})"

    def __deepcopy__(self, memo: Any) -> DeviceMesh:
        return self

    def __reduce__(self) -> Any:
        return rebuilt, (self.device_type, self.mesh.tolist(), self.mesh_dim_names)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Makes a mesh over all ranks of the job, row-major; one size may be -1, computed from the number of ranks.

    Raises:
        ValueError: the sizes do not make up the job's number of ranks.
    """
    world = _context().mesh.world_size
    shape = list(mesh_shape)
    known = prod(size for size in shape if size != -1)
    if shape.count(-1) == 1 and known > 0 and world % known == 0:
        shape[shape.index(-1)] = world // known
    if prod(shape) != world or min(shape, default=0) < 1:
        raise ValueError(
            f"init_device_mesh: a mesh of shape {tuple(mesh_shape)} does not fit {world} ranks: the product of the "
            "sizes must equal the number of ranks; one size may be -1 if the product of the others divides that "
            "number"
        )
    with with_values():
        ranks = torch.arange(world, device="cpu").view(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)


def as_mesh(mesh: Any, device_type: str = "cpu") -> DeviceMesh:
    """Returns torch's mesh as one of this package; None: `current_mesh`."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    return current_mesh(device_type) if mesh is None else DeviceMesh.from_torch(mesh)


def current_mesh(device_type: str = "cpu") -> DeviceMesh:
    """Returns the mesh of the innermost `with mesh:`, else of the job's axes, else one dim over all ranks of the job.

    Axes of one rank are left out; where one axis has all ranks, the dim has no name, as that of `init_device_mesh`.
    """
    stack: list[DeviceMesh] | None = getattr(_local, "stack", None)
    if stack:
        return stack[-1]
    mesh = _context().mesh
    axes = tuple(axis for axis in DENSE_AXES if mesh.size(axis) > 1)
    if len(axes) > 1:
        return DeviceMesh.from_axes(axes, device_type=device_type)
    return DeviceMesh(device_type, list(range(mesh.world_size)))


def group_over(first: DeviceMesh, second: DeviceMesh) -> Communicator | None:
    """Returns the group of all ranks of two meshes; None on a rank outside. Created once, by all ranks of the job."""
    context = _context()
    ranks = sorted({*first.mesh.flatten().tolist(), *second.mesh.flatten().tolist()})
    for mesh in (first, second):
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            return None if mesh.communicators is None else mesh.communicators[0]
    table = context.extras.setdefault(f"{_TABLE}: groups", {})
    key = tuple(ranks)
    if key not in table:
        axis = context.mesh.axis_of(ranks)
        group = context.new_group([ranks], "ranks of two meshes") if axis is None else context.communicator(axis)
        table[key] = group if context.rank in ranks else None
    result: Communicator | None = table[key]
    return result


def rebuilt(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def _context() -> Context:
    """Returns the current context; a job without one becomes a mesh of data-parallel ranks."""
    if not comm.is_initialized():
        world_size, _ = launch.world()
        launch.connect(Mesh(world_size), lazy=True)
    return comm.current()


@contextmanager
def with_values() -> Iterator[None]:
    """Lets tensors, such as numbers of ranks, have values and no types inside, also in a check."""
    with no_typecheck(), unset_fake_temporarily():
        yield


def _interned(
    device_type: str,
    ranks: torch.Tensor,
    names: tuple[str, ...] | None,
    groups: Sequence[Axis | Communicator | None] | None = None,
) -> DeviceMesh:
    """Returns the one mesh of these ranks and names in this context. `groups`: along each dim, if known."""
    wrappers.watch_wrappers()
    context = _context()
    with with_values():
        return _known(context, device_type, ranks, names, groups)


def _known(
    context: Context,
    device_type: str,
    ranks: torch.Tensor,
    names: tuple[str, ...] | None,
    groups: Sequence[Axis | Communicator | None] | None,
) -> DeviceMesh:
    if ranks.ndim == 0:
        ranks = ranks.view(1)
    numbers = tuple(ranks.flatten().tolist())
    if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(context.mesh.world_size)):
        raise ValueError(
            f"DeviceMesh: ranks {ranks.tolist()} must be distinct and below the world size {context.mesh.world_size}"
        )
    if names is not None and (len(names) != ranks.ndim or len(set(names)) != len(names)):
        raise ValueError(f"DeviceMesh: mesh_dim_names {names} must be {ranks.ndim} distinct names, one for each dim")
    table = context.extras.setdefault(_TABLE, {})
    key = (device_type, numbers, tuple(ranks.shape), names)
    mesh: DeviceMesh | None = table.get(key)
    rank = concrete(context.rank)
    if mesh is not None and mesh._of_rank == rank:
        return mesh
    if mesh is None:
        mesh = object.__new__(DeviceMesh)
        mesh.device_type, mesh.mesh_dim_names, mesh.mesh = device_type, names, ranks
        mesh.shape, mesh.ndim = tuple(ranks.shape), ranks.ndim
    # A check plays another rank with what one has made: groups, plans and layouts are those of the rank that asks.
    mesh._of_rank, mesh.plans, mesh.tables = rank, Bounded(), {}
    along = [
        _group(context, ranks, dim, names) if group is None else group
        for dim, group in enumerate(groups or [None] * ranks.ndim)
    ]
    members = [context.communicator(group) for group in along if group is not None]
    mesh.communicators = tuple(members) if len(members) == ranks.ndim else None
    table[key] = mesh
    return mesh


def _group(
    context: Context, ranks: torch.Tensor, dim: int, names: tuple[str, ...] | None
) -> Axis | Communicator | None:
    """Returns the group along a dim: an axis of the context's mesh that has these groups, else a new group."""
    rows = _rows(ranks, (dim,))
    local_row = next((row for row in rows if context.rank in row), None)
    axis = _axis_of(context, rows)
    if axis is not None:
        return axis
    label = f"{names[dim] if names else f'mesh dim {dim}'}"
    group = context.new_group(rows, label)
    return group if local_row is not None else None


def _rows(ranks: torch.Tensor, dims: tuple[int, ...]) -> list[list[int]]:
    """Returns the ranks of each group along some dims."""
    count = prod(ranks.shape[dim] for dim in dims)
    rows: list[list[int]] = ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, count).tolist()
    return rows


def _axis_of(context: Context, rows: list[list[int]]) -> Axis | None:
    """Returns the axis of the context's mesh whose groups are these."""
    axis = context.mesh.axis_of(rows[0])
    everybody = len(rows) * len(rows[0]) == context.mesh.world_size
    if axis is not None and everybody and all(list(context.mesh.group_of(axis, row[0])) == row for row in rows):
        return axis
    return None
