"""The ranks over which a parameter's optimizer state is divided, and over which its gradient is summed.

    data ranks   those whose data make a parameter's gradient: dp x cp, for experts edp
    group        the data ranks that divide the parameter's rows: all of them, or those of one sharding group
    replicas     the ranks with the same rows, one of each group: one rank, if a group has all data ranks

With groups smaller than the data ranks (hybrid sharding) a gradient is reduce-scattered in its group, and this rank's
rows are all-reduced over the replicas: what crosses from group to group is 1/size of the gradient. Updated rows are
gathered in the group alone. (ZeRO++, Wang et al., 2023, and FSDP's HYBRID_SHARD divide a model likewise.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import comm
from ..gradients.gradient import DATA_AXES, ParameterGradient
from ..gradients.norm import norm_groups

__all__ = ["DataSharding", "Sharding", "Unsharded"]

_EXPERT_AXES = ("edp",)


class Sharding(NamedTuple):
    """The division of one parameter over ranks.

    Attributes:
        group: the ranks that divide its rows.
        replicas: the ranks that have the same rows as this one, over which their gradient is summed too.
        scale: factor of the sum of their gradients: it makes the sum the mean over the data, or is 1.
    """

    group: comm.Communicator
    replicas: comm.Communicator
    scale: float


class Unsharded:
    """Each rank has all rows of its parameters, and their gradients are averaged over the data already.

    Attributes:
        norm_groups: over which the powers of the ranks' norms are summed.
    """

    def __init__(self) -> None:
        self.norm_groups = norm_groups(False, None)

    def of(self, gradient: ParameterGradient) -> Sharding:
        """The sharding of the parameter that has this gradient: there is none."""
        alone = comm.communicator(())
        return Sharding(alone, alone, 1.0)

    def place(self, rank: int) -> tuple[int, int]:
        """The number of a rank's rows, and the number of its copy of them: each rank has all rows."""
        return 0, comm.current().mesh.coordinate(DATA_AXES, rank)


class DataSharding:
    """The sharding of each parameter. All ranks of the job make it together.

    Args:
        groups: lists of ranks which together are the world, or the Communicator of an axis. Each list is a part of the
            data ranks of one model replica, and all parts have equal sizes. Experts are divided among the ranks of a
            list that hold the same experts. None: all data ranks.
        average: gradients become the mean over the data; False: their sum.

    Attributes:
        norm_groups: over which the powers of the ranks' norms are summed.

    Raises:
        ValueError: the groups do not fit the mesh; the message says which does not.
    """

    norm_groups = ("world",)

    def __init__(self, groups: Any = None, average: bool = True) -> None:
        self._average = average
        axes = [DATA_AXES, *([_EXPERT_AXES] if comm.size("ep") > 1 else [])]
        self._number_of: dict[int, int] = {}  # of a rank's list
        if groups is None:
            self._groups = {axis: (comm.communicator(axis), comm.communicator(())) for axis in axes}
        else:
            lists = _checked(_lists(groups))
            self._number_of = {rank: number for number, ranks in enumerate(lists) for rank in ranks}
            self._groups = {axis: _groups_along(axis, self._number_of) for axis in axes}

    def of(self, gradient: ParameterGradient) -> Sharding:
        """The sharding of the parameter that has this gradient."""
        scale = 1 / comm.size(DATA_AXES) if self._average else 1.0
        return Sharding(*self._groups[gradient.data_axis], scale)

    def place(self, rank: int) -> tuple[int, int]:
        """The number of a rank's rows, and the number of its copy of them, of parameters that are no experts."""
        parts = _parts(comm.current().mesh.group_of(DATA_AXES, rank), self._number_of)
        return next((part.index(rank), replica) for replica, part in enumerate(parts) if rank in part)


def _parts(data_ranks: Sequence[int], number_of: Mapping[int, int]) -> list[list[int]]:
    """The sharding groups among data ranks, which those of one list form."""
    parts: dict[int, list[int]] = {}
    for rank in data_ranks:
        parts.setdefault(number_of.get(rank, 0), []).append(rank)
    return [*parts.values()]


def _groups_along(axis: tuple[str, ...], number_of: Mapping[int, int]) -> tuple[comm.Communicator, comm.Communicator]:
    """This rank's sharding group among the ranks along `axis`, and its replicas."""
    groups: list[list[int]] = []
    replicas: list[list[int]] = []
    for data_ranks in comm.current().mesh.groups(axis):
        parts = _parts(data_ranks, number_of)
        if len({*map(len, parts)}) > 1:
            raise ValueError(
                f"sharding_groups divide the ranks {data_ranks} along {','.join(axis)} into {parts}: the "
                f"parts must have equal sizes"
            )
        groups += parts
        replicas += map(list, zip(*parts))
    return _communicator(groups, "sharding"), _communicator(replicas, "replicas")


def _communicator(lists: list[list[int]], label: str) -> comm.Communicator:
    """The communicator over lists of ranks which together are the world: that of an axis, if it has these groups."""
    mesh = comm.current().mesh
    axis = mesh.axis_of(lists[0]) if len(lists[0]) > 1 else ()
    if axis is not None and sorted(mesh.groups(axis)) == sorted(lists):
        return comm.communicator(axis)
    group = comm.new_group(lists, label)
    assert group is not None  # they hold all ranks
    return group


def _lists(groups: Any) -> Iterable[Iterable[int]]:
    if not isinstance(groups, comm.Communicator):
        return groups
    mesh = comm.current().mesh
    axis = mesh.axis_of(groups.ranks) if groups.size > 1 else ()
    if axis is None:
        raise ValueError(
            f"sharding_groups is a Communicator over the ranks {list(groups.ranks)}, which are not an axis of "
            f"{mesh}, so the groups of other ranks are unknown: pass lists of ranks of all groups"
        )
    return mesh.groups(axis)


def _checked(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """The groups as lists.

    Raises:
        ValueError: a rank is in none of them or in two, or a group has ranks of different parts of the model.
    """
    lists = [list(ranks) for ranks in groups]
    mesh = comm.current().mesh
    listed = sorted(rank for ranks in lists for rank in ranks)
    if listed != list(range(mesh.world_size)):
        missing = sorted({*range(mesh.world_size)} - {*listed})
        fault = f"do not hold rank {missing[0]}" if missing else "hold a rank twice, or one that does not exist"
        raise ValueError(
            f"sharding_groups {lists} {fault}: each rank of the world, 0..{mesh.world_size - 1}, must be in exactly "
            "one of them"
        )
    for ranks in lists:
        others = {*ranks} - {*mesh.group_of(DATA_AXES, ranks[0])} if ranks else set()
        if others:
            raise ValueError(
                f"sharding group {ranks} has ranks with different parts of the model: rank {min(others)} differs "
                f"from rank {ranks[0]} in more than dp and cp. Split the groups of {','.join(DATA_AXES)}, "
                f"{[*mesh.groups(DATA_AXES)]}, into parts"
            )
    return lists
