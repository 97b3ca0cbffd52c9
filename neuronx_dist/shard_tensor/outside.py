"""Functions of ShardTensors on a rank outside of their mesh, which has an empty part: they do nothing there.

The handler plans as on the other ranks, so that results have their layouts, and computes on nothing. A function for
which nothing is too little (a sum over ranks, values of rows) is refused by name.
"""

from __future__ import annotations

from typing import Any

from ..torch_internals.tensors import pytree
from .handlers import FUNCTIONS
from .moves.exchange import linked
from .tensor import OutsideShardTensor, ShardTensor, wrap

__all__: list[str] = []


def outside_of_mesh(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` of empty parts.

    Raises:
        RuntimeError: the function needs values of the other ranks.
    """
    try:
        result = ShardTensor.__torch_function__(func, types, args, kwargs)
    except (IndexError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and " is not in DeviceMesh" not in str(error):
            raise
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ShardTensor)]
        mesh = operands[0].device_mesh
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} of a ShardTensor: rank {mesh.get_rank()} is not in {mesh}, so "
            "it has no values of it: call this function on the ranks of the mesh alone, where "
            "mesh.get_coordinate() is not None"
        ) from error
    return pytree.tree_map(_with_empty_part, result)


def _with_empty_part(y: Any) -> Any:
    if not isinstance(y, ShardTensor) or y._local.shape == y._spec.local_shape:
        return y
    return wrap(linked(y._local.new_empty(y._spec.local_shape), y._local), y._spec)


FUNCTIONS[OutsideShardTensor.__torch_function__] = outside_of_mesh
