"""Fourier transforms over several dims, of which some are sharded: one dim after the other (pencil decomposition).

A transform along a sharded dim moves the shards to another dim, by one exchange; so dims that are not sharded are
transformed first. The shards move to the longest of these that has a position for each rank: not to channels, which a
Fourier neural operator sums over next. Without such a dim they move where `free_labels.py` takes them. The result stays
sharded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..fallback import by_gathering
from ..handlers import sharded
from ..placements import Shard
from ..tensor import ShardTensor

__all__: list[str] = []

_fft = torch.fft
# Function over several dims: the function of its last dim, that of the others, and whether the last dim comes last.
_ONE_DIM: dict[Callable[..., Any], tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    _fft.fft2: (_fft.fft, _fft.fft, False),
    _fft.fftn: (_fft.fft, _fft.fft, False),
    _fft.ifft2: (_fft.ifft, _fft.ifft, False),
    _fft.ifftn: (_fft.ifft, _fft.ifft, False),
    _fft.rfft2: (_fft.rfft, _fft.fft, False),
    _fft.rfftn: (_fft.rfft, _fft.fft, False),
    _fft.irfft2: (_fft.irfft, _fft.ifft, True),
    _fft.irfftn: (_fft.irfft, _fft.ifft, True),
    _fft.hfft2: (_fft.hfft, _fft.fft, True),
    _fft.hfftn: (_fft.hfft, _fft.fft, True),
    _fft.ihfft2: (_fft.ihfft, _fft.ifft, False),
    _fft.ihfftn: (_fft.ihfft, _fft.ifft, False),
}


@sharded(*_ONE_DIM)
def transformed(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, s: Any = None, dim: Any = (-2, -1) if "2" in func.__name__ else None, norm: Any = None) -> Any:
        sizes = None if s is None else [s] if isinstance(s, int) else list(s)
        last = range(-len(sizes), 0) if sizes is not None else range(input.dim())
        dims: Sequence[int] = last if dim is None else [dim] if isinstance(dim, int) else list(dim)
        func(torch.empty(input.shape, dtype=input.dtype, device="meta"), s=s, dim=dim, norm=norm)  # torch's errors
        if not isinstance(input, ShardTensor) or not any(d % input.dim() in input._spec.mesh_dim_of for d in dims):
            return by_gathering(func, types, args, kwargs)
        of_last, of_others, comes_last = _ONE_DIM[func]
        *others, end = zip(dims, sizes or [-1] * len(dims))
        steps = [(of_others, *one) for one in others]
        if of_last is of_others:
            steps.append((of_others, *end))
        steps.sort(key=lambda step: step[1] % input.dim() in input._spec.mesh_dim_of)
        if of_last is not of_others:
            steps.insert(len(steps) if comes_last else 0, (of_last, *end))
        done: list[int] = []
        for function, d, size in steps:
            input = function(_along_another(input, d % input.dim(), done), None if size == -1 else size, d, norm)
            done.append(d % input.dim())
        return input

    return by_gathering(func, types, args, kwargs) if "out" in kwargs else call(*args, **kwargs)


def _along_another(x: ShardTensor, dim: int, transformed_dims: Sequence[int]) -> ShardTensor:
    """Moves the shards of `dim` to the longest of the transformed dims that is not sharded, if there is one."""
    m = x._spec.mesh_dim_of.get(dim)
    if m is None:
        return x
    ranks = x._spec.mesh.shape[m]
    fit = [d for d in transformed_dims if d not in x._spec.mesh_dim_of and x.shape[d] >= ranks]
    if not fit:
        return x
    placements = list(x.placements)
    placements[m] = Shard(max(fit, key=lambda d: x.shape[d]))
    sizes = [None if p == Shard(dim) else along for p, along in zip(x.placements, x._spec.sizes)]
    return x.redistribute(placements=placements, sizes=sizes)
