"""Whole matrices for an optimizer of shards: the rank that gets each matrix, computes with it, and returns its rows.

    rows of a rank   [rows of its tp shard / degree, columns]   of each matrix, in bfloat16
       exchange ->   the owner has all rows of all tp shards: the matrix `[out, in]` of one process, without padding
       compute       on the owner alone
    <- exchange      each rank gets the rows that it sent, ranks with the same rows too

Two exchanges a step, over dp x cp x tp: of n elements in matrices a rank sends and receives about n / (dp * cp * tp)
elements in each. Owners have no state, so that optimizer states and checkpoints are those of an elementwise optimizer.
(Liu et al., "Muon is Scalable for LLM Training", 2025, gather likewise, on every rank.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..comm.rank_selection import in_one_program
from ..gradients.buckets import is_anywhere, presence
from ..gradients.gradient import DATA_AXES
from ..weights.shard_spec import ShardSpec, spec_of
from .shards import ParameterShard

__all__ = ["MatrixOwners", "balanced"]

_WIRE = torch.bfloat16  # in which the iterations compute, so that nothing is lost


class _Member(NamedTuple):
    """One rank of the exchange: the number of its rows, the number of its copy of them, its tp coordinate."""

    number: int
    replica: int
    tp: int


class _Matrix(NamedTuple):
    shard: ParameterShard
    spec: ShardSpec

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration: two products `[s, l] x [l, s]`, one of `[s, s]`."""
        small, large = sorted(self.spec.unpadded_shape)
        return small * small * (2 * large + small)

    def rows(self, member: _Member) -> slice:
        """The member's rows of its tp shard, without padding."""
        rows, rows_per_rank = self.shard.param.shape[0], self.shard.shape[0]
        return slice(min(member.number * rows_per_rank, rows), min((member.number + 1) * rows_per_rank, rows))

    def numel(self, member: _Member) -> int:
        rows = self.rows(member)
        return (rows.stop - rows.start) * self.shard.param.shape[1]

    def part(self, whole: Tensor, member: _Member) -> Tensor:
        """The member's rows of a whole matrix."""
        return self.spec.local_slice(whole, self.spec.index_of(member.tp))[self.rows(member)]

    def sends(self, member: _Member) -> bool:
        """Returns whether the member is the first rank that has its rows."""
        return member.replica == 0 and self.spec.is_first(member.tp)


class MatrixOwners:
    """The owners of the matrices of one pipeline stage, balanced by their cost.

    Args:
        place_of: returns `(number of a rank's rows, number of its copy of them)` among the data-parallel ranks.
    """

    def __init__(self, place_of: Callable[[int], tuple[int, int]]) -> None:
        self._group = comm.communicator((*DATA_AXES, "tp"))
        mesh = comm.current().mesh
        self._members = [_Member(*place_of(rank), mesh.coordinate("tp", rank)) for rank in self._group.ranks]
        self._matrices: list[_Matrix] = []

    def add(self, param: Tensor, shard: ParameterShard, name: str) -> None:
        """Adds a matrix.

        Args:
            param: the parameter; `shard.param` is its local tensor, if it is a ShardTensor.
            name: the parameter's, for messages.

        Raises:
            ValueError: the parameter is one of experts, or a sharded ShardTensor.
            NotImplementedError: it is on XLA, whose ranks share one program.
        """
        spec = spec_of(shard.param)
        what = f"Muon got {name} of shape {tuple(param.shape)}"
        if not all(placement.is_replicate() for placement in getattr(param, "placements", ())):
            raise ValueError(f"{what}, a sharded ShardTensor: put it into a group of AdamW, or use parallel layers")
        if spec.experts or shard.gradient.is_expert:
            raise ValueError(f"{what}, whose rows are experts, and no matrix: put it into a group of AdamW")
        if in_one_program(shard.param):
            raise NotImplementedError(
                f"{what} on XLA, where all ranks run one program and none can compute alone: use AdamW there"
            )
        self._matrices.append(_Matrix(shard, spec))

    def fill_gradients(self, masters: Sequence[Tensor]) -> None:
        """Sets zeros where a matrix has a gradient on other ranks of tp and none here, as its rows have in one process.

        All ranks of tp call it together. Those of dp and cp agree already.
        """
        tp = comm.communicator("tp")
        if tp.size > 1 and masters:
            counts = comm.all_reduce(presence([x.grad is not None for x in masters], masters[0], tp), tp)
            for master, count in zip(masters, counts):
                if master.grad is None and is_anywhere(count):  # waits for the device, where one is missing
                    master.grad = torch.zeros_like(master)

    def shapes(self, masters: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """The shapes of the whole matrices, without padding."""
        return [matrix.spec.unpadded_shape for matrix in self._of(masters)]

    def _of(self, masters: Sequence[Tensor]) -> list[_Matrix]:
        by_id = {id(matrix.shard.master): matrix for matrix in self._matrices}
        return [by_id[id(master)] for master in masters]

    def compute(
        self, masters: Sequence[Tensor], value_of: Callable[[int], Tensor], function: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Calls `function(number, matrix)` on the owner of each matrix; returns this rank's rows of the results.

        All ranks of the stage call it together.

        Args:
            masters: the shards, in the same order on all ranks.
            value_of: returns a bfloat16 tensor of a shard's shape by its number. It is called once for each, in order.

        Returns:
            The rows of each result that this rank has, without padding.
        """
        matrices = self._of(masters)
        owners = balanced([matrix.cost for matrix in matrices], len(self._members))
        numbers_of: list[list[int]] = [[] for _ in self._members]
        for number, owner in enumerate(owners):
            numbers_of[owner].append(number)
        parts = self._collected(matrices, numbers_of, value_of)
        results = {number: function(number, _assembled(matrices[number], parts[number])) for number in parts}
        return self._returned(matrices, numbers_of, results)

    def _collected(
        self, matrices: Sequence[_Matrix], numbers_of: Sequence[Sequence[int]], value_of: Callable[[int], Tensor]
    ) -> dict[int, dict[tuple[int, int], Tensor]]:
        """The rows of each matrix that this rank owns, by number of the tp shard and number of the rows."""
        rank = int(self._group.rank)
        here, owned = self._members[rank], numbers_of[rank]
        values = [value_of(number) for number in range(len(matrices))]
        sends = [
            [values[n].reshape(-1)[: matrices[n].numel(here)] for n in numbers if matrices[n].sends(here)]
            for numbers in numbers_of
        ]
        sent_here = [[n for n in owned if matrices[n].sends(member)] for member in self._members]
        sizes = [[matrices[n].numel(member) for n in numbers] for member, numbers in zip(self._members, sent_here)]
        parts: dict[int, dict[tuple[int, int], Tensor]] = {number: {} for number in owned}
        for member, numbers, blocks in zip(self._members, sent_here, self._exchange(sends, sizes, values[0].device)):
            for number, block in zip(numbers, blocks):
                parts[number][matrices[number].spec.index_of(member.tp), member.number] = block
        return parts

    def _returned(
        self, matrices: Sequence[_Matrix], numbers_of: Sequence[Sequence[int]], results: dict[int, Tensor]
    ) -> list[Tensor]:
        """This rank's rows of the results of all owners, in the order of the matrices."""
        here = self._members[int(self._group.rank)]
        sends = [[matrices[n].part(result, member) for n, result in results.items()] for member in self._members]
        sizes = [[matrices[n].numel(here) for n in numbers] for numbers in numbers_of]
        received = self._exchange(sends, sizes, matrices[0].shard.master.device)
        rows = {n: block for numbers, blocks in zip(numbers_of, received) for n, block in zip(numbers, blocks)}
        return [rows[n].view(-1, matrix.shard.param.shape[1]) for n, matrix in enumerate(matrices)]

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], device: torch.device
    ) -> list[tuple[Tensor, ...]]:
        """Sends lists of tensors to the members; returns those that each member sent here, flat, by their sizes."""
        empty = torch.empty(0, dtype=_WIRE, device=device)
        flat = [torch.cat([x.reshape(-1) for x in xs]) if xs else empty for xs in sends]
        received = [empty.new_empty(sum(numels)) for numels in sizes]
        comm.exchange(flat, received, self._group)
        return [x.split(list(numels)) if numels else () for x, numels in zip(received, sizes)]


def _assembled(matrix: _Matrix, parts: dict[tuple[int, int], Tensor]) -> Tensor:
    """The whole matrix, without padding, from its rows by `(number of the tp shard, number of the rows)`."""
    columns = matrix.shard.param.shape[1]
    shards = [
        torch.cat([part for (number, _), part in sorted(parts.items()) if number == index]).view(-1, columns)
        for index in range(matrix.spec.num_partitions)
    ]
    return matrix.spec.assemble(shards)


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns an owner for each cost: the rank with the least so far, the largest cost first."""
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + costs[number], owners[number]))
    return owners
