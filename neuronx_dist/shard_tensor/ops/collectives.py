"""Collectives of torch.distributed that are called on a ShardTensor.

Those that compute element by element are computed on this rank's part, if all ranks of the group have the same part: a
sum of gradients over data-parallel ranks, with parameters on a mesh dim of other ranks. All others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ... import comm
from ..handlers import sharded
from ..placements import Replicate
from ..spec import ShardTensorSpec

__all__: list[str] = []


_ELEMENTWISE = ("all_reduce", "broadcast", "reduce")


@sharded(*(getattr(dist, name) for name in _ELEMENTWISE))
def on_equal_parts(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Calls the collective on this rank's part, in place.

    Raises:
        ValueError: ranks of the group hold different parts, or summands.
    """
    x, *others = args or (kwargs.pop("tensor"),)
    group = kwargs.get("group")
    _check_parts(func.__name__, x._spec, comm.communicator("world" if group is None else group).ranks)
    return func(x._local.detach(), *others, **kwargs)


def _check_parts(name: str, spec: ShardTensorSpec, ranks: tuple[int, ...]) -> None:
    for m, placement in enumerate(spec.placements):
        different = {*spec.mesh.communicator(m).ranks} & {*ranks}
        if len(different) > 1 and not isinstance(placement, Replicate):
            raise ValueError(
                f"{name} over ranks {[*ranks]}: ranks {sorted(different)} of these hold different parts of a "
                f"ShardTensor of shape {tuple(spec.shape)}, which is {placement!r} over them. x.redistribute() and "
                "x.full_tensor() communicate by the layout; x.to_local() is this rank's part as a plain tensor"
            )
