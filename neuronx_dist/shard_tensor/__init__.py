"""Tensors that live on many ranks: exact for any split, typed, differentiable, at a fraction of DTensor's host cost.

placements.py    Shard, Replicate, Partial, and their types     device_mesh.py  ranks as a grid with groups
spec.py          the layout of a tensor, interned               tensor.py       ShardTensor: a wrapper of a local tensor
bounded.py       tables of plans, of limited size
local_shapes.py  a layout from one rank's part                  construct.py    distribute, scatter, factories
moves.py         gather, split, exchange along one mesh dim     redistribute.py from one layout to another
handlers.py      how functions get handlers; the recipe         labels.py       layouts by labels of dims
extremes.py      maximum, minimum over dims and ranks           local_views.py  to_local; torch's DTensors
module.py        distribute_module                              fallback.py     functions without a handler
free_labels.py   the same, on shards that are independent by the checker's rule
other_mesh.py    to a mesh of other ranks                       typed.py        what the type checker is told
checkpoint.py    torch.distributed.checkpoint                   compiling.py    torch.compile
xla.py           XLA's partition specs                          manager.py      DistributedManager
report.py        what is communicated, by function              attention_plan.py, attention_method.py  attention
exchange.py      the exchange of a plan, differentiable         intervals.py, windows.py, chains.py  the plans
one_program.py   the same as one program (XLA)                  pieces.py       parts of a shard
halo.py, ring.py halos and rings of plain tensors               points.py, fetch.py  neighbours; rows by position
awaited.py       redistribute(async_op=True)
ops/             the handlers of torch's functions, one family a file
"""

from ..call_site import hide
from . import awaited, checkpoint, ops
from .construct import distribute_tensor, scatter_tensor
from .device_mesh import DeviceMesh, init_device_mesh
from .fallback import fallback, set_fallback
from .handlers import TensorPromotionMode, promotion_mode, sharded
from .manager import DistributedManager
from .module import distribute_module, sync_module_over_mesh
from .ops.deferred import one_exchange
from .placements import Partial, Placement, Replicate, Shard, spmd_type
from .report import report
from .spec import ShardTensorSpec
from .tensor import ShardTensor

__all__ = [
    "DeviceMesh",
    "DistributedManager",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "awaited",
    "checkpoint",
    "distribute_module",
    "distribute_tensor",
    "fallback",
    "init_device_mesh",
    "one_exchange",
    "ops",
    "promotion_mode",
    "report",
    "scatter_tensor",
    "set_fallback",
    "sharded",
    "spmd_type",
    "sync_module_over_mesh",
]

hide(__name__)
