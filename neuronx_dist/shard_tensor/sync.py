"""Equal parameters on all ranks of a mesh: `sync_module_over_mesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import comm
from ..comm import Communicator
from .device_mesh import DeviceMesh, as_mesh
from .placements import Replicate
from .tensor import ShardTensor

__all__ = ["sync_module_over_mesh"]


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Gives parameters and buffers the values that rank `mesh.mesh.flatten()[src_mesh_rank]` has, in place.

    A ShardTensor gets them along the mesh dims that do not shard it, each shard from the rank there that has its part.
    torch's DTensors are left as they are.

    Args:
        verify: whether to compare names, shapes and dtypes between the ranks first, and sums of the values afterwards.

    Raises:
        ValueError: `src_mesh_rank` is no rank of the mesh; the ranks along a mesh dim are some of those that shard a
            parameter, or others too.
        RuntimeError: every parameter is a DTensor, as after `fully_shard`; `verify` found a difference.
    """
    mesh = as_mesh(mesh)
    if not 0 <= src_mesh_rank < mesh.size():
        raise ValueError(
            f"sync_module_over_mesh: src_mesh_rank={src_mesh_rank} is not one of the {mesh.size()} ranks of {mesh}, "
            "which count from 0"
        )
    everything = [*module.named_parameters(), *module.named_buffers()]
    tensors = [(name, x) for name, x in everything if not isinstance(x, DTensor)]
    if everything and not tensors:
        raise RuntimeError(
            "sync_module_over_mesh: every parameter is a DTensor, of which none of it is plain: call it before "
            "fully_shard or torch's distribute_module"
        )
    coordinate = mesh.coordinate_of(src_mesh_rank)
    groups = [mesh.communicator(m) for m in range(mesh.ndim)]
    if verify:
        _compare_ranks(((name, tuple(x.shape), x.dtype) for name, x in tensors), groups, lambda row: str(row[0]))
    with torch.no_grad():
        for _, x in tensors:
            local = x._local if isinstance(x, ShardTensor) else x
            for group, index in zip(groups, coordinate):
                if not _differs_over(x, group):
                    local.copy_(comm.broadcast(local.detach(), group, src=index))
    if verify:
        for group in groups:
            equal = [(name, x) for name, x in tensors if not _differs_over(x, group)]
            _compare_ranks(((name, _sums(x)) for name, x in equal), [group], lambda row: str(row[0]))


def _compare_ranks(rows: Iterable[Any], groups: Iterable[Communicator], name_of: Callable[[Any], str]) -> None:
    """Compares rows between the ranks of each group.

    Raises:
        RuntimeError: they differ, on all ranks of the mesh; the message has the first row that does.
    """
    local, groups, difference = list(rows), list(groups), ""
    for group in groups:
        for rank, other in zip(group.ranks, comm.gather_objects(local, group)):
            if other != local and not difference:
                mine, theirs = next(pair for pair in zip([*local, None], [*other, None]) if pair[0] != pair[1])
                difference = f"{name_of(mine or theirs)} differs across the mesh: {mine} here, {theirs} on rank {rank}"
    for group in groups:  # along each mesh dim in turn, so that all ranks raise
        differences = comm.gather_objects(difference, group)
        difference = difference or next(filter(None, differences), "")
    if difference:
        raise RuntimeError(f"sync_module_over_mesh: {difference}")


def _sums(x: torch.Tensor) -> str:
    """Returns sums of a tensor's values, and of their magnitudes, as text, so that NaN equals NaN."""
    local = x._local if isinstance(x, ShardTensor) else x
    values = (torch.view_as_real(local) if local.is_complex() else local).detach().double()
    return f"{values.sum().item()!r}, {values.abs().sum().item()!r}"


def _differs_over(x: torch.Tensor, group: Communicator) -> bool:
    """Returns whether the ranks of a group have different parts of `x`.

    Raises:
        ValueError: some of them have, or in another order.
    """
    spec = x._spec if isinstance(x, ShardTensor) else None
    for m, placement in enumerate(spec.placements if spec is not None else ()):
        assert spec is not None
        ranks = spec.mesh.communicator(m).ranks
        if isinstance(placement, Replicate) or len({*ranks} & {*group.ranks}) < 2:
            continue
        if ranks == group.ranks:
            return True
        raise ValueError(
            f"sync_module_over_mesh over ranks {[*group.ranks]}: a parameter of shape {tuple(x.shape)} is "
            f"{placement!r} over ranks {[*ranks]}: pass a mesh in which ranks {[*ranks]} form one dim"
        )
    return False
