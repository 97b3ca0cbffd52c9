"""The first types of tensors: of parameters by their layout, of inputs by their share of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...gradients.gradient import DATA_AXES
from ...mesh import DENSE_AXES, Mesh
from ...spmd.axes import atoms_of, mesh_atoms
from ...spmd.declarations import SHARD_OF, types_by_atom
from ...spmd.tensor_type import TensorType, type_of, without_shards
from ...spmd.types import I, R, Shard, SpmdType, V, scaled
from ...weights.shard_spec import spec_of

__all__ = ["input_type", "parameter_type"]


def parameter_type(param: torch.Tensor, mesh: Mesh, holders: Any = None, level: str = "G") -> TensorType:
    """The type of a parameter, from its layout (`spec_of`).

    On the axis over which it is sharded: S(dim), or V at level L. Else on tp (on the part of tp that holds copies of
    each shard): I, or R if its gradient is a partial sum on every rank (`sequence_parallel`). On dp and cp, whose ranks
    use it on other data: R. On pp: V, since stages have other parameters, or R if several hold it (`holders`).
    """
    origin = param.__dict__.get(SHARD_OF)
    if origin is not None:
        full, group = origin
        base = type_of(full) or parameter_type(full, mesh, holders, level)
        kinds = {axis: V if isinstance(spmd_type, Shard) else spmd_type for axis, spmd_type in base}
        return TensorType.of({**kinds, **dict.fromkeys(atoms_of(group, mesh), V)}, base.rest)
    spec = spec_of(param)
    types: dict[str, SpmdType] = {}
    table = mesh_atoms(mesh)
    for axis in ("dp", "cp"):
        types.update(dict.fromkeys(table[axis], R))
    types.update(dict.fromkeys(table["tp"], R if spec.sequence_parallel else I))
    types.update(dict.fromkeys(table["pp"], V if holders is None else R))
    if getattr(param, "expert_model_parallel", False):
        types.update(dict.fromkeys(table["ep"], V))
    if spec.axis is not None and spec.dim is not None:
        spmd_type: SpmdType = Shard(spec.dim, spec.stride) if level == "G" else V
        types.update(dict.fromkeys(atoms_of(spec.axis, mesh), spmd_type))
    return TensorType.of(types)


def input_type(
    x: torch.Tensor, mesh: Mesh, types: Mapping[Any, SpmdType] | None = None, level: str = "G", share: bool = False
) -> TensorType:
    """The type of an input of the model: sharded on dim 0 over dp and equal elsewhere, unless `types` says otherwise.

    0-dim tensors are equal everywhere; with `share` the input is a count divided by the number of ranks over dp, cp.
    """
    spmd_types: dict[str, SpmdType] = dict.fromkeys(atoms_of(DENSE_AXES, mesh), R)
    if x.dim():
        spmd_types.update(dict.fromkeys(mesh_atoms(mesh)["dp"], Shard(0)))
    elif share:
        spmd_types.update(dict.fromkeys(atoms_of(DATA_AXES, mesh), scaled(R, -1)))
    if not x.dim():  # a declaration for all inputs means the ones with dims
        types = {axis: spmd_type for axis, spmd_type in (types or {}).items() if not isinstance(spmd_type, Shard)}
    spmd_types.update(types_by_atom(types or {}, mesh, x.shape, level))
    type_ = TensorType.of(spmd_types)
    return type_ if level == "G" else without_shards(type_)
