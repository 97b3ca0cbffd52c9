"""NeuronX Distributed's parallel layers, by its names."""

from ..lazy_names import lazy_names
from . import mappings, parallel_state, random
from .embedding import ParallelEmbedding
from .layer_norm import LayerNorm, RMSNorm
from .linear import ColumnParallelLinear, RowParallelLinear, fuse_columns
from .loss_functions import parallel_cross_entropy
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

PARALLEL_MODULES = [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding]
PARALLEL_FUNCTIONS = [
    parallel_cross_entropy,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
]

# Loaded when first asked for, so that importing the package stays quick.
__getattr__ = lazy_names(__name__, {"move_model_to_device": "parallel_layers.utils", "utils": "parallel_layers"})

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "PARALLEL_FUNCTIONS",
    "PARALLEL_MODULES",
    "ParallelEmbedding",
    "RMSNorm",
    "RowParallelLinear",
    "copy_to_tensor_model_parallel_region",
    "fuse_columns",
    "gather_from_tensor_model_parallel_region",
    "mappings",
    "move_model_to_device",
    "parallel_cross_entropy",
    "parallel_state",
    "random",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
