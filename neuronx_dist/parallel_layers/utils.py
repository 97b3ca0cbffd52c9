"""Small things that scripts written for NxD import from `parallel_layers.utils`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .. import comm
from ..spmd.spec import restamp

T = TypeVar("T")

_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "num_partitions": -1,
}


def ensure_divisibility(numerator: int, denominator: int) -> None:
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must leave no rest."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """What is missing to the next multiple of `denominator`."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: torch.Tensor, partition_dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    size = divide(tensor.shape[partition_dim], num_partitions)
    pieces = torch.split(tensor, size, dim=partition_dim)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else pieces


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether this rank's copy is the one that counts: a shard, or the copy of tensor-parallel rank 0."""
    return bool(getattr(param, "tensor_model_parallel", False)) or comm.rank("tp") == 0


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,
    dim: int,
    stride: int = 1,
    num_partitions: int = -1,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Marks a tensor as sharded, in NxD's way. `num_partitions=-1` means the tensor-parallel size.

    Raises:
        ValueError: the tensor is marked already.
    """
    for name in _DEFAULTS:
        if hasattr(tensor, name):
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} has the attribute {name} already")
    values = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
        "num_partitions": num_partitions,
    }
    for name, value in values.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination: torch.Tensor, source: torch.Tensor) -> None:
    for name in (*_DEFAULTS, "sequence_parallel_enabled", "expert_model_parallel", "shared", "_shard_spec"):
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))


class EmbeddingUtility:
    """Which rows of a vocabulary a tensor-parallel rank holds."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return EmbeddingUtility.range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size), rank, world_size
        )


def cast_if_autocast_enabled(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Under autocast, the floating-point tensors in its dtype; otherwise the tensors themselves."""
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which knows no meta device
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
    )


def move_all_tensor_to_cpu(data: T) -> T:
    """The same nested containers with every tensor on the CPU."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), data)


def move_model_to_device(model: nn.Module, device: Any) -> nn.Module:
    """Moves a model and keeps what a plain `.to` may lose: tied parameters stay tied, attributes stay on the
    parameters.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    attributes: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((module, name))
                attributes[id(param)] = dict(param.__dict__)
    model.to(device)
    for key, places in owners.items():
        module, name = places[0]
        param = module._parameters[name]
        assert param is not None
        for attribute, value in attributes[key].items():
            setattr(param, attribute, value)
        for other, other_name in places[1:]:
            other._parameters[other_name] = param
    restamp(model)
    return model
