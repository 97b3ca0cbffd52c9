"""Alignment of the ranks' programs: the ranks that run a program together, and an order without a deadlock.

All ranks of a pipeline stage run the same programs. A program that communicates between stages runs on every rank in
its replica groups, and must be the same program on all of them. On a cluster, an error here would be a hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..mesh import Mesh
from .programs import Program, ProgramsDiffer, check_groups, check_one_program
from .traces import Launch

__all__ = ["Joint", "align"]


class Joint(NamedTuple):
    """A program that `ranks` run together, with each rank's launch of it."""

    ranks: tuple[int, ...]
    launches: tuple[Launch, ...]

    @property
    def program(self) -> Program:
        return self.launches[0].program


def align(launches: Sequence[Sequence[Launch]], mesh: Mesh, context: str) -> list[Joint]:
    """Returns all ranks' programs in an order in which they can run.

    Args:
        launches: the launches of each rank.
        context: the part of the run that the programs belong to, for messages.

    Raises:
        ProgramsDiffer: ranks that run a program together have different programs, or wait for one another.
        ReplicaGroupsWrong: a collective's groups do not fit the mesh.
    """
    stages = [mesh.coordinates(rank)["pp"] for rank in range(mesh.world_size)]
    checked: set[tuple[int, tuple[int, ...]]] = set()
    at = [0] * mesh.world_size
    joints: list[Joint] = []

    def head(rank: int) -> Program | None:
        return launches[rank][at[rank]].program if at[rank] < len(launches[rank]) else None

    while any(head(rank) is not None for rank in range(mesh.world_size)):
        moved = False
        for rank in range(mesh.world_size):
            program = head(rank)
            if program is None:
                continue
            ranks = _together(program, rank, stages)
            heads = [head(other) for other in ranks]
            if any(
                program_at_head is None or _together(program_at_head, other, stages) != ranks
                for program_at_head, other in zip(heads, ranks)
            ):
                continue  # some ranks must run another program first
            check_one_program(
                [program_at_head for program_at_head in heads if program_at_head is not None], ranks, f" in {context}"
            )
            if (id(program), ranks) not in checked:
                check_groups(program, mesh, ranks)
                checked.add((id(program), ranks))
            joints.append(Joint(ranks, tuple(launches[other][at[other]] for other in ranks)))
            for other in ranks:
                at[other] += 1
            moved = True
        if not moved:
            raise ProgramsDiffer(_stuck([head(rank) for rank in range(mesh.world_size)], at, stages, context))
    return joints


def _together(program: Program, rank: int, stages: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks that run a program of `rank` together with it."""
    crossing: set[int] = set()
    for collective in program.collectives:
        groups = collective.groups
        if collective.kind == "collective-permute" and collective.number is not None:  # pairs may leave ranks out
            groups = program.issued[collective.number].groups
        groups = groups or (tuple(range(len(stages))),)
        if any(len({stages[member] for member in group if member < len(stages)}) > 1 for group in groups):
            crossing.update(member for group in groups for member in group if member < len(stages))
    if crossing:
        return tuple(sorted(crossing | {rank}))
    return tuple(other for other, stage in enumerate(stages) if stage == stages[rank])


def _stuck(heads: Sequence[Program | None], at: Sequence[int], stages: Sequence[int], context: str) -> str:
    lines = [f"the ranks would wait for each other forever in {context}; each rank waits at"]
    for rank, program in enumerate(heads):
        if program is None:
            lines.append(f"  rank {rank}: the end, after {at[rank]} programs")
            continue
        first = program.collectives[0] if program.collectives else None
        what = f"{first}" + (f"\n          from {first.sites[0]}" if first.sites else "") if first else "no collective"
        others = ", ".join(map(str, _together(program, rank, stages)))
        lines.append(f"  rank {rank}: program {at[rank]}, which ranks {others} run together: {what}")
    return "\n".join(lines)
