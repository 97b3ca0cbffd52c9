"""Groups of ranks: those of the mesh as lists, and others that a model asks for. `parallel_state` has these names."""

from __future__ import annotations

from typing import Any

from .. import comm
from . import parallel_state

__all__ = [
    "create_pg_with_ranks",
    "destroy_kv_group",
    "destroy_token_shuffle_group",
    "get_context_model_parallel_replica_groups",
    "get_context_model_parallel_src_tgt_pairs",
    "get_data_parallel_replica_groups",
    "get_expert_data_parallel_replica_groups",
    "get_expert_model_parallel_replica_groups",
    "get_expert_parallel_rank_from_global_rank",
    "get_experts_for_expert_parallel_rank",
    "get_kv_shared_group",
    "get_kv_shared_group_size",
    "get_kv_shared_replica_groups",
    "get_next_rank_group",
    "get_next_rank_replica_groups",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_replica_groups",
    "get_pipeline_model_parallel_sr_group",
    "get_prev_rank_group",
    "get_prev_rank_replica_groups",
    "get_tensor_model_parallel_replica_groups",
    "get_token_shuffle_group",
    "get_token_shuffle_group_size",
    "get_token_shuffle_replica_groups",
    "get_zero1_sharding_groups",
    "initialize_kv_group",
    "initialize_token_shuffle_group",
    "share_kv_heads",
]


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """All tensor-parallel groups, as lists of ranks."""
    return [*comm.current().mesh.groups("tp")]


def get_pipeline_model_parallel_replica_groups() -> list[list[int]]:
    """All pipeline groups, as lists of ranks."""
    return [*comm.current().mesh.groups("pp")]


def get_data_parallel_replica_groups() -> list[list[int]]:
    """All data-parallel groups, as lists of ranks."""
    return [*comm.current().mesh.groups("dp")]


def get_context_model_parallel_replica_groups() -> list[list[int]]:
    """All context-parallel groups, as lists of ranks."""
    return [*comm.current().mesh.groups("cp")]


def get_expert_model_parallel_replica_groups() -> list[list[int]]:
    """All expert-parallel groups, as lists of ranks."""
    return [*comm.current().mesh.groups("ep")]


def get_expert_data_parallel_replica_groups() -> list[list[int]]:
    """All expert-data-parallel groups, as lists of ranks."""
    return [*comm.current().mesh.groups("edp")]


def get_zero1_sharding_groups() -> list[list[int]]:
    """Groups over which ZeRO-1 shards: dp and cp merged."""
    return [*comm.current().mesh.groups(("dp", "cp"))]


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Creates groups of consecutive data-parallel ranks, among which tokens are shuffled. The size divides dp."""
    dp = comm.size("dp")
    if dp % token_shuffle_group_size:
        raise ValueError(
            f"token shuffle group size {token_shuffle_group_size} does not divide the data parallel size {dp}"
        )
    _subgroups("token_shuffle", "dp", token_shuffle_group_size, sequential=True)


def get_token_shuffle_group(as_list: bool = False) -> Any:
    """The group of ranks among which tokens are shuffled; with `as_list=True` all of them, as lists of ranks."""
    return _subgroup("token_shuffle", "initialize_token_shuffle_group", as_list)


def get_token_shuffle_replica_groups() -> list[list[int]]:
    """All groups of ranks among which tokens are shuffled, as lists of ranks."""
    return [*get_token_shuffle_group(as_list=True)]


def get_token_shuffle_group_size() -> int:
    """Number of ranks of a group among which tokens are shuffled."""
    return len(get_token_shuffle_group(as_list=True)[0])


def destroy_token_shuffle_group() -> None:
    """Forgets the groups. Safe to call twice, and after `destroy_model_parallel`."""
    _forget("token_shuffle")


def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> None:
    """Creates the groups of tensor-parallel ranks that share one key/value head.

    They are adjacent ranks, or strided ones (NxD's trn1 order).
    """
    tp = comm.size("tp")
    if tp % kv_shared_group_size:
        raise ValueError(f"kv shared group size {kv_shared_group_size} does not divide the tensor parallel size {tp}")
    _subgroups("kv_shared", "tp", kv_shared_group_size, sequential_ranks_in_group)


def share_kv_heads(kv_shared_group_size: int) -> None:
    """Makes `get_kv_shared_group` return adjacent ranks, as layers with this multiplier use, unless groups exist."""
    axis = f"tp%{kv_shared_group_size}"
    groups = [*comm.current().mesh.groups(axis)]
    existing = comm.current().extras.get("kv_shared")
    if existing is None:
        comm.current().extras["kv_shared"] = ((kv_shared_group_size, True), groups, comm.communicator(axis))
    elif sorted(map(list, existing[1])) != sorted(map(list, groups)):
        raise ValueError(
            f"kv_shared groups are {existing[1][:2]}, and a layer with kv_size_multiplier={kv_shared_group_size} has "
            f"its heads on {groups[:2]}: leave initialize_kv_group out, or call "
            f"initialize_kv_group({kv_shared_group_size}, sequential_ranks_in_group=True)"
        )


def get_kv_shared_group(as_list: bool = False) -> Any:
    """The group of ranks that share a key/value head; with `as_list=True` all of them, as lists of ranks."""
    return _subgroup("kv_shared", "initialize_kv_group", as_list)


def get_kv_shared_replica_groups() -> list[list[int]]:
    """All groups of ranks that share a key/value head, as lists of ranks."""
    return [*get_kv_shared_group(as_list=True)]


def get_kv_shared_group_size() -> int:
    """Number of ranks of a group that share a key/value head."""
    return len(get_kv_shared_group(as_list=True)[0])


def destroy_kv_group() -> None:
    """Forgets the groups. Safe to call twice, and after `destroy_model_parallel`."""
    _forget("kv_shared")


def _forget(name: str) -> None:
    if comm.is_initialized():
        comm.current().extras.pop(name, None)


def _subgroups(name: str, axis: str, size: int, sequential: bool) -> None:
    existing = comm.current().extras.get(name)
    if existing is not None:
        if existing[0] != (size, sequential):
            raise ValueError(
                f"{name} groups are already initialized with size {existing[0][0]}, of "
                f"{'adjacent' if existing[0][1] else 'strided'} ranks; all layers must use the same"
            )
        return
    groups: list[list[int]] = []
    for group in comm.current().mesh.groups(axis):
        count = len(group) // size
        groups += [group[i * size : (i + 1) * size] if sequential else group[i::count] for i in range(count)]
    comm.current().extras[name] = ((size, sequential), groups, comm.new_group(groups, name))


def _subgroup(name: str, builder: str, as_list: bool) -> Any:
    existing = comm.current().extras.get(name)
    if existing is None:
        raise RuntimeError(f"{name} group is not initialized: call {builder}(size) first")
    return existing[1] if as_list else parallel_state.process_group(existing[2])


def create_pg_with_ranks(ranks: list[int]) -> Any:
    """A group over the same pipeline stages (`ranks`: pp indices) of every pipeline: for weights that stages share."""
    return comm.new_group([[group[i] for i in ranks] for group in comm.current().mesh.groups("pp")], "shared_weight")


# Neighbouring stages, rings, experts.


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; after the last comes the first."""
    return _neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; before the first comes the last."""
    return _neighbour(-1)


def _neighbour(step: int) -> int:
    mesh, rank = comm.current().mesh, parallel_state.get_rank()
    group = mesh.group_of("pp", rank)
    return group[(group.index(rank) + step) % len(group)]


def get_pipeline_model_parallel_sr_group(parity: int | None = None) -> list[list[int]]:
    """`[rank, rank of the next stage]` of every stage of every pipeline; with a parity, of the even (0) or odd ones."""
    stages = range(comm.current().mesh.pp) if parity is None else range(parity, comm.current().mesh.pp, 2)
    return [[group[i], group[(i + 1) % len(group)]] for group in comm.current().mesh.groups("pp") for i in stages]


def get_next_rank_group(as_list: bool = False) -> Any:
    """The group of this rank and the next stage's rank; as lists: these pairs for all stages of the same parity.

    The first call, of this function or `get_prev_rank_group`, makes the groups: all ranks call it together.
    """
    return _pair_of_stages(comm.rank("pp"), as_list)


def get_prev_rank_group(as_list: bool = False) -> Any:
    """The group of the previous stage's rank and this rank, like `get_next_rank_group`."""
    return _pair_of_stages(comm.rank("pp") - 1, as_list)


def _pair_of_stages(first: int, as_list: bool) -> Any:
    pipelines, pp = comm.current().mesh.groups("pp"), comm.current().mesh.pp
    if pp == 1:
        raise ValueError("a pipeline of one stage (pipeline parallel size 1) has no neighbouring stages")
    if as_list:
        return get_pipeline_model_parallel_sr_group(first % pp % 2)
    pairs = comm.current().extras.get("pairs_of_stages")
    if pairs is None:
        ranks = [[sorted((group[i], group[(i + 1) % pp])) for group in pipelines] for i in range(pp)]
        pairs = comm.current().extras["pairs_of_stages"] = [comm.new_group(lists, "pp_pair") for lists in ranks]
    return parallel_state.process_group(pairs[first])


def get_next_rank_replica_groups() -> list[list[int]]:
    """Pairs of ranks of a stage and the next one, for all stages."""
    return [*get_next_rank_group(as_list=True)]


def get_prev_rank_replica_groups() -> list[list[int]]:
    """Pairs of ranks of a stage and the one before, for all stages."""
    return [*get_prev_rank_group(as_list=True)]


def get_context_model_parallel_src_tgt_pairs() -> list[tuple[int, int]]:
    """The ring over cp: `(source, target)` global ranks, of every ring."""
    return [
        (group[i], group[(i + 1) % len(group)]) for group in comm.current().mesh.groups("cp") for i in range(len(group))
    ]


def get_expert_parallel_rank_from_global_rank(rank: int, expert_parallel_group: Any = None) -> int:
    """Expert-parallel rank of a global rank (in the current mesh, or in an explicit list of ranks)."""
    if expert_parallel_group is None:
        return comm.current().mesh.coordinate("ep", rank)
    ranks = getattr(expert_parallel_group, "ranks", expert_parallel_group)
    return list(ranks).index(rank)


def get_experts_for_expert_parallel_rank(
    expert_parallel_rank: int,
    total_number_of_experts: int,
    expert_model_parallel_size: int,
    expert_distribution: list[list[int]] | None = None,
) -> list[int]:
    """Numbers of the experts which an expert-parallel rank holds: consecutive ones, unless a distribution is passed."""
    if expert_distribution is not None:
        return list(expert_distribution[expert_parallel_rank])
    if total_number_of_experts % expert_model_parallel_size:
        raise ValueError(
            f"{total_number_of_experts} experts are not divisible by expert parallel size {expert_model_parallel_size}"
        )
    count = total_number_of_experts // expert_model_parallel_size
    return list(range(expert_parallel_rank * count, (expert_parallel_rank + 1) * count))
