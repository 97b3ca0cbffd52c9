"""Differences between ranks of one stage, apart from collectives: other numbers, other shapes, other functions.

Most differences are right: a rank's piece of a tensor has a start of its own. A difference is a problem where the
result has a type that says it is equal on the ranks that made it differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from ...spmd.tensor_type import TensorType
from ...spmd.types import SAME
from ..report import Problem
from ..types.handlers.one_rank import Claim
from .calls import Op
from .explore import Explored, RankProgram, axes_between

__all__ = ["compare_branches", "compare_claims", "differences"]

_REDUCTIONS = frozenset("sum norm linalg_vector_norm mean amax max".split())
_OF_NORMS = frozenset("norm linalg_vector_norm square pow __pow__ sum detach float double to".split())


def differences(explored: Explored, most: int = 20) -> list[str]:
    """The first place, for each pair of programs and each phase, where the two programs differ."""
    listed: list[str] = []
    for one, other in _pairs(explored):
        for name in other.phases:
            if name in one.phases:
                difference = _first_difference(one, other, name)
                if difference and difference not in listed:
                    listed.append(difference)
    return listed[:most]


def compare_claims(explored: Explored) -> list[Problem]:
    """Problems: equal values that several ranks of an axis add to a partial sum, each once more."""
    for program in explored.distinct:
        for claim in program.claims:
            group = explored.mesh.group_of(claim.axis, program.rank)
            claiming = [r for r in group if any(c.axis == claim.axis for c in explored.programs[r].claims)]
            if len(claiming) != 1:
                return [Problem("types", str(claim.error), tuple(claiming), (claim.line,), claim.error)]
            if claim.axis == "pp":  # stages have other shards in any case
                continue
            summands = _summands(program, claim.axis)
            for rank in group:
                if _summands(explored.programs[rank], claim.axis) != summands:
                    message = (
                        f"rank {program.rank} adds other shards at {claim.line} than rank {rank}: the sum over "
                        f"{claim.axis} lacks the shards of ranks that do not add theirs"
                    )
                    return [Problem("types", message, (program.rank, rank), (claim.line,))]
    return []


def _summands(program: RankProgram, axis: str) -> Counter[Any]:
    """The reductions of shards over an axis, by name and shapes."""
    types = [(op, op.types.get(axis)) for op in program.ops if op.name in _REDUCTIONS and op.types is not None]
    return Counter((op.name, op.scalars) for op, kind in types if kind is not None and kind.letter == "P")


def _unclaimed(program: RankProgram, claims: list[Claim], axes: list[str]) -> list[Op]:
    """The operators to compare, without those whose results one rank alone adds to a norm."""
    lines = {claim.line for claim in claims if claim.axis in axes}
    ops = [op for op in program.ops if not op.inside]
    return [op for op in ops if op.line not in lines and op.name not in _OF_NORMS] if lines else ops


def compare_branches(explored: Explored) -> list[Problem]:
    """Problems: operators that ranks call differently, or not all ranks call, though the result is typed as equal."""
    for one, other in _pairs(explored):
        axes = axes_between(explored.mesh, one.rank, other.rank)
        claims = [*one.claims, *other.claims]
        first, second = (_unclaimed(program, claims, axes) for program in (one, other))
        a_keys, b_keys = ([(op.name, op.site) for op in ops] for ops in (first, second))
        for tag, i, j, k, m in SequenceMatcher(None, a_keys, b_keys, autojunk=False).get_opcodes():
            if tag == "equal":
                for a, b in zip(first[i:j], second[k:m]):
                    axis = _equal_on(a.types, axes)
                    if a.scalars != b.scalars and len(a.scalars) == len(b.scalars) and axis is not None:
                        numbers = [_short(part) for part in _unequal_part(a, b)]
                        return [_unlike(one, other, a, axis, f"is called with {numbers[0]}", f"with {numbers[1]}")]
            else:
                for program, ops in ((one, first[i:j]), (other, second[k:m])):
                    for op in ops:
                        axis = _equal_on(op.types, axes)
                        if axis is not None:
                            rest = other if program is one else one
                            return [_unlike(program, rest, op, axis, "is called", "not")]
    return []


def _unlike(one: RankProgram, other: RankProgram, op: Op, axis: str, here: str, there: str) -> Problem:
    spmd_type = op.types.get(axis) if op.types is not None else None
    message = (
        f"{op.name} at {op.line} {here} on rank {one.rank} and {there} on rank {other.rank}, and its result is "
        f"{spmd_type} on {axis}: equal on all ranks\n"
        f"    Do the same on all ranks, or first convert(x, {axis!r}, src={spmd_type}, dst=V) what is meant to differ."
    )
    return Problem("types", message, (one.rank, other.rank), (op.line,))


def _equal_on(type_: TensorType | None, axes: list[str]) -> str | None:
    """The first of `axes` on which the type is equal on all ranks, if the type varies on none of them; else None."""
    if type_ is None or not axes:
        return None
    spmd_types = [(axis, type_.get(axis)) for axis in axes]
    if any(spmd_type is None or spmd_type.letter not in SAME for _, spmd_type in spmd_types):
        return None
    return spmd_types[0][0]


def _pairs(explored: Explored) -> Iterator[tuple[RankProgram, RankProgram]]:
    """Pairs the first program of each stage with each other one of that stage."""
    first: dict[int, RankProgram] = {}
    for program in explored.distinct:
        one = first.setdefault(explored.mesh.coordinate("pp", program.rank), program)
        if one is not program:
            yield one, program


def _short(numbers: tuple[Any, ...]) -> str:
    return ", ".join(map(str, numbers[:3])) + ", ..." * (len(numbers) > 3) if numbers else "none"


def _unequal_part(one: Op, other: Op) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The numbers of two calls, from the first one that differs."""
    same = 0
    while one.scalars[same : same + 1] == other.scalars[same : same + 1]:
        same += 1
    return one.scalars[same:], other.scalars[same:]


def _first_difference(one: RankProgram, other: RankProgram, phase: str) -> str | None:
    first, second = one.phases[phase].ops, other.phases[phase].ops
    for a, b in zip(first, second):
        if (a.name, a.scalars) != (b.name, b.scalars):
            ranks = f"ranks {one.rank} and {other.rank}"
            if a.name == b.name and a.site == b.site:
                numbers = " and ".join(_short(s) for s in _unequal_part(a, b))
                return f"{ranks} call {a.name} with different numbers or shapes at {a.line}: {numbers}"
            return f"{ranks} go different ways: {a.name} at {a.line}, {b.name} at {b.line}"
    if len(first) != len(second):
        longer, ops = (one, first) if len(first) > len(second) else (other, second)
        extra = ops[min(len(first), len(second))]
        return f"rank {longer.rank} goes on where rank {(other if longer is one else one).rank} ends: {extra.line}"
    return None
