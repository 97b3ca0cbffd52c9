"""Functions of local tensors on ShardTensors, by the names of `torch.distributed.tensor.experimental`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from math import prod
from typing import Any

import torch

from ..torch_internals.tensors import pytree
from .device_mesh import DeviceMesh, as_mesh
from .handlers import promotion_mode
from .placements import Placement, Shard
from .spec import make_spec
from .tensor import ShardTensor

__all__ = ["implicit_replication", "local_map"]

Placements = Sequence[Placement] | None


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Lets plain tensors that meet a ShardTensor count as Replicate, as they do unless `promotion_mode` was changed."""
    with promotion_mode("silent"):
        yield


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Returns a function of ShardTensors that calls `func` with this rank's parts; without `func`, a decorator.

    Called without any ShardTensor, it is `func`. On a mesh dim where the first ShardTensor among the arguments that is
    sharded has parts of different sizes, a result that is sharded has parts of these sizes; elsewhere of equal ones.

    Args:
        out_placements: of the result; of several, a tuple with those of each, None for what is no tensor.
        in_placements: for each argument, those that a ShardTensor must have; None: any, or an argument that is none.
        in_grad_placements: for each argument, what its gradient is; see `ShardTensor.to_local`.
        device_mesh: of the results; None: that of the first ShardTensor.
        redistribute_inputs: whether a ShardTensor with other placements is redistributed; else it is refused.

    Raises:
        ValueError: a ShardTensor has other placements; a result has a size that its placements do not allow, or
            placements but is no tensor.
    """
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten(args)
        for name, placements in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
            if placements is not None and len(placements) != len(flat):
                raise ValueError(f"local_map: {name} has {len(placements)} entries for {len(flat)} arguments")
        sharded = []
        for i, x in enumerate(flat):
            if isinstance(x, ShardTensor):
                x = _placed(x, i, None if in_placements is None else in_placements[i], redistribute_inputs)
                sharded.append(x)
                flat[i] = x.to_local(grad_placements=None if in_grad_placements is None else in_grad_placements[i])
        result = func(*pytree.tree_unflatten(flat, structure), **kwargs)
        if not sharded:
            return result
        outputs, structure = pytree.tree_flatten(result)
        all_placements = out_placements if isinstance(out_placements, tuple) else (out_placements,)
        if len(outputs) != len(all_placements):
            raise ValueError(f"local_map: {len(outputs)} results, but out_placements={out_placements}")
        mesh = as_mesh(device_mesh or sharded[0].device_mesh)
        wrapped = [_wrapped(y, mesh, placements, sharded) for y, placements in zip(outputs, all_placements)]
        return pytree.tree_unflatten(wrapped, structure)

    return mapped


def _placed(x: ShardTensor, i: int, placements: Placements, redistribute: bool) -> ShardTensor:
    if placements is None:
        return x
    target = make_spec(x.device_mesh, placements, x.shape)
    if x.placements == target.placements:
        return x
    if not redistribute:
        raise ValueError(
            f"local_map: argument {i} is {list(x.placements)}, and in_placements has {list(target.placements)}: "
            "redistribute() it, or pass redistribute_inputs=True"
        )
    return x.redistribute(placements=placements)


def _wrapped(y: Any, mesh: DeviceMesh, placements: Placements, inputs: Sequence[ShardTensor]) -> Any:
    if placements is None and not isinstance(y, torch.Tensor):
        return y
    if placements is None or not isinstance(y, torch.Tensor):
        raise ValueError(f"local_map: a result of type {type(y).__name__} has out_placements {placements}")
    shapes = {}
    for m, placement in enumerate(placements):
        if isinstance(placement, Shard):
            specs = [x._spec for x in inputs if x._spec.mesh is mesh and x._spec.sizes[m] is not None]
            dim = placement.dim % y.dim()
            sizes = (specs[0].sizes[m] if specs else None) or ()
            if len(set(sizes)) < 2:
                sizes = (y.shape[dim],) * prod(mesh.shape[k] for k, p in enumerate(placements) if p == placement)
            shapes[m] = [(*y.shape[:dim], size, *y.shape[dim + 1 :]) for size in sizes]
    return ShardTensor.from_local(y, mesh, placements, sharding_shapes=shapes)
