"""Names that PhysicsNeMo's handlers use: errors, shapes of shards, arguments for each dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..device_mesh import DeviceMesh
from ..placements import Placement, Shard
from ..spec import make_spec
from .primitives import compute_split_shapes

__all__ = [
    "MissingShardPatch",
    "UndeterminedShardingError",
    "compute_sharding_shapes_from_chunking_global_shape",
    "promote_to_iterable",
    "register_custom_ops",
]


class UndeterminedShardingError(Exception):
    """The layouts of a handler's operands do not say that of its result."""


class MissingShardPatch(NotImplementedError):
    """A handler does not compute its function for this layout."""


def compute_sharding_shapes_from_chunking_global_shape(
    mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int]
) -> dict[int, list[tuple[int, ...]]]:
    """Returns for each mesh dim the shapes of all its shards, for `from_local(sharding_shapes=)`.

    Raises:
        ValueError: there is not a placement for each mesh dim.
    """
    along = [
        tuple(compute_split_shapes(global_shape[p.dim], mesh.shape[m]))
        if isinstance(p, Shard) and placements.count(p) == 1
        else None
        for m, p in enumerate(placements[: mesh.ndim])
    ]
    shapes = make_spec(mesh, placements, global_shape, along).sharding_shapes()
    return {m: [tuple(shape) for shape in along_dim] for m, along_dim in shapes.items()}


def promote_to_iterable(input_obj: Any, target_iterable: Any) -> Any:
    """Repeats a value as often as `target_iterable` is long, in a container of its type; an iterable is returned.

    Raises:
        ValueError: an iterable of another length.
    """
    if isinstance(input_obj, str):
        return input_obj
    if not isinstance(input_obj, Iterable):
        return type(target_iterable)([input_obj] * len(target_iterable))
    if len(input_obj) != len(target_iterable):  # type: ignore[arg-type]
        raise ValueError(f"promote_to_iterable: {input_obj} must have {len(target_iterable)} entries")
    return input_obj


def register_custom_ops() -> None:
    """Does nothing: handlers are registered when `neuronx_dist.shard_tensor` is imported, on every device."""
