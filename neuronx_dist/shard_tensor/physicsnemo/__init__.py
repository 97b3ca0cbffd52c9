"""PhysicsNeMo's import names for domain parallelism: its scripts run on this package after one import.

    import neuronx_dist.shard_tensor.physicsnemo  # before the first import of physicsnemo
    from physicsnemo.distributed import DistributedManager
    from physicsnemo.domain_parallel import ShardTensor, scatter_tensor

`physicsnemo.distributed` and `physicsnemo.domain_parallel`, the modules of `NAMES`, are names of this package then.
Where PhysicsNeMo is installed the import changes nothing, and warns; `install(replace=True)` takes these modules from
this package, and leaves its models, layers and data as they are. `docs/shard-tensor.md` has the table of differences.

primitives.py  pieces of any sizes: all_gather_v, mappings   reductions.py  fused_all_reduce, reduce_loss, sharing
fft.py         DistributedRFFT2, DistributedIRFFT2           group_tree.py  ProcessGroupConfig
patches.py     errors and shapes of handlers
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from .. import halo as halos
from .. import handlers, manager, spec
from .. import ring as rings
from ..construct import scatter_tensor
from ..sync import sync_module_over_mesh
from ..tensor import ShardTensor
from . import fft, group_tree, patches, primitives, reductions

__all__ = ["NAMES", "install"]

_MANAGER = {
    "DistributedManager": manager.DistributedManager,
    "PhysicsNeMoUndefinedGroupError": manager.UndefinedGroupError,
    "PhysicsNeMoUninitializedDistributedManagerWarning": manager.UninitializedManagerError,
}


def _of(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names or module.__all__}


_AUTOGRAD = _of(primitives, "all_gather_v", "gather_v", "indexed_all_to_all_v", "scatter_v")
_SHARING = _of(reductions, "mark_module_as_shared", "reduce_loss", "unmark_module_as_shared")
_SHARD_TENSOR = {
    "ShardTensor": ShardTensor,
    "TensorPromotionMode": handlers.TensorPromotionMode,
    "scatter_tensor": scatter_tensor,
}
_SPEC = {"ShardTensorSpec": spec.ShardTensorSpec, **_of(patches, "compute_sharding_shapes_from_chunking_global_shape")}

#: Module of PhysicsNeMo -> its names.
NAMES: dict[str, dict[str, Any]] = {
    "physicsnemo.distributed": {
        **_MANAGER,
        **_AUTOGRAD,
        **_SHARING,
        **_of(group_tree),
        "fused_all_reduce": reductions.fused_all_reduce,
    },
    "physicsnemo.distributed.autograd": _AUTOGRAD,
    "physicsnemo.distributed.config": _of(group_tree),
    "physicsnemo.distributed.fft": _of(fft),
    "physicsnemo.distributed.fused_all_reduce": {"fused_all_reduce": reductions.fused_all_reduce},
    "physicsnemo.distributed.manager": _MANAGER,
    "physicsnemo.distributed.mappings": _of(
        primitives,
        "copy_to_parallel_region",
        "gather_from_parallel_region",
        "reduce_from_parallel_region",
        "scatter_to_parallel_region",
    ),
    "physicsnemo.distributed.utils": {
        **_SHARING,
        **_of(
            primitives,
            "all_gather_v_bwd_wrapper",
            "all_gather_v_wrapper",
            "compute_split_shapes",
            "indexed_all_to_all_v_wrapper",
            "split_tensor_along_dim",
        ),
        "gather_v_wrapper": primitives.gather_v,
        "scatter_v_wrapper": primitives.scatter_v,
    },
    "physicsnemo.domain_parallel": {
        **_SHARD_TENSOR,
        "ST_AVAILABLE": True,
        "ShardTensorSpec": spec.ShardTensorSpec,
        "register_custom_ops": patches.register_custom_ops,
        "sync_module_over_mesh": sync_module_over_mesh,
    },
    "physicsnemo.domain_parallel._shard_tensor_spec": _SPEC,
    "physicsnemo.domain_parallel.shard_tensor": _SHARD_TENSOR,
    "physicsnemo.domain_parallel.sync": {"sync_module_over_mesh": sync_module_over_mesh},
    "physicsnemo.domain_parallel.shard_utils": {"register_shard_wrappers": patches.register_custom_ops},
    "physicsnemo.domain_parallel.shard_utils.halo": _of(halos),
    "physicsnemo.domain_parallel.shard_utils.patch_core": _of(
        patches, "MissingShardPatch", "UndeterminedShardingError", "promote_to_iterable"
    ),
    "physicsnemo.domain_parallel.shard_utils.ring": _of(rings),
}
# Names that have no sense here, or stand for the inside of PhysicsNeMo's own handlers: what does the same.
_INSTEAD = {
    "RingSDPA": "call torch.nn.functional.scaled_dot_product_attention, whose method attention_method selects",
    "RingSDPABlocking": "call torch.nn.functional.scaled_dot_product_attention, whose method attention_method selects",
    "distributed_transpose": "call spmd.all_to_all(x, group, src=S(i), dst=S(j)), or redistribute() of a ShardTensor",
    "get_comm_stream": "perform_ring_iteration_async needs no stream of the caller",
    "halo_padding_fwd_primitive": "call halo_padding, which is differentiable",
    "halo_padding_bwd_primitive": "call halo_padding, which is differentiable",
    "perform_halo_collective": "call halo_padding, which is differentiable",
    "ring_sdpa": "call torch.nn.functional.scaled_dot_product_attention, whose method attention_method selects",
}


class _Names(ModuleType):
    """A module of `NAMES`, in no file."""

    def __init__(self, name: str, is_package: bool) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> NoReturn:
        if name in _INSTEAD:
            raise ImportError(f"{self.__name__}.{name} is not there in neuronx_dist: {_INSTEAD[name]}")
        raise AttributeError(f"module {self.__name__!r} of neuronx_dist has no attribute {name!r}")


def install(*, replace: bool = False) -> None:
    """Makes the modules of `NAMES` importable in this process, with this package's objects.

    Args:
        replace: whether to do so where PhysicsNeMo is installed; its other modules import these then.

    Raises:
        RuntimeError: modules of these names were imported already: two ShardTensors would meet.
    """
    if isinstance(sys.modules.get("physicsnemo.domain_parallel"), _Names):
        return
    if "physicsnemo" not in sys.modules and importlib.util.find_spec("physicsnemo") is None:
        sys.modules["physicsnemo"] = _Names("physicsnemo", True)
    elif not replace:
        warnings.warn(
            "physicsnemo is installed, and keeps its import names: call "
            "neuronx_dist.shard_tensor.physicsnemo.install(replace=True) to take physicsnemo.distributed and "
            "physicsnemo.domain_parallel from neuronx_dist",
            stacklevel=2,
        )
        return
    present = sorted(NAMES.keys() & sys.modules.keys())
    if present:
        raise RuntimeError(
            f"{', '.join(present)}: imported already; import neuronx_dist.shard_tensor.physicsnemo, and call "
            "install(replace=True), before anything that imports physicsnemo"
        )
    for name, names in NAMES.items():
        module = sys.modules[name] = _Names(name, any(other.startswith(f"{name}.") for other in NAMES))
        module.__dict__.update(names, __all__=list(names))
    importlib.import_module("physicsnemo")
    for name in NAMES:
        parent, _, child = name.rpartition(".")
        if child not in vars(sys.modules[parent]):  # physicsnemo.distributed.fused_all_reduce is a function, too
            setattr(sys.modules[parent], child, sys.modules[name])


install()
