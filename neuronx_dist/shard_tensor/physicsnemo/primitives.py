"""Collectives of tensors in pieces of any sizes, under PhysicsNeMo's names; differentiable, once and more.

All ranks of a group call them with equal `sizes`. `group`: a ProcessGroup or Communicator, None for all ranks; the
mappings take the name of a group of `DistributedManager`. Each is an operator of `spmd` or an exchange of a plan:

| function | as | backward |
| --- | --- | --- |
| `all_gather_v` | `all_gather(S, R)` | `reduce_scatter(P, S)` |
| `gather_v`, `scatter_v`, `indexed_all_to_all_v` | an exchange | the same exchange, the other way |
| `copy_to_parallel_region` | `convert(I, R)` | `all_reduce(P, I)` |
| `reduce_from_parallel_region` | `all_reduce(P, I)` | `convert(I, R)` |
| `scatter_to_parallel_region` | `convert(I, S)` | `all_gather(S, I)` |
| `gather_from_parallel_region` | `all_gather(S, I)` | `convert(I, S)` |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ... import comm, spmd
from ...comm import Communicator
from ...spmd import I, P, R, S
from ..manager import DistributedManager
from ..moves.exchange import exchange
from ..moves.intervals import ExchangePlan, Run, bounds_of
from ..moves.one_dim import split

__all__ = [
    "all_gather_v",
    "all_gather_v_bwd_wrapper",
    "all_gather_v_wrapper",
    "communicator_of",
    "compute_split_shapes",
    "copy_to_parallel_region",
    "gather_from_parallel_region",
    "gather_v",
    "indexed_all_to_all_v",
    "indexed_all_to_all_v_wrapper",
    "named",
    "reduce_from_parallel_region",
    "scatter_to_parallel_region",
    "scatter_v",
    "split_tensor_along_dim",
]


def communicator_of(group: Any) -> Communicator:
    """Returns the communicator of a group; None: of all ranks."""
    return comm.communicator("world" if group is None else group)


def all_gather_v(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, use_fp32: bool = True, group: Any = None
) -> torch.Tensor:
    """Gathers pieces along `dim`, on every rank: `[.., sizes[rank], ..] -> [.., sum(sizes), ..]`.

    Args:
        use_fp32: sum the ranks' gradients in at least fp32.

    Raises:
        ValueError: there is not a size for each rank.
    """
    communicator = communicator_of(group)
    _checked(sizes, communicator, "all_gather_v")
    backward = {"backward_options": {"op_dtype": _sum_dtype(tensor, use_fp32)}}
    return spmd.all_gather(tensor, communicator, src=S(dim), dst=R, split_sizes=tuple(sizes), **backward)  # type: ignore[arg-type]


def all_gather_v_wrapper(
    tensor: torch.Tensor, sizes: Sequence[Any] | None = None, dim: int = 0, group: Any = None
) -> torch.Tensor:
    """Gathers pieces as `all_gather_v`; `sizes` may be shapes, or None: all pieces are of one shape."""
    if sizes is None:
        sizes = [tensor.shape[dim]] * communicator_of(group).size
    sizes = [size if isinstance(size, int) else size[dim] for size in sizes]
    return all_gather_v(tensor, sizes, dim, group=group)


def all_gather_v_bwd_wrapper(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, use_fp32: bool = True, group: Any = None
) -> torch.Tensor:
    """Returns this rank's piece of the sum over the ranks: `[.., sum(sizes), ..] -> [.., sizes[rank], ..]`."""
    communicator = communicator_of(group)
    _checked(sizes, communicator, "all_gather_v_bwd_wrapper")
    options = {"op_dtype": _sum_dtype(tensor, use_fp32), "out_dtype": tensor.dtype, "split_sizes": tuple(sizes)}
    return spmd.reduce_scatter(tensor, communicator, src=P, dst=S(dim), **options)  # type: ignore[arg-type]


def gather_v(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, dst: int = 0, group: Any = None) -> torch.Tensor:
    """Gathers pieces along `dim` on the rank with group index `dst`; on the others the result is zeros.

    Raises:
        ValueError: there is not a size for each rank, or `dst` is none of them.
    """
    communicator = communicator_of(group)
    _checked(sizes, communicator, "gather_v", dst)
    bounds = bounds_of(sizes)
    needs = [[Run(0, 1, bounds[-1])] if rank == dst and bounds[-1] else [] for rank in range(len(sizes))]
    gathered = exchange(tensor, ExchangePlan(bounds, needs), communicator, dim)
    if communicator.rank == dst:
        return gathered
    shape = list(tensor.shape)
    shape[dim] = bounds[-1]
    return torch.cat([gathered, tensor.new_zeros(shape)], dim)


def scatter_v(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, src: int = 0, group: Any = None
) -> torch.Tensor:
    """Returns this rank's piece of the tensor of the rank with group index `src`.

    Args:
        tensor: on the other ranks it determines the other dims, the dtype and the device only; its gradient is 0.

    Raises:
        ValueError: there is not a size for each rank, or `src` is none of them.
    """
    communicator = communicator_of(group)
    _checked(sizes, communicator, "scatter_v", src)
    pieces = bounds_of(sizes)
    bounds = bounds_of([pieces[-1] if rank == src else 0 for rank in range(len(sizes))])
    needs = [[Run(start, 1, stop - start)] if stop > start else [] for start, stop in pairwise(pieces)]
    whole = tensor if communicator.rank == src else tensor.narrow(dim, 0, 0)
    return exchange(whole, ExchangePlan(bounds, needs), communicator, dim)


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    use_fp32: bool = True,
    dim: int = 0,
    group: Any = None,
) -> torch.Tensor:
    """Sends each rank the positions `indices[rank]` of `dim`; returns those received, in the order of the ranks.

    Args:
        indices: for each rank, 1-d, of this rank's tensor; a position may be sent often.
        sizes: `sizes[src][dst]` positions go from `src` to `dst`, on all ranks.
        use_fp32: sum the gradients of a position in at least fp32.

    Raises:
        ValueError: there are not indices and sizes for each rank, or not as many indices as the sizes say.
    """
    communicator = communicator_of(group)
    rank = int(communicator.rank)
    for row in (sizes, *sizes, indices):
        _checked(row, communicator, "indexed_all_to_all_v")
    if [index.numel() for index in indices] != list(sizes[rank]):
        raise ValueError(
            f"indexed_all_to_all_v: indices of lengths {[index.numel() for index in indices]}, but sizes[{rank}] is "
            f"{list(sizes[rank])}"
        )
    dtype = _sum_dtype(tensor, use_fp32)
    sent = tensor.to(dtype).index_select(dim, torch.cat(list(indices))).to(tensor.dtype)
    bounds = bounds_of(sum(row) for row in sizes)
    starts = [list(accumulate(row, initial=first)) for row, first in zip(sizes, bounds)]
    needs = [
        [Run(row[dst], 1, count[dst]) for row, count in zip(starts, sizes) if count[dst]] for dst in range(len(sizes))
    ]
    return exchange(sent, ExchangePlan(bounds, needs), communicator, dim)


def indexed_all_to_all_v_wrapper(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    dim: int = 0,
    group: Any = None,
) -> torch.Tensor:
    """Exchanges positions as `indexed_all_to_all_v`."""
    return indexed_all_to_all_v(tensor, indices, sizes, dim=dim, group=group)


# --- mappings


def copy_to_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """Returns `input`; the gradient is the sum of the ranks' gradients."""
    backward = {"backward_options": {"op_dtype": _sum_dtype(input, True)}}
    return spmd.convert(input, named(group), src=I, dst=R, **backward)  # type: ignore[arg-type]


def reduce_from_parallel_region(input: torch.Tensor, group: str | None) -> torch.Tensor:
    """Returns the sum over the ranks; the gradient is passed on."""
    options = {"op_dtype": _sum_dtype(input, True), "out_dtype": input.dtype}
    return spmd.all_reduce(input, named(group), src=P, dst=I, **options)  # type: ignore[arg-type]


def scatter_to_parallel_region(input: torch.Tensor, dim: int, group: str | None) -> torch.Tensor:
    """Returns this rank's piece of `input`, cut as `compute_split_shapes` says; the gradient is gathered."""
    communicator = named(group)
    sizes = tuple(compute_split_shapes(input.shape[dim], communicator.size))
    return split(input, communicator, dim % input.dim(), sizes)


def gather_from_parallel_region(
    input: torch.Tensor, dim: int, shapes: Sequence[int] | None = None, group: str | None = None
) -> torch.Tensor:
    """Returns the pieces of all ranks along `dim`, of sizes `shapes`; the gradient is split. None: of one size."""
    communicator = named(group)
    sizes = [input.shape[dim]] * communicator.size if shapes is None else shapes
    _checked(sizes, communicator, "gather_from_parallel_region")
    return spmd.all_gather(input, communicator, src=S(dim), dst=I, split_sizes=tuple(sizes))


def compute_split_shapes(size: int, num_chunks: int) -> list[int]:
    """Returns the sizes of `num_chunks` pieces, the last of another size: 7 in 4 is 2, 2, 2, 1, and 5 is 1, 1, 1, 2.

    They are those of `torch.chunk`, but that none is empty where there are positions enough.
    """
    first = -(-size // num_chunks)
    if first * (num_chunks - 1) >= size:
        first = size // num_chunks
    return [first] * (num_chunks - 1) + [size - first * (num_chunks - 1)]


def split_tensor_along_dim(tensor: torch.Tensor, dim: int, num_chunks: int) -> tuple[torch.Tensor, ...]:
    """Splits a tensor into the pieces of `compute_split_shapes`.

    Raises:
        ValueError: there is no such dim, or it has fewer positions than there are pieces.
    """
    if dim >= tensor.dim() or tensor.shape[dim] < num_chunks:
        raise ValueError(
            f"split_tensor_along_dim: dim {dim} of shape {tuple(tensor.shape)} is not cut into {num_chunks} pieces "
            "with a position each"
        )
    return tensor.split(compute_split_shapes(tensor.shape[dim], num_chunks), dim)


def named(name: str | None) -> Communicator:
    """Returns the communicator of a named group of `DistributedManager`; None: of all ranks."""
    return communicator_of(DistributedManager().group(name))


def _sum_dtype(x: torch.Tensor, use_fp32: bool) -> torch.dtype:
    return torch.float32 if use_fp32 and x.dtype.is_floating_point and x.dtype.itemsize < 4 else x.dtype


def _checked(sizes: Sequence[Any], communicator: Communicator, function: str, root: int = 0) -> None:
    if len(sizes) != communicator.size or not 0 <= root < communicator.size:
        raise ValueError(
            f"{function} over {communicator.axis}: {len(sizes)} entries, and rank {root}, for {communicator.size} "
            "ranks; pass one entry for each rank, and a group index"
        )
