"""as_strided: positions in the flattened tensor, each from its owner. Memory is that of the contiguous whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..moves.redistribute import mark_as_copy
from ..spec import make_spec
from ..tensor import ShardTensor, wrap

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
        if not input._spec.sharded or input._spec.partial:
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        flat = input.reshape(-1)
        result = flat[_positions(flat, size, stride, storage_offset)].reshape(tuple(size))
        if func is not torch.as_strided_copy:
            mark_as_copy(result._local, input._local)
        return result

    return call(*args, **kwargs)
