"""NxD's plain functions below its mappings, for autograd functions that scripts write: no gradient is communicated.

The mappings (`scatter_to_...`, `gather_from_...`) are these with their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import comm
from . import comm as plain
from .utils import split_tensor_along_dim

__all__ = ["nonzero_partition_dim_swap"]


def nonzero_partition_dim_swap(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a function of a tensor and dim 0 take any dim, which is exchanged with dim 0 before and after."""

    @functools.wraps(function)
    def swapped(x: torch.Tensor, partition_dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(x.transpose(0, partition_dim), 0, *args, **kwargs).transpose(0, partition_dim)

    return swapped


def _reduce(input_: torch.Tensor, computation: Any = "sum", process_group: Any = None) -> torch.Tensor:
    return plain.all_reduce(computation, input_, process_group or "tp")[0]


def _split_along_dim(input_: torch.Tensor, partition_dim: int, process_group: Any = None) -> torch.Tensor:
    group = comm.communicator(process_group or "tp")
    return split_tensor_along_dim(input_, partition_dim, group.size)[group.rank].contiguous()


def _split_along_first_dim(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    return _split_along_dim(input_, 0, process_group)


def _split_along_last_dim(input_: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    return _split_along_dim(input_, input_.dim() - 1, process_group)


def _gather_along_dim(
    x: torch.Tensor, partition_dim: int, process_group: Any = None, tile_cc: bool = False
) -> torch.Tensor:
    return plain.all_gather(x, partition_dim, process_group or "tp")


def _gather_along_first_dim(x: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    return _gather_along_dim(x, 0, process_group)


def _gather_along_last_dim(x: torch.Tensor, process_group: Any = None) -> torch.Tensor:
    return _gather_along_dim(x, x.dim() - 1, process_group)


def _reduce_scatter_along_dim(
    x: torch.Tensor,
    partition_dim: int,
    computation: Any = "sum",
    process_group: Any = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    summed = x if dtype is None else x.to(dtype)
    return plain.reduce_scatter(computation, summed, scatter_dim=partition_dim, groups=process_group or "tp").to(
        x.dtype
    )


def _reduce_scatter_along_first_dim(
    x: torch.Tensor, computation: Any = "sum", process_group: Any = None
) -> torch.Tensor:
    return _reduce_scatter_along_dim(x, 0, computation, process_group)


def _reduce_scatter_along_last_dim(
    x: torch.Tensor, computation: Any = "sum", process_group: Any = None
) -> torch.Tensor:
    return _reduce_scatter_along_dim(x, x.dim() - 1, computation, process_group)
