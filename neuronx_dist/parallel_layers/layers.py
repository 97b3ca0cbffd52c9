"""NxD's import path for the parallel layers (`linear.py`, `embedding.py`), and the functional form of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import comm
from ..comm.context import AxisLike
from ..lazy_names import lazy_names
from ..weights.shard_spec import ShardedModule, ShardSpec, set_spec
from .attributes import LinearAttributes
from .autograd_linear import ColumnLinear, call, linear_alone
from .conv import BaseParallelConv, InputChannelParallelConv2d, OutputChannelParallelConv2d
from .embedding import ParallelEmbedding
from .fused_columns import fuse_columns
from .linear import ColumnParallelLinear, RowParallelLinear
from .mappings import copy_to_tensor_model_parallel_region
from .signatures import accepts
from .utils import (
    copy_tensor_model_parallel_attributes,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "BaseParallelConv",
    "BaseParallelLayer",
    "BaseParallelLinear",
    "Conv2dWithInputGradAllReduce",
    "LinearWithAsyncCommunication",
    "conv2d_with_weight_grad_allreduce",
    "create_local_weight",
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "OutputChannelParallelConv2d",
    "ParallelEmbedding",
    "RowParallelLinear",
    "copy_tensor_model_parallel_attributes",
    "fuse_columns",
    "linear_with_async_allreduce",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_spec",
    "set_tensor_model_parallel_attributes",
]

__getattr__ = lazy_names(__name__, {"SPMDRank": "parallel_layers.neuron_only"})
BaseParallelLayer = ShardedModule
BaseParallelLinear = LinearAttributes


def create_local_weight(
    full_weight: torch.Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns this rank's shard of a whole weight, of `per_partition_size` along a dim of `stride` fused blocks.

    `out_weight` receives it, where there is one.
    """
    size = comm.size("tp")
    shape = list(full_weight.shape)
    if shape[partition_dim] != per_partition_size * size:
        raise ValueError(
            f"create_local_weight: dim {partition_dim} of {shape} is not {size} partitions of {per_partition_size}"
        )
    spec = ShardSpec("tp", partition_dim, stride, size, tuple(shape))
    local = spec.local_slice(full_weight.detach(), comm.rank("tp"))
    if out_weight is None:
        return local
    with torch.no_grad():
        return out_weight.copy_(local)


@accepts("linear_with_async_allreduce")
def linear_with_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    async_grad_allreduce: bool | None = None,
    sequence_parallel_enabled: bool = False,
    sequence_dimension: int | None = 0,
    *,
    process_group: AxisLike | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`input · weightᵀ + bias` for a weight sharded on its rows: the functional form of `ColumnParallelLinear`.

    Args:
        input: `[.., in]`, the same on all ranks, or with `sequence_parallel_enabled` sharded on `sequence_dimension`.
        async_grad_allreduce: sum the input's gradient over the ranks; False leaves it to the caller, as a layer's
            `input_is_replicated`; None: True without sequence parallelism, which reduce-scatters it instead.
        process_group: an axis or a group; None: "tp".

    Raises:
        ValueError: `async_grad_allreduce` together with sequence parallelism.
    """
    if async_grad_allreduce and sequence_parallel_enabled:
        raise ValueError(
            "linear_with_async_allreduce: with sequence_parallel_enabled=True the gradient is reduce-scattered, "
            "not all-reduced; pass async_grad_allreduce=False"
        )
    communicator = comm.communicator(process_group or "tp")
    if communicator.size == 1:
        return linear_alone(input, weight, bias, communicator)
    if async_grad_allreduce is False and not sequence_parallel_enabled:
        return F.linear(input, weight, bias)
    biases = [] if bias is None else [bias]
    dim = (sequence_dimension or 0) if sequence_parallel_enabled else None
    return call(ColumnLinear, input, communicator, dim, reduce_dtype, 1, weight, *biases)[0]


class LinearWithAsyncCommunication:
    """NxD's name of the function's autograd part; `.apply` takes `save_for_backward` behind the sequence's dim."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: AxisLike | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> torch.Tensor:
        return linear_with_async_allreduce(
            input,
            weight,
            bias,
            async_grad_allreduce,
            sequence_parallel_enabled,
            sequence_dimension,
            process_group=process_group,
            reduce_dtype=reduce_dtype,
        )


def conv2d_with_weight_grad_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    allreduce_weight_grad: bool,
) -> torch.Tensor:
    """`F.conv2d` with this rank's output channels; `allreduce_weight_grad` sums the input's gradient over tp."""
    x = copy_to_tensor_model_parallel_region(input) if allreduce_weight_grad else input
    return F.conv2d(x, weight, bias, stride, padding)


class Conv2dWithInputGradAllReduce:
    """NxD's name of the convolution's autograd part: `.apply` takes the arguments of the function."""

    apply = staticmethod(conv2d_with_weight_grad_allreduce)
