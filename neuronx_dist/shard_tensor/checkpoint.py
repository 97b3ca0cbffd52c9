"""The protocol of `torch.distributed.checkpoint`: a ShardTensor in a state dict is saved and loaded shard by shard.

Every rank writes the block that it has, with its place in the whole tensor; blocks that several ranks have are written
once. Loading reads what a rank's block overlaps, whatever the layout and the number of ranks were: plain tensors,
DTensors and ShardTensors load one another. An empty shard writes and reads nothing.

    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)

`torch.save` writes this rank's part and the layout; `torch.load`, also with `weights_only`, is called by all ranks of
the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from . import device_mesh, tensor
from .placements import Partial, Replicate, Shard
from .spec import make_spec
from .tensor import ShardTensor

__all__ = ["create_chunk_list", "create_write_items", "get_tensor_shard"]


def create_write_items(self: ShardTensor, fqn: str, object: Any) -> list[WriteItem]:
    """Returns the write items of this rank for the tensor named `fqn`."""
    _check(self, fqn)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self._local), self._spec.shape),
        )
        for chunk in create_chunk_list(self)
    ]


def create_chunk_list(self: ShardTensor) -> list[ChunkStorageMetadata]:
    """Returns the offsets and sizes of this rank's block."""
    _check(self, "a tensor")
    if self._spec.mesh.get_coordinate() is None or self._local.numel() == 0 < self._spec.shape.numel():
        return []
    return [ChunkStorageMetadata(offsets=torch.Size(self._spec.offsets), sizes=self._spec.local_shape)]


def get_tensor_shard(self: ShardTensor, index: MetadataIndex) -> torch.Tensor:
    """Returns the memory of this rank's block, to be saved or loaded into."""
    if index.offset is not None and tuple(index.offset) != self._spec.offsets:
        raise ValueError(
            f"{index.fqn}: the block at {tuple(index.offset)} was requested, but this rank holds the block at "
            f"{self._spec.offsets}"
        )
    return self._local.detach()


def _check(x: ShardTensor, fqn: str) -> None:
    if x._spec.partial:
        raise ValueError(
            f"checkpoint: {fqn} is {x._spec.placements}: a Partial tensor cannot be saved; redistribute() it first"
        )


_PROTOCOL: Any = ShardTensor
_PROTOCOL.__create_write_items__ = create_write_items
_PROTOCOL.__create_chunk_list__ = create_chunk_list
_PROTOCOL.__get_tensor_shard__ = get_tensor_shard

torch.serialization.add_safe_globals(
    [tensor.rebuilt, device_mesh.rebuilt, make_spec, Shard, Replicate, Partial]  # what `torch.save` names
)
