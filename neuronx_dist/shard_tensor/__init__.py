"""Tensors that live on many ranks: exact for any split, typed, differentiable, at a fraction of DTensor's host cost.

placements.py    Shard, Replicate, Partial, and their types     device_mesh.py  ranks as a grid with groups
spec.py          the layout of a tensor, interned               tensor.py       ShardTensor: a wrapper of a local tensor
local_shapes.py  a layout from one rank's part                  construct.py    distribute, scatter, factories
local_views.py   to_local; torch's DTensors                     awaited.py      redistribute(async_op=True)
handlers.py      how functions get handlers; the recipe         labels.py       layouts by labels of dims
fallback.py      functions without a handler                    free_labels.py  calls on shards, if they are independent
typed.py         declarations for the type checker              report.py       the communication, by function
view_layouts.py  layouts in which dims are split and merged
partials.py      functions exact on each rank's part      outside.py      ranks outside of a tensor's mesh
merged_mesh.py   one tensor dim on several mesh dims      merged.py       its functions, on a mesh that merges them
module.py        distribute_module                              sync.py         sync_module_over_mesh
manager.py       DistributedManager                             draws.py        random numbers, of whole or part
parallel.py, experimental.py  names of torch.distributed.tensor.parallel and .experimental
data_parallel.py parameters in torch's wrappers
checkpoint.py    torch.distributed.checkpoint                   bounded.py      tables of plans, of limited size
xla.py           XLA's partition specs                          torch_mesh.py   meshes in torch's functions
halo.py, ring.py halos and rings of plain tensors               points.py       nearest neighbours
attention_plan.py, attention_method.py  where and how attention is computed
moves/           shards on their way: plans, exchanges, from one layout to another
windows/         convolutions, pooling, padding and interpolation: their halos planned and exchanged, local tensors
ops/             the handlers of torch's functions, one family a file
physicsnemo/     PhysicsNeMo's import names
"""

from ..call_site import hide
from . import awaited, checkpoint, data_parallel, merged, ops, outside
from .construct import (
    arange,
    distribute_tensor,
    empty,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    scatter_tensor,
    zeros,
)
from .device_mesh import DeviceMesh, init_device_mesh
from .draws import random_numbers
from .fallback import fallback, set_fallback
from .handlers import TensorPromotionMode, promotion_mode, sharded
from .manager import DistributedManager
from .module import distribute_module
from .ops.one_exchange import one_exchange
from .placements import Partial, Placement, Replicate, Shard, spmd_type
from .report import report
from .spec import ShardTensorSpec, compute_local_shape_and_global_offset
from .sync import sync_module_over_mesh
from .tensor import ShardTensor

__all__ = [
    "DTensor",
    "DeviceMesh",
    "DistributedManager",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "arange",
    "awaited",
    "checkpoint",
    "data_parallel",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "fallback",
    "full",
    "init_device_mesh",
    "linspace",
    "logspace",
    "merged",
    "one_exchange",
    "ones",
    "ops",
    "outside",
    "promotion_mode",
    "rand",
    "randint",
    "randn",
    "random_numbers",
    "report",
    "scatter_tensor",
    "set_fallback",
    "sharded",
    "spmd_type",
    "sync_module_over_mesh",
    "zeros",
]

DTensor = ShardTensor

hide(__name__)
