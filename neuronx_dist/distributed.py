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
from .shard_tensor.construct import (
    arange,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    zeros,
    zeros_like,
)

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
    "empty_like",
    "full",
    "full_like",
    "init_device_mesh",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "scatter_tensor",
    "sync_module_over_mesh",
    "zeros",
    "zeros_like",
]

DTensor = ShardTensor
