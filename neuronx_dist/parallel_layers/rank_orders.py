"""NxD's choice of a rank order, its stored sizes, and its store: names of `parallel_state` that few scripts read.

Here `initialize_model_parallel(topology=...)` chooses the order, and sizes and ranks follow from the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch.distributed as dist

from .. import comm
from ..mesh import Mesh
from ..topology import LINEAR
from ..torch_internals.distributed import default_store
from . import parallel_state

__all__ = [
    "PG_Group_Logic",
    "arrange_kv_groups",
    "ascending_descending_ring_PG_group",
    "ascending_ring_PG_group",
    "get_aot_mode",
    "get_logic_chosen",
    "get_pp_gloo_group",
    "get_tcp_store",
    "initialize_pp_gloo_groups",
    "is_tcp_store_available",
    "set_aot_mode",
    "set_context_model_parallel_size",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_size",
]


def ascending_ring_PG_group(
    lnc_size: int,
    cluster_ranks_nonexp: Any,
    cluster_ranks_exp: Any,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> parallel_state.ParallelGroups:
    """Returns the groups of every axis, of ranks in the order of their numbers.

    `cluster_ranks_...` are grids of all ranks, `[pp, dp, cp, tp]` and `[pp, edp, ep, tp]`, of which the size counts.
    """
    return _groups(cluster_ranks_nonexp.numel(), tp, pp, cp, ep_model_degree)


def ascending_descending_ring_PG_group(
    lnc_size: int,
    cluster_ranks_nonexp: Any,
    cluster_ranks_exp: Any,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> parallel_state.ParallelGroups:
    """Returns the groups of every axis on trn2's torus of 64 ranks a node (`topology.py`).

    As in upstream, and unlike the topology "trn2" here, groups of experts are those of the linear order.
    """
    world = cluster_ranks_nonexp.numel()
    linear, torus = (_groups(world, tp, pp, cp, ep_model_degree, topology) for topology in (LINEAR, "trn2"))
    same = {"ep_model_groups": linear.ep_model_groups, "ep_data_groups": linear.ep_data_groups}
    same |= {"dp_groups": linear.dp_groups} if dp == 1 else {}  # groups of one rank
    same |= {"pp_groups": linear.pp_groups} if pp == 1 else {}
    return torus._replace(**same)


def _groups(world: int, tp: int, pp: int, cp: int, ep: int, topology: str = LINEAR) -> parallel_state.ParallelGroups:
    mesh = Mesh(world, tp=tp, pp=pp, cp=cp, ep=ep, topology=topology)
    return parallel_state.ParallelGroups(*([*mesh.groups(axis)] for axis in ("tp", "dp", "pp", "ep", "edp", "cp")))


class PG_Group_Logic(Enum):
    """The two rank orders, each with the function that makes its groups; a member can be called like it."""

    LOGIC1 = (ascending_ring_PG_group, "Ascending Ring PG Group")
    LOGIC2 = (ascending_descending_ring_PG_group, "Ascending Descending Ring PG Group")

    def __init__(self, func: Callable[..., Any], description: str) -> None:
        self.func, self.description = func, description

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)


def get_logic_chosen(lnc_size: int, hardware_type: Any, tp: int) -> PG_Group_Logic:
    """Returns the rank order that NxD chooses: LOGIC2 on trn2 where a tensor parallel group is half of a node or more.

    That is a size of 64 with lnc_size=1, and of 32 with lnc_size=2 in worlds of 64 ranks or more. Nothing here changes
    by it: pass `topology="trn2"` to `initialize_model_parallel`.
    """
    on_torus = getattr(hardware_type, "value", hardware_type) == "trn2" and (lnc_size, tp) in ((1, 64), (2, 32))
    return (
        PG_Group_Logic.LOGIC2 if on_torus and (lnc_size == 1 or dist.get_world_size() >= 64) else PG_Group_Logic.LOGIC1
    )


def arrange_kv_groups(
    num_tensor_model_parallel_groups: int = 1,
    tensor_model_parallel_size: int = 1,
    kv_shared_group_size: int = 1,
    sequential_ranks_in_group: bool = False,
    hardware_type: Any = "trn1",
) -> list[list[int]]:
    """Returns the groups of ranks that share one key/value head: adjacent ranks, or strided ones (trn1's order)."""
    adjacent = sequential_ranks_in_group or getattr(hardware_type, "value", hardware_type) == "trn2"
    size, count = kv_shared_group_size, tensor_model_parallel_size // kv_shared_group_size
    groups: list[list[int]] = []
    for first in range(0, num_tensor_model_parallel_groups * tensor_model_parallel_size, tensor_model_parallel_size):
        ranks = range(first, first + tensor_model_parallel_size)
        groups += [[*(ranks[i * size : (i + 1) * size] if adjacent else ranks[i::count])] for i in range(count)]
    return groups


def _refuse_other(name: str, value: int, here: int) -> None:
    if value != here:
        raise ValueError(
            f"{name}({value}): it is {here} in this mesh, from which sizes and ranks follow: call "
            "initialize_model_parallel with other sizes, or play another rank by comm.as_rank(mesh, rank)"
        )


def set_tensor_model_parallel_size(world_size: int) -> None:
    """Raises ValueError for another size than the mesh's: no size is stored beside it."""
    _refuse_other("set_tensor_model_parallel_size", world_size, comm.size("tp"))


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Raises ValueError for another rank than the mesh's: no rank is stored beside it."""
    _refuse_other("set_tensor_model_parallel_rank", rank, comm.rank("tp"))


def set_expert_model_parallel_size(world_size: int) -> None:
    """Raises ValueError for another size than the mesh's: no size is stored beside it."""
    _refuse_other("set_expert_model_parallel_size", world_size, comm.size("ep"))


def set_expert_model_parallel_rank(rank: int) -> None:
    """Raises ValueError for another rank than the mesh's: no rank is stored beside it."""
    _refuse_other("set_expert_model_parallel_rank", rank, comm.rank("ep"))


def set_context_model_parallel_size(world_size: int) -> None:
    """Raises ValueError for another size than the mesh's: no size is stored beside it."""
    _refuse_other("set_context_model_parallel_size", world_size, comm.size("cp"))


def set_aot_mode(mode: bool) -> None:
    """Raises NotImplementedError for True: ahead-of-time tracing is inference's."""
    if mode:
        raise NotImplementedError(
            "set_aot_mode(True) is for inference that Neuron's compiler traces ahead of time; to build a model without "
            "values use init_on_device('meta')"
        )


def get_aot_mode() -> bool:
    """Returns False: nothing is traced ahead of time."""
    return False


def is_tcp_store_available() -> bool:
    """Returns True: every torch that this package supports has a store."""
    return True


def get_tcp_store() -> Any:
    """Returns the store of the job's processes."""
    return default_store()


def initialize_pp_gloo_groups() -> None:
    """Does nothing: Python objects travel along every axis, whatever its backend (`gather_python_object`)."""


def get_pp_gloo_group() -> Any:
    """Returns the pipeline-parallel group; Python objects travel in it, whatever its backend."""
    return parallel_state.get_pipeline_model_parallel_group()
