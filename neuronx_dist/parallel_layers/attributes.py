"""The attributes by which scripts written for NxD, or for torch's layers, read a layer; computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import comm
from ..spmd import ShardedModule, spec_of
from .parallel_state import process_group

__all__ = ["EmbeddingAttributes", "LinearAttributes", "PaddedLayer"]


class _Computed:
    """An attribute that has a value until a script sets another one."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute = compute

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else self.compute(layer)


def _group(layer: Any) -> Any:
    return process_group(comm.communicator(layer.axis))


class PaddedLayer(ShardedModule):
    """A layer that may be padded with zeros, for NxD's hook on state dicts."""

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pads the whole parameter of name `prefix` in a state dict with zeros, as this layer pads its own.

        Raises:
            RuntimeError: it has not the shape of the whole parameter.
        """
        spec = spec_of(getattr(self, prefix.rpartition(".")[2]))
        shape = tuple(model_state_dict[prefix].shape)
        if spec.unpadded is None:
            return
        if shape != spec.unpadded_shape:
            raise RuntimeError(f"{prefix} of the state dict is {list(shape)}, not {list(spec.unpadded_shape)}")
        model_state_dict[prefix] = replace(spec, num_partitions=1).local_slice(model_state_dict[prefix], 0)


class LinearAttributes(PaddedLayer):
    """NxD's attributes of `ColumnParallelLinear` and `RowParallelLinear`, and those of the `nn.Linear` in their place.

    Attributes:
        in_features, out_features: of the layer on all ranks together, without padding, whatever `gather_output` is.
    """

    in_features = _Computed(lambda layer: spec_of(layer.weight).unpadded_shape[1])
    out_features = _Computed(lambda layer: spec_of(layer.weight).unpadded_shape[0])
    tensor_parallel_group = _Computed(_group)

    def __init__(self, device: Any = None) -> None:
        super().__init__()

    add_bias = _Computed(lambda layer: layer.bias is not None)
    arg_init_method = _Computed(lambda layer: layer.init_method)
    bias_shape = _Computed(lambda layer: None if layer.bias is None else tuple(layer.bias.shape))
    device = _Computed(lambda layer: layer.weight.device)
    dtype = _Computed(lambda layer: layer.weight.dtype)
    rank_ordering = None
    weight_partition_dim = _Computed(lambda layer: spec_of(layer.weight).dim)
    weight_shape = _Computed(lambda layer: tuple(layer.weight.shape))


class EmbeddingAttributes(PaddedLayer):
    """NxD's attributes of `ParallelEmbedding`."""

    tensor_model_parallel_group = _Computed(_group)
    tensor_model_parallel_size = _Computed(lambda layer: comm.communicator(layer.axis).size)
    dtype = _Computed(lambda layer: layer.weight.dtype)
    embedding_dim_per_partition = _Computed(lambda layer: layer.weight.shape[1])
    num_embeddings_per_partition = _Computed(lambda layer: layer.weight.shape[0])
    start_index = _Computed(lambda layer: layer.first_id)
    end_index = _Computed(lambda layer: layer.first_id + layer.weight.shape[0])
    rank_ordering = None
    stride = 1
    weight_partition_dim = _Computed(lambda layer: spec_of(layer.weight).dim)
