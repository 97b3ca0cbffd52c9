"""Placements of torch's DTensor as types, and DTensors redistributed by the typed operators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import collectives, types
from .partition_spec import TensorSharding
from .types import I, P, R, S, SpmdType

__all__ = ["dtensor_placement_to_spmd_type", "spmd_redistribute", "spmd_type_to_dtensor_placement"]

_REDUCTIONS = {"sum": "sum", "avg": "avg", "max": "max"}


def dtensor_placement_to_spmd_type(placement: Placement, grad_placement: Placement | None = None) -> SpmdType:
    """Returns the type of a placement.

    Args:
        grad_placement: placement of the gradient: Replicate is R where the gradient is Partial, else I.

    Raises:
        ValueError: there is no such type.
    """
    if isinstance(placement, Replicate):
        return R if isinstance(grad_placement, Partial) else I
    if type(placement) is Shard:
        return S(placement.dim)
    if isinstance(placement, Partial) and placement.reduce_op in _REDUCTIONS:
        return P(_REDUCTIONS[placement.reduce_op])
    raise ValueError(f"no SPMD type has the placement {placement!r}")


def spmd_type_to_dtensor_placement(spmd_type: SpmdType) -> Placement:
    """Returns the placement of a type.

    Raises:
        ValueError: V, whose dim is not known; a shard in blocks; a scale.
    """
    if isinstance(spmd_type, types.Shard) and spmd_type.stride == 1 and not spmd_type.scale:
        return Shard(spmd_type.dim)
    if spmd_type in (R, I):
        return Replicate()
    for reduction in _REDUCTIONS:
        if spmd_type == P(reduction):
            return Partial(reduction)
    raise ValueError(f"{spmd_type} is no placement of DTensor" + (": use S(dim)" if spmd_type.letter == "V" else ""))


def spmd_redistribute(x: DTensor, src: Any, dst: Any) -> DTensor:
    """Returns a DTensor redistributed by the typed operators; the gradient goes back the same way.

    Args:
        src, dst: a TensorSharding, whose other axes are replicated, or a sequence of placements, one for each dim of
            the mesh.

    Raises:
        ValueError: `src` is not the placement of `x`.
    """
    mesh = x.device_mesh
    before, after = _placements(src, mesh, x), _placements(dst, mesh, x)
    if isinstance(src, TensorSharding):  # which cannot say Partial
        wrong = [b != c for b, c in zip(before, x.placements) if not isinstance(c, Partial)]
    else:
        wrong = [b != c for b, c in zip(before, x.placements)]
    if any(wrong):
        raise ValueError(f"spmd_redistribute: the DTensor has the placements {x.placements}, not {src}")
    changed = _changed(before, after)
    if not changed:
        return x
    local = x.to_local()
    if all(len(_axes_on(placement, before, after)) <= 1 for placement in (*before, *after)):
        for index in changed:
            local = _moved(local, mesh, index, before[index], after[index])
    else:  # pieces of pieces: the innermost axis is gathered first, and cut last
        for index in reversed(changed):
            local = _moved(local, mesh, index, before[index], Replicate())
        for index in changed:
            local = _moved(local, mesh, index, Replicate(), after[index])
    return DTensor.from_local(local, mesh, after, run_check=False)


def _moved(local: Any, mesh: Any, index: int, before: Placement, after: Placement) -> Any:
    src, dst = dtensor_placement_to_spmd_type(before), dtensor_placement_to_spmd_type(after)
    return local if src == dst else collectives.redistribute(local, mesh.get_group(index), src=src, dst=dst)


def _placements(sharding: Any, mesh: Any, x: DTensor) -> list[Placement]:
    if all(isinstance(placement, Placement) for placement in sharding) and len(sharding) == mesh.ndim:
        return [Shard(p.dim % x.dim()) if type(p) is Shard else p for p in sharding]
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, names in zip_longest(range(x.dim()), sharding):
        for name in () if names is None else (names,) if isinstance(names, str) else names:
            placements[mesh.mesh_dim_names.index(name)] = Shard(dim)
    return placements


def _axes_on(placement: Placement, before: Sequence[Placement], after: Sequence[Placement]) -> set[int]:
    """Returns the mesh dims that shard the dim of a placement, before or after; none if it is no shard."""
    if type(placement) is not Shard:
        return set()
    return {index for placements in (before, after) for index, other in enumerate(placements) if other == placement}


def _changed(before: Sequence[Placement], after: Sequence[Placement]) -> list[int]:
    """Returns the mesh dims whose placement changes, and those inside of them on one dim, whose pieces change too."""
    changed = [b != a for b, a in zip(before, after)]
    for outer in range(len(before)):
        for inner in range(outer + 1, len(before)):
            shared = {before[outer], after[outer]} & {before[inner], after[inner]}
            changed[inner] |= changed[outer] and any(type(placement) is Shard for placement in shared)
    return [index for index, differs in enumerate(changed) if differs]
