"""Fourier transforms over two dims of plain tensors in shards, under PhysicsNeMo's names. One all-to-all each.

The ranks are those of `DistributedManager`'s group "spatial_parallel". `torch.fft` of a ShardTensor needs no such
group, takes shards of any sizes, and has 1 to 3 dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..moves.one_dim import transpose
from .primitives import compute_split_shapes, named

__all__ = ["DistributedIRFFT2", "DistributedRFFT2"]

_GROUP = "spatial_parallel"


class DistributedRFFT2:
    """`torch.fft.rfft2`: the input is in equal shards of dim[1], the result in shards of dim[0]."""

    @staticmethod
    def apply(x: torch.Tensor, s: Sequence[int | None] | None, dim: Sequence[int], norm: str = "ortho") -> torch.Tensor:
        """Returns this rank's rows: `[.., h, w/ranks] -> [.., h/ranks, w//2 + 1]`.

        Args:
            s: the sizes of the two dims that are transformed; None: of the tensor.
        """
        h, w = s or (None, None)
        spectrum = _moved(torch.fft.fft(x, n=h, dim=dim[0], norm=norm), dim[1], dim[0])
        spectrum = torch.fft.fft(spectrum, n=w, dim=dim[1], norm=norm)
        return spectrum.narrow(dim[1], 0, spectrum.shape[dim[1]] // 2 + 1)


class DistributedIRFFT2:
    """`torch.fft.irfft2`: the input is in equal shards of dim[0], the result in shards of dim[1]."""

    @staticmethod
    def apply(x: torch.Tensor, s: Sequence[int | None] | None, dim: Sequence[int], norm: str = "ortho") -> torch.Tensor:
        """Returns this rank's columns: `[.., h/ranks, w//2 + 1] -> [.., h, w/ranks]`.

        The half that the symmetry adds is twice the real part of the other one.

        Args:
            s: the sizes of the result; None: the second is even.
        """
        h, w = s or (None, None)
        width = 2 * (x.shape[dim[1]] - 1) if w is None else w
        half = width // 2 + 1
        x = x.narrow(dim[1], 0, min(half, x.shape[dim[1]]))
        weight = torch.full((x.shape[dim[1]],), 2.0, dtype=x.real.dtype, device=x.device)
        weight[0] = 1.0
        if width % 2 == 0 and x.shape[dim[1]] == half:
            weight[-1] = 1.0
        shape = [1] * x.dim()
        shape[dim[1]] = -1
        y = _moved(torch.fft.ifft(x * weight.view(shape), n=width, dim=dim[1], norm=norm), dim[0], dim[1])
        return torch.fft.ifft(y, n=h, dim=dim[0], norm=norm).real


def _moved(x: torch.Tensor, src: int, dst: int) -> torch.Tensor:
    """Moves equal shards of dim `src` to dim `dst`, cut as `compute_split_shapes` says."""
    communicator = named(_GROUP)
    src, dst = src % x.dim(), dst % x.dim()
    sizes = compute_split_shapes(x.shape[dst], communicator.size)
    return transpose(x, communicator, src, (x.shape[src],) * communicator.size, dst, tuple(sizes))
