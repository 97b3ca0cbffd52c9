"""as_strided: positions in the flattened tensor, each from its owner.

The memory of a tensor in parts is that of the contiguous whole tensor, of which `x.stride()` are the strides then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..moves.redistribute import mark_as_copy
from ..spec import make_spec
from ..tensor import ShardTensor, gradient_spec, wrap

__all__: list[str] = []

_T = torch.Tensor


def _positions(x: ShardTensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> ShardTensor:
    """Returns the positions of the elements, at least one dim, sharded along the first dim as `x` is along its own."""
    at = torch.tensor(offset or 0, device=x.device)
    for count, step in zip(size, stride, strict=True):
        at = at.unsqueeze(-1) + torch.arange(count, device=x.device) * step
    at = at.reshape(1) if not size else at
    index = wrap(at, make_spec(x._spec.mesh, None, at.shape))
    return index.redistribute(placements=x.placements)


@sharded(torch.as_strided, _T.as_strided, torch.as_strided_copy)
def as_strided(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
        if input._spec.partial:
            input = input.redistribute(placements=gradient_spec(input._spec).placements).contiguous()
        if not input._spec.sharded:
            return FUNCTIONS[UNHANDLED](func, types, (input, size, stride, storage_offset), {})
        flat = input.reshape(-1)
        result = flat[_positions(flat, size, stride, storage_offset)].reshape(tuple(size))
        if func is not torch.as_strided_copy:
            mark_as_copy(result._local, input._local)
        return result

    return call(*args, **kwargs)
