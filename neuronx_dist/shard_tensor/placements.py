"""Placements of a tensor along one mesh dim: torch's `Shard`, `Replicate`, `Partial`, and their SPMD types.

| placement | type outside of a handler | type where another operand is sharded | gradient |
| --- | --- | --- | --- |
| `Shard(d)` | S(d) | S(d) | Shard(d), the same sizes |
| `Replicate()` | I | R: `convert(I, R)`, whose backward is the one all-reduce | Replicate, reduced |
| `Partial("sum")` | P | reduced by `all_reduce(P, I)` before what is not linear | Replicate |
| `Partial("avg")` | P("avg") | divided by the number of ranks, and so made a sum | Replicate |
| `Partial("max")` | P("max") | its maximum over the ranks; it is never added | Replicate |
| `Partial("min")`, `Partial("product")` | V | its minimum, or product, over the ranks | Replicate |

`Partial("avg")` counts each rank once, as torch does. So it is the mean over a sharded dim only where all shards have
one size. Of shards of any sizes `ShardTensor.from_local(means, mesh, [Partial("avg")], sharding_shapes=shapes)` makes a
sum, each mean by its share of all elements; the shapes are `x._spec.sharding_shapes()`. The functions of this package
add up what the ranks have, and divide by the global count.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..spmd import I, P, S, SpmdType, V

__all__ = ["Partial", "Placement", "Replicate", "Shard", "checked_placements", "spmd_type"]

_REPLICATE = Replicate()


def spmd_type(placement: Placement) -> SpmdType:
    """Returns the type of a tensor with this placement along one mesh dim.

    Raises:
        ValueError: a placement that has no type.
    """
    if isinstance(placement, Shard):
        return S(placement.dim)
    if isinstance(placement, Replicate):
        return I
    if isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg", "max"):
        return P(placement.reduce_op)
    if isinstance(placement, Partial) and placement.reduce_op in ("min", "product"):
        return V
    raise ValueError(
        f"{placement!r} has no SPMD type: use Shard(dim), Replicate(), or Partial of sum, avg, max, min or product"
    )


def checked_placements(
    placements: Sequence[Placement] | None, mesh_ndim: int, tensor_ndim: int
) -> tuple[Placement, ...]:
    """Returns placements with dims counted from the front; None: replicated along every mesh dim.

    Raises:
        ValueError: not one for each mesh dim; a dim that the tensor does not have.
    """
    if placements is None:
        return (_REPLICATE,) * mesh_ndim
    placements = tuple(placements)
    if len(placements) != mesh_ndim:
        raise ValueError(
            f"placements {list(placements)} has {len(placements)} entries for a mesh of {mesh_ndim} dims; pass one "
            "for each mesh dim"
        )
    result: list[Placement] = []
    for mesh_dim, placement in enumerate(placements):
        spmd_type(placement)
        if isinstance(placement, Shard):
            dim = placement.dim + tensor_ndim if placement.dim < 0 else placement.dim
            if not 0 <= dim < tensor_ndim:
                raise ValueError(
                    f"{placement!r} on mesh dim {mesh_dim} is out of range: the tensor has {tensor_ndim} dims, "
                    f"0 to {tensor_ndim - 1}"
                )
            placement = Shard(dim)
        result.append(placement)
    return tuple(result)
