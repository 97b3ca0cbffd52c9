"""NxD's plain collectives, by the arguments of torch_xla's: each is a verb of `neuronx_dist.comm`, without a gradient.

`groups` is an axis ("tp"), a process group, or the replica groups of one axis as lists of ranks, as
`get_tensor_model_parallel_replica_groups()` returns them; None: all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import comm

__all__ = ["all_gather", "all_reduce", "cpu_reduce_scatter", "gloo_reduce_scatter", "reduce_scatter"]

_AXES = ("tp", "dp", "cp", "pp", "ep", "edp", ("dp", "cp"))


def _axis(groups: Any) -> Any:
    """Returns the axis of replica groups.

    Raises:
        ValueError: lists of ranks that are not the groups of an axis.
    """
    if groups is None:
        return "world"
    if not isinstance(groups, (list, tuple)) or groups and isinstance(groups[0], str):
        return groups
    mesh, ranks = comm.current().mesh, sorted(sorted(group) for group in groups)
    for axis in (*_AXES, "world"):
        if sorted(sorted(group) for group in mesh.groups(axis)) == ranks:
            return axis
    raise ValueError(
        f"groups {ranks[:4]} are not the replica groups of an axis of {mesh}: pass an axis, a process group, or make a "
        "communicator by comm.new_group(groups, name) on all ranks"
    )


def _operation(reduce_type: Any) -> str:
    """Returns "sum", "max" or "min", for torch_xla's words and torch's `ReduceOp`."""
    return str(reduce_type).rpartition(".")[2].lower()


def all_reduce(
    op_type: Any, tensor_bucket: torch.Tensor | Sequence[torch.Tensor], groups: Any, pin_layout: bool = True
) -> list[torch.Tensor]:
    """Sums tensors over the ranks, in place, and returns them as a list."""
    tensors = [tensor_bucket] if isinstance(tensor_bucket, torch.Tensor) else list(tensor_bucket)
    return [comm.all_reduce(x, _axis(groups), op=_operation(op_type), out=x) for x in tensors]


def all_gather(
    input: torch.Tensor, dim: int = 0, groups: Any = None, output: torch.Tensor | None = None, pin_layout: bool = True
) -> torch.Tensor:
    """Returns every rank's tensor, one behind the other along `dim`."""
    result: torch.Tensor = comm.all_gather(input, _axis(groups), dim=dim)
    return result if output is None else output.copy_(result)


def reduce_scatter(
    reduce_type: Any,
    input: torch.Tensor,
    scale: float = 1,
    scatter_dim: int = 0,
    shard_count: int | None = None,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Returns this rank's piece along `scatter_dim` of the sum over the ranks, times `scale`.

    Raises:
        ValueError: `shard_count` is not the number of ranks.
    """
    axis = _axis(groups)
    if shard_count not in (None, comm.size(axis)):
        raise ValueError(f"reduce_scatter: shard_count {shard_count} is not the number of ranks, {comm.size(axis)}")
    result = comm.reduce_scatter(input, axis, dim=scatter_dim, op=_operation(reduce_type))
    result = result if scale == 1 else result * scale
    return result if output is None else output.copy_(result)


cpu_reduce_scatter = reduce_scatter


def gloo_reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: Any = None, async_op: bool = False
) -> torch.Tensor:
    """Writes this rank's piece along dim 0 of the sum over the ranks into `output`."""
    return reduce_scatter(op, input, groups=group, output=output)
