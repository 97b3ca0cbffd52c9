"""The names of the DistributedTensor RFC: `import neuronx_dist.distributed as distributed`, as of `torch.distributed`.

`DTensor` is another name of `ShardTensor`. This module loads `torch.distributed.tensor`; `neuronx_dist` does not.
"""

from .shard_tensor import (
    DeviceMesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardTensor,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    scatter_tensor,
    sync_module_over_mesh,
)
from .shard_tensor.construct import arange, empty, full, ones, rand, randint, randn, zeros

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardTensor",
    "arange",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randint",
    "randn",
    "scatter_tensor",
    "sync_module_over_mesh",
    "zeros",
]

DTensor = ShardTensor
