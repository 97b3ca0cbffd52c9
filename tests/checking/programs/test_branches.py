"""Differences between ranks of one stage, from records of their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neuronx_dist.checking.programs.branches import compare_branches, differences
from neuronx_dist.checking.programs.calls import Op
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, R, S, V
from neuronx_dist.spmd.tensor_type import TensorType

MESH = Mesh(8, tp=2, pp=2)  # pp 2 x dp 2 x tp 2


def op(name: str, *numbers: int, line: int = 1, tp: Any = R, inside: bool = False) -> Op:
    return Op(name, numbers, ("a.py", line), inside, TensorType.of({"tp": tp, "dp": R}))


def explored(*programs: tuple[int, list[Op]]) -> Any:
    """Ranks, each with its calls."""
    distinct = [
        SimpleNamespace(rank=rank, ops=ops, claims=[], phases={"train": SimpleNamespace(ops=ops)})
        for rank, ops in programs
    ]
    return SimpleNamespace(distinct=distinct, mesh=MESH)


WAYS = {
    "three numbers": (
        [op("view", 1, 2, 3)],
        [op("view", 4, 2, 3)],
        "with different numbers or shapes at a.py:1: 1, 2, 3 and 4, 2, 3",
    ),
    "from the first that differs": ([op("view", 1, 2)], [op("view", 1, 3)], "at a.py:1: 2 and 3"),
    "many numbers": ([op("view", 1, 2, 3, 4)], [op("view", 9, 2, 3, 4)], "at a.py:1: 1, 2, 3, ... and 9, 2, 3, ..."),
    "no number": ([op("view", 1)], [op("view")], "at a.py:1: 1 and none"),
    "another function": (
        [op("view", 1)],
        [op("sum", 1)],
        "ranks 0 and 1 go different ways: view at a.py:1, sum at a.py:1",
    ),
    "another line": (
        [op("view", 1)],
        [op("view", 2, line=2)],
        "ranks 0 and 1 go different ways: view at a.py:1, view at a.py:2",
    ),
    "more calls": ([op("view")], [op("view"), op("sum", line=5)], "rank 1 goes on where rank 0 ends: a.py:5"),
    "fewer calls": ([op("view"), op("sum", line=5)], [op("view")], "rank 0 goes on where rank 1 ends: a.py:5"),
}


@pytest.mark.parametrize("what", WAYS)
def test_the_first_difference(what: str) -> None:
    first, second, words = WAYS[what]
    (difference,) = differences(explored((0, first), (1, second)))
    assert difference.endswith(words)
    assert differences(explored((0, first), (1, first))) == []
    assert differences(explored((0, first), (4, second))) == [], "stages do different things"


@pytest.mark.parametrize("other, tp, dp, is_problem", [
    (3, R, R, True), (3, V, R, False), (3, R, V, False), (1, R, V, True), (1, V, R, False), (2, V, R, True),
])  # fmt: skip
def test_ranks_that_differ_on_two_axes(other: int, tp: Any, dp: Any, is_problem: bool) -> None:
    """Rank 3 is apart from rank 0 on tp and dp: a result that varies on one of them may be another on rank 3."""

    def calls(number: int) -> list[Op]:
        return [Op("view", (number,), ("a.py", 1), False, TensorType.of({"tp": tp, "dp": dp}))]

    assert len(compare_branches(explored((0, calls(1)), (other, calls(2))))) == is_problem
    assert len(compare_branches(explored((0, calls(1)), (other, [])))) == is_problem


def test_differences_are_told_once_and_not_all_of_them() -> None:
    many = explored((0, [op("view", 0)]), *((rank % 4, [op("view", rank)]) for rank in range(1, 30)))
    assert len(differences(many)) == 20 and len(differences(many, most=3)) == 3
    same = explored((0, [op("view", 0)]), (1, [op("view", 1)]), (1, [op("view", 1)]))
    assert len(differences(same)) == 1


UNLIKE = {
    "other numbers": (
        [op("view", 1)],
        [op("view", 2)],
        "view at a.py:1 is called with 1 on rank 0 and with 2 on rank 1",
    ),
    "a call that one makes": (
        [op("view")],
        [op("view"), op("sum", line=2)],
        "sum at a.py:2 is called on rank 1 and not on rank 0",
    ),
    "one that the other lacks": (
        [op("sum", line=2), op("view")],
        [op("view")],
        "sum at a.py:2 is called on rank 0 and not on rank 1",
    ),
    "in between": ([op("a"), op("b", tp=I), op("c")], [op("a"), op("c")], "b at a.py:1 is called on rank 0"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_is_typed_as_equal_is_made_alike(what: str) -> None:
    first, second, words = UNLIKE[what]
    (problem,) = compare_branches(explored((0, first), (1, second)))
    assert words in problem.message and "on tp: equal on all ranks" in problem.message
    assert problem.ranks in ((0, 1), (1, 0)) and len(problem.lines) == 1


FINE = {
    "what varies": ([op("view", 1, tp=V)], [op("view", 2, tp=V)]),
    "a shard": ([op("view", 1, tp=S(0))], [op("view", 2, tp=S(0))]),
    "a call of what varies": ([op("view", tp=V)], []),
    "other lengths": ([op("view", 1)], [op("view", 1, 2)]),
    "the package's own": ([op("view", 1, inside=True)], [op("view", 2, inside=True)]),
    "no types": ([op("view", 1)._replace(types=None)], [op("view", 2)._replace(types=None)]),
    "the same": ([op("view", 1)], [op("view", 1)]),
}


@pytest.mark.parametrize("what", FINE)
def test_what_may_differ(what: str) -> None:
    assert compare_branches(explored(*enumerate(FINE[what]))) == []
