"""NxD's import path for the parallel layers (`linear.py`, `embedding.py`)."""

from ..weights.shard_spec import set_spec
from .autograd_linear import linear_with_async_allreduce
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear, fuse_columns
from .utils import (
    copy_tensor_model_parallel_attributes,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "copy_tensor_model_parallel_attributes",
    "fuse_columns",
    "linear_with_async_allreduce",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_spec",
    "set_tensor_model_parallel_attributes",
]
