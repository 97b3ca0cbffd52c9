"""Fused optimizer steps and gradient unscaling: element by element on lists of tensors, in place.

A step is each rank's own: a parameter's gradient and state have its layout. Whether a gradient is not finite is known
to all ranks that share a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import comm
from ...torch_internals.tensors import amp_unscale_, fused_updates
from ..handlers import sharded
from ..moves.redistribute import check_is_no_copy
from ..tensor import ShardTensor

__all__: list[str] = []


@sharded(*fused_updates)
def fused_step(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    params = args[0]
    for param in params:
        if isinstance(param, ShardTensor):
            check_is_no_copy(func.__name__, param._local)

    def locals_of(column: Any) -> Any:
        if not isinstance(column, (list, tuple)):
            return column
        return [_like(x, param) for x, param in zip(column, params)]

    arguments = [locals_of(arg) for arg in args]
    return func(*arguments, **kwargs)


def _like(x: Any, param: torch.Tensor) -> Any:
    """Returns this rank's part of a gradient or of state, in the layout of its parameter; step counters are plain."""
    if not isinstance(x, ShardTensor):
        return x
    if not isinstance(param, ShardTensor):
        return x.full_tensor()
    if x._spec is not param._spec and x.shape == param.shape:
        raise ValueError(
            f"fused optimizer step: a parameter is {param._spec.placements}, but its gradient or state is "
            f"{x._spec.placements}: create the optimizer after distributing the parameters"
        )
    return x._local


@sharded(amp_unscale_)
def unscale(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> None:
    """Divides gradients by the loss scale; `found_inf` becomes 1 on all ranks if a shard of any is not finite."""
    grads, found_inf, inv_scale = args
    func([x._local if isinstance(x, ShardTensor) else x for x in grads], found_inf, inv_scale)
    meshes = {x._spec.mesh for x in grads if isinstance(x, ShardTensor)}
    for mesh in sorted(meshes, key=repr):
        for m in range(mesh.ndim):
            found_inf.copy_(comm.all_reduce(found_inf, mesh.communicator(m), op="max"))
