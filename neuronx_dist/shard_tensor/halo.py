"""Halos of plain tensors: adds the neighbours' rows before and behind a shard, and removes them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from .. import comm
from .device_mesh import DeviceMesh
from .moves.exchange import exchange
from .moves.intervals import Bounds, ExchangePlan, bounds_of, virtual_runs
from .ring import METHODS

__all__ = ["HaloConfig", "halo_padding", "unhalo_padding"]


@dataclass(frozen=True)
class HaloConfig:
    """The size and direction of a halo.

    Attributes:
        mesh_dim: of the device mesh, by index or name.
        tensor_dim: the dim that is sharded along it.
        halo_size: positions of each neighbour; more than a shard has come from several ranks.
        edge_padding_size: of zeros, before the first shard and behind the last.
        async_op, communication_method: as in PhysicsNeMo's scripts, without effect: one exchange with the neighbours.
        sizes: of all shards along the dim. None: they are equal, or none is shorter than the halo; else the exchange
            raises on every rank.

    Raises:
        ValueError: a negative size, or more padding than halo; a method that is neither "p2p" nor "a2a".
    """

    mesh_dim: int | str
    tensor_dim: int
    halo_size: int
    edge_padding_size: int = 0
    async_op: bool = False
    communication_method: str = "a2a"
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.communication_method not in METHODS:
            raise ValueError(
                f"HaloConfig: communication_method={self.communication_method!r}: use one of {', '.join(METHODS)}"
            )
        if not 0 <= self.edge_padding_size <= self.halo_size:
            raise ValueError(
                f"HaloConfig: edge_padding_size={self.edge_padding_size} must be from 0 to halo_size={self.halo_size}"
            )


def halo_padding(tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig) -> torch.Tensor:
    """Adds the halo to a shard: `[.., n, ..] -> [.., before + n + behind, ..]`. Differentiable; gradients go back.

    Raises:
        ValueError: `tensor` is not of this rank's size, or there is not a size for each rank.
        CommError: no sizes are given, and shards that are shorter than the halo are not equal.
    """
    communicator = mesh.communicator(halo_config.mesh_dim)
    sizes = _sizes(halo_config, communicator.size, tensor.shape[halo_config.tensor_dim])
    plan = _plan(bounds_of(sizes), halo_config.halo_size, halo_config.edge_padding_size)
    try:
        return exchange(tensor, plan, communicator, halo_config.tensor_dim)
    except comm.CommError as error:
        if halo_config.sizes is None:
            error.add_note(
                "HaloConfig(sizes=None) assumes shards of equal size; if a shard is shorter than the halo, pass sizes"
            )
        raise


def unhalo_padding(tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig) -> torch.Tensor:
    """Removes the halo of a shard: `[.., before + n + behind, ..] -> [.., n, ..]`. Nothing is communicated.

    Raises:
        ValueError: `tensor` has not as many positions as a shard of this rank with its halo.
    """
    communicator, dim = mesh.communicator(halo_config.mesh_dim), halo_config.tensor_dim
    rank, length = int(communicator.rank), tensor.shape[dim]
    candidates = range(max(0, length - 2 * halo_config.halo_size), length + 1)  # of equal shards: one of them fits
    for size in candidates if halo_config.sizes is None else (length,):
        bounds = bounds_of(_sizes(halo_config, communicator.size, size))
        low, high = _padded(bounds, rank, halo_config.halo_size, halo_config.edge_padding_size)
        if high - low == length:
            return tensor.narrow(dim, bounds[rank] - low, bounds[rank + 1] - bounds[rank])
    raise ValueError(
        f"unhalo_padding: dim {dim} of shape {tuple(tensor.shape)} is not the length of a shard with the halo of "
        f"{halo_config}, at index {rank} of {communicator.size} ranks"
    )


def _sizes(config: HaloConfig, count: int, local_size: int) -> Sequence[int]:
    if config.sizes is None:
        return [local_size] * count
    if len(config.sizes) != count:
        raise ValueError(f"HaloConfig: sizes {list(config.sizes)}: pass one size for each of the {count} ranks")
    return config.sizes


def _padded(bounds: Bounds, rank: int, halo: int, edge: int) -> tuple[int, int]:
    """Returns the positions of a shard with its halo; positions below 0, and from the last bound on, are padding."""
    return max(bounds[rank] - halo, -edge), min(bounds[rank + 1] + halo, bounds[-1] + edge)


@cache
def _plan(bounds: Bounds, halo: int, edge: int) -> ExchangePlan:
    ranks = range(len(bounds) - 1)
    return ExchangePlan(bounds, [virtual_runs(*_padded(bounds, rank, halo, edge), bounds[-1]) for rank in ranks])
