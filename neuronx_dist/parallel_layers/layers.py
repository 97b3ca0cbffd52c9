"""NxD's import path for the parallel layers (`linear.py`, `embedding.py`), and the functional form of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import comm
from ..comm.context import AxisLike
from ..weights.shard_spec import set_spec
from .autograd_linear import ColumnLinear, call, linear_alone
from .conv import BaseParallelConv, InputChannelParallelConv2d, OutputChannelParallelConv2d
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear, fuse_columns
from .signatures import accepts
from .utils import (
    copy_tensor_model_parallel_attributes,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "BaseParallelConv",
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
