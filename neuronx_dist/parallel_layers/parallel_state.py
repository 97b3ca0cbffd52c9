"""NxD's `parallel_state`: one mesh, and one getter for each fact that a training script reads from it.

The state is the current context (`neuronx_dist.comm.context`), which `initialize_model_parallel` sets for the process,
or `comm.as_rank` for a thread. Names and rank orders are those of NeuronX Distributed. Sizes that do not divide raise;
no size is clamped.
"""

from __future__ import annotations

import os
from collections import namedtuple
from typing import Any

from .. import comm, gradients, weights
from ..comm import context
from ..lazy_names import lazy_names
from ..mesh import Axis, Mesh
from ..topology import LINEAR

# Loaded at the first use, so that importing the package stays quick.
_LAZY = {
    "utils": "move_model_to_device",  # which the API guide lists here
    "model_groups": "create_pg_with_ranks destroy_kv_group destroy_token_shuffle_group "
    "get_context_model_parallel_replica_groups get_data_parallel_replica_groups get_zero1_sharding_groups "
    "get_expert_data_parallel_replica_groups get_expert_model_parallel_replica_groups "
    "get_pipeline_model_parallel_replica_groups get_tensor_model_parallel_replica_groups "
    "get_context_model_parallel_src_tgt_pairs get_expert_parallel_rank_from_global_rank "
    "get_experts_for_expert_parallel_rank get_kv_shared_group get_kv_shared_group_size "
    "get_kv_shared_replica_groups get_next_rank_group get_next_rank_replica_groups "
    "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank "
    "get_pipeline_model_parallel_sr_group get_prev_rank_group get_prev_rank_replica_groups "
    "get_token_shuffle_group get_token_shuffle_group_size get_token_shuffle_replica_groups "
    "initialize_kv_group initialize_token_shuffle_group",
    "rank_orders": "PG_Group_Logic arrange_kv_groups ascending_descending_ring_PG_group ascending_ring_PG_group "
    "get_aot_mode get_logic_chosen get_pp_gloo_group get_tcp_store initialize_pp_gloo_groups "
    "is_tcp_store_available set_aot_mode set_context_model_parallel_size set_expert_model_parallel_rank "
    "set_expert_model_parallel_size set_tensor_model_parallel_rank set_tensor_model_parallel_size",
    "neuron_only": "get_speculative_draft_group get_speculative_draft_replica_groups "
    "initialize_speculative_draft_group",
}
__getattr__ = lazy_names(
    __name__, {x: f"parallel_layers.{file}" for file, names in _LAZY.items() for x in names.split()}
)

#: The groups of all axes, as lists of ranks: what `initialize_model_parallel(mesh_only=True)` returns.
ParallelGroups = namedtuple("ParallelGroups", "tp_groups dp_groups pp_groups ep_model_groups ep_data_groups cp_groups")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
    *,
    topology: str | None = None,
    timeout: float | None = None,
) -> ParallelGroups | None:
    """Lays the ranks out as (pp, dp, cp, tp), tp fastest, and creates their process groups.

    dp is the size of the world divided by the other sizes. A second call for the same layout changes nothing.

    NxD chooses another order by the hardware: "trn1" on trn1 and inf2 at a tensor parallel size of 4; "trn2" on trn2 at
    64 with lnc_size=1, and at 32 with lnc_size=2 and 64 or more ranks. Here only `topology` chooses.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size:
            degrees.
        skip_collective_init: make process groups when first used instead of now.
        lnc_size: accepted for compatibility; NxD derives from it what `topology` states here.
        mesh_only: return the replica groups as lists of ranks, and set up nothing.
        topology: "trn1" or "trn2" (`neuronx_dist/topology.py`), for nodes of LOCAL_WORLD_SIZE ranks, where torchrun has
            set it; None: the linear order.
        timeout: seconds after which a collective gives up on a silent rank; None: the timeout passed to
            init_process_group, or 10 minutes.

    Raises:
        RuntimeError: torch.distributed is not initialized, or model parallel already is: with another layout, or in a
            world that was destroyed since.
        ValueError: a size that is not positive, sizes that do not divide the world, or a topology that is not for them.
    """
    world_size, _ = comm.launch.world()
    node = os.environ.get("LOCAL_WORLD_SIZE") if topology else None
    mesh = Mesh(
        world_size,
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        topology=topology or LINEAR,
        ranks_per_node=int(node) if node else None,
    )
    if mesh_only:
        return ParallelGroups(*([*mesh.groups(axis)] for axis in ("tp", "dp", "pp", "ep", "edp", "cp")))
    if mesh.world_size > 1:
        weights.wrappers.watch_wrappers()
        weights.parametrized.watch_parametrizations()
        gradients.guards.watch_clipping()
        gradients.guards.watch_optimizers()
    existing = context.default()
    if existing is None:
        comm.launch.connect(mesh, timeout=timeout, lazy=skip_collective_init)
    elif existing.mesh != mesh:
        raise RuntimeError(
            f"model parallel is already initialized as {existing.mesh}, but {mesh} is requested: call "
            "destroy_model_parallel() first, or request the same sizes"
        )
    elif not existing.backend.is_connected():
        raise RuntimeError(
            "model parallel is initialized on process groups that torch.distributed.destroy_process_group() has "
            "destroyed: call destroy_model_parallel() first"
        )
    return None


def destroy_model_parallel() -> None:
    """Destroys the process groups of `initialize_model_parallel`, and forgets the mesh. Safe to call twice."""
    comm.launch.disconnect()


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called, and `destroy_model_parallel` was not since."""
    return context.is_initialized()


def get_mesh() -> Mesh:
    """The current mesh: axis sizes, replica groups, coordinates."""
    return context.current().mesh


def get_rank() -> int:
    """This rank's number in the job."""
    return context.current().rank


def _group(axis: Axis, as_list: bool) -> Any:
    return [*get_mesh().groups(axis)] if as_list else process_group(comm.communicator(axis))


def process_group(communicator: comm.Communicator) -> Any:
    """The torch ProcessGroup of a communicator.

    Where the backend has no process groups (ranks as threads, shapes), the communicator itself.
    """
    return context.current().backend.process_group(communicator)


# Groups: the torch ProcessGroup of this rank, or with as_list=True all replica groups as lists of ranks.


def get_tensor_model_parallel_group(as_list: bool = False) -> Any:
    """The tensor-parallel group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("tp", as_list)


def get_pipeline_model_parallel_group(as_list: bool = False) -> Any:
    """The pipeline group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("pp", as_list)


def get_data_parallel_group(as_list: bool = False) -> Any:
    """The data-parallel group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("dp", as_list)


def get_context_model_parallel_group(as_list: bool = False) -> Any:
    """The context-parallel group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("cp", as_list)


def get_expert_model_parallel_group(as_list: bool = False) -> Any:
    """The expert-parallel group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("ep", as_list)


def get_expert_data_parallel_group(as_list: bool = False) -> Any:
    """The expert-data-parallel group of this rank; with `as_list=True` all of them, as lists of ranks."""
    return _group("edp", as_list)


def get_world_group(as_list: bool = False) -> Any:
    """The group of all ranks; with `as_list=True` a list with the list of ranks."""
    return _group("world", as_list)


# Sizes and ranks.


def get_tensor_model_parallel_size() -> int:
    """Number of ranks along tp."""
    return comm.size("tp")


def get_pipeline_model_parallel_size() -> int:
    """Number of ranks along pp."""
    return comm.size("pp")


def get_data_parallel_size() -> int:
    """Number of ranks along dp."""
    return comm.size("dp")


def get_context_model_parallel_size() -> int:
    """Number of ranks along cp."""
    return comm.size("cp")


def get_expert_model_parallel_size() -> int:
    """Number of ranks along ep."""
    return comm.size("ep")


def get_expert_data_parallel_size() -> int:
    """Number of ranks along edp."""
    return comm.size("edp")


def get_tensor_model_parallel_rank() -> int:
    """Index of this rank along tp."""
    return comm.rank("tp")


def get_pipeline_model_parallel_rank() -> int:
    """Index of this rank along pp."""
    return comm.rank("pp")


def get_data_parallel_rank() -> int:
    """Index of this rank along dp."""
    return comm.rank("dp")


def get_context_model_parallel_rank() -> int:
    """Index of this rank along cp."""
    return comm.rank("cp")


def get_expert_model_parallel_rank() -> int:
    """Index of this rank along ep."""
    return comm.rank("ep")


def get_expert_data_parallel_rank() -> int:
    """Index of this rank along edp."""
    return comm.rank("edp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's tensor-parallel group."""
    return get_mesh().group_of("tp", get_rank())[0]


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's data-parallel group."""
    return get_mesh().group_of("dp", get_rank())[0]


# Messages and small things.


def is_global_rank_zero() -> bool:
    """Whether this is rank 0 of the job, which prints and writes."""
    return get_rank() == 0


def get_rank_info_str() -> str:
    """This rank with its coordinates: `rank_0_pp0_tp0_dp0_cp0`."""
    at = get_mesh().coordinates(get_rank())
    return f"rank_{get_rank()}_pp{at['pp']}_tp{at['tp']}_dp{at['dp']}_cp{at['cp']}"


def rmsg(msg: Any) -> str:
    """Prefixes `msg` with this rank's coordinates: `[rank_0_pp0_tp0_dp0_cp0] msg`."""
    return (
        f"[{get_rank_info_str()}] {msg}" if context.is_initialized() else f"[rank_{os.environ.get('RANK', '?')}] {msg}"
    )


def rmsg_ep(msg: Any) -> str:
    """Prefixes `msg` with this rank's coordinates in the expert view, like `rmsg`."""
    at = get_mesh().coordinates(get_rank())
    return f"[rank_{get_rank()}_pp{at['pp']}_tp{at['tp']}_ep{at['ep']}_edp{at['edp']}] {msg}"


def gather_python_object(obj: Any, group: Any) -> list[Any]:
    """Every rank's object, in the order of the group (an axis name or a process group)."""
    return comm.gather_objects(obj, group)
