"""Selection of a rank's part of a tensor, by its number, or by a tensor where all ranks share a program (XLA)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import Communicator

__all__ = ["XLA", "in_one_program", "in_own_piece", "only_on", "only_on_first", "own_piece", "own_slot"]


XLA = "xla"  # the type of devices on which operations are put into a program


def in_one_program(x: torch.Tensor) -> bool:
    """Returns whether operations on `x` become part of a program that all ranks share, instead of running now (XLA)."""
    return x.device.type == XLA


def own_slot(x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Returns element number `rank` along `dim`, of the group's size: `[.., size, ..] -> [.., ..]`, contiguous."""
    rank = comm.coordinate(x)
    if isinstance(rank, int):
        return x.select(dim, rank).clone(memory_format=torch.contiguous_format)
    return x.index_select(dim, rank.reshape(1)).squeeze(dim)


def own_piece(x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Returns piece number `rank` of `size` along `dim`: `[.., size*n, ..] -> [.., n, ..]`, contiguous."""
    dim %= x.dim()
    size = x.shape[dim] // comm.size
    rank = comm.coordinate(x)
    if isinstance(rank, int):
        return x.narrow(dim, rank * size, size).clone(memory_format=torch.contiguous_format)
    return own_slot(x.unflatten(dim, (comm.size, size)), comm, dim)


def in_own_piece(x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Returns `x` as piece number `rank` of a tensor of zeros: `[.., n, ..] -> [.., size*n, ..]`."""
    dim %= x.dim()
    shape = list(x.shape)
    shape[dim] *= comm.size
    rank = comm.coordinate(x)
    if isinstance(rank, int):
        out = x.new_zeros(shape)
        out.narrow(dim, rank * x.shape[dim], x.shape[dim]).copy_(x)
        return out
    mine = torch.arange(comm.size, device=x.device) == rank
    mine = mine.view([comm.size if i == dim else 1 for i in range(x.dim() + 1)])
    return torch.where(mine, x.unsqueeze(dim), torch.zeros((), dtype=x.dtype, device=x.device)).reshape(shape)


def only_on(x: torch.Tensor, comm: Communicator, index: int) -> torch.Tensor:
    """Returns `x` on the rank with this group index, zeros on the others, whatever they hold."""
    rank = comm.coordinate(x)
    if isinstance(rank, int):
        return x.clone() if rank == index else torch.zeros_like(x)
    return torch.where(rank == index, x, torch.zeros_like(x))


def only_on_first(x: torch.Tensor, groups: Sequence[Communicator]) -> torch.Tensor:
    """Returns `x` on the rank that is the first one of all groups, zeros elsewhere; without groups `x` itself."""
    for group in groups:
        x = only_on(x, group, 0)
    return x
