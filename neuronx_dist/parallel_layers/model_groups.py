"""Groups of ranks that a model asks for, beside those of the mesh: `parallel_state` has these names."""

from __future__ import annotations

from typing import Any

from .. import comm
from . import parallel_state

__all__ = [
    "create_pg_with_ranks",
    "destroy_kv_group",
    "destroy_token_shuffle_group",
    "get_kv_shared_group",
    "get_kv_shared_group_size",
    "get_kv_shared_replica_groups",
    "get_token_shuffle_group",
    "get_token_shuffle_group_size",
    "get_token_shuffle_replica_groups",
    "initialize_kv_group",
    "initialize_token_shuffle_group",
    "share_kv_heads",
]


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Creates groups of consecutive data-parallel ranks, among which tokens are shuffled. The size divides dp."""
    dp = comm.size("dp")
    if dp % token_shuffle_group_size:
        raise ValueError(
            f"token shuffle group size {token_shuffle_group_size} does not divide the data parallel size {dp}"
        )
    _subgroups("token_shuffle", "dp", token_shuffle_group_size, sequential=True)


def get_token_shuffle_group(as_list: bool = False) -> Any:
    return _subgroup("token_shuffle", "initialize_token_shuffle_group", as_list)


def get_token_shuffle_replica_groups() -> list[list[int]]:
    return [*get_token_shuffle_group(as_list=True)]


def get_token_shuffle_group_size() -> int:
    return len(get_token_shuffle_group(as_list=True)[0])


def destroy_token_shuffle_group() -> None:
    comm.current().extras.pop("token_shuffle", None)


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
    if "kv_shared" not in comm.current().extras:
        axis = f"tp%{kv_shared_group_size}"
        groups = [*comm.current().mesh.groups(axis)]
        comm.current().extras["kv_shared"] = ((kv_shared_group_size, True), groups, comm.communicator(axis))


def get_kv_shared_group(as_list: bool = False) -> Any:
    return _subgroup("kv_shared", "initialize_kv_group", as_list)


def get_kv_shared_replica_groups() -> list[list[int]]:
    return [*get_kv_shared_group(as_list=True)]


def get_kv_shared_group_size() -> int:
    return len(get_kv_shared_group(as_list=True)[0])


def destroy_kv_group() -> None:
    comm.current().extras.pop("kv_shared", None)


def _subgroups(name: str, axis: str, size: int, sequential: bool) -> None:
    existing = comm.current().extras.get(name)
    if existing is not None:
        if existing[0] != (size, sequential):
            raise ValueError(
                f"{name} groups are already initialized with size {existing[0][0]}; all layers must use the same size"
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
