"""Positions that masks keep on each rank: intervals, against sets of numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from neuronx_dist.checking.types.handlers.rank_ranges import complement, misses, shift_of, where_true
from neuronx_dist.rules import RULES
from neuronx_dist.spmd.tensor_type import EQUAL, Note, Offset

WINDOW = range(-3, 12)
SETS = [(), ((2, 5),), ((0, 1), (4, 6)), ((-float("inf"), 3),), ((3, float("inf")),), ((-float("inf"), float("inf")),)]


def members(positions: Any) -> set[int]:
    return {number for number in WINDOW if any(a <= number < b for a, b in positions)}


def note(**extra: Any) -> Note:
    return Note(EQUAL, None, 0, 0, Offset(frozenset("tp"), **extra))


@pytest.mark.parametrize("positions", SETS)
def test_complements(positions: Any) -> None:
    assert members(complement(positions)) == set(WINDOW) - members(positions)
    assert complement(complement(positions)) == positions


@pytest.mark.parametrize("one, other", itertools.product(SETS, SETS))
def test_unions_and_sections(one: Any, other: Any) -> None:
    x = torch.ones(2, dtype=torch.bool)
    notes = [note(is_mask=True, true=(one, other)), note(is_mask=True, true=(other, other))]
    for functions, expected in (
        (
            (torch.logical_or, torch.bitwise_or, torch.Tensor.__or__, torch.Tensor.__ior__),
            members(one) | members(other),
        ),
        (
            (torch.logical_and, torch.bitwise_and, torch.Tensor.__and__, torch.Tensor.__iand__),
            members(one) & members(other),
        ),
    ):
        for function in functions:
            first, second = where_true(RULES[function], (x, x), notes) or ((), ())
            assert members(first) == expected and members(second) == members(other)
            assert where_true(RULES[function], (x, x), notes[:1]) is None
    for function in (torch.logical_not, torch.bitwise_not, torch.Tensor.__invert__):
        assert where_true(RULES[function], (x,), notes[:1]) == (complement(one), complement(other))
    for function in (torch.clone, torch.Tensor.bool, torch.Tensor.view):
        assert where_true(RULES[function], (x,), notes[:1]) == (one, other)
    assert where_true(RULES[torch.exp], (x,), notes[:1]) is None


COMPARED = {
    torch.lt: lambda number: number < 4, torch.less: lambda number: number < 4,
    torch.le: lambda number: number <= 4, torch.less_equal: lambda number: number <= 4,
    torch.gt: lambda number: number > 4, torch.greater: lambda number: number > 4,
    torch.ge: lambda number: number >= 4, torch.greater_equal: lambda number: number >= 4,
}  # fmt: skip


@pytest.mark.parametrize("function", COMPARED)
def test_comparisons_of_shifted_numbers(function: Any) -> None:
    """A rank has the positions less a shift."""
    x = torch.ones(2)
    shifts = (0, 2, 5)
    found = where_true(RULES[function], (x, 4), [note(is_mask=False, shift=shifts)])
    assert found is not None and len(found) == 3
    for shift, positions in zip(shifts, found):
        assert members(positions) == {number for number in WINDOW if COMPARED[function](number - shift)}
    assert where_true(RULES[function], (x, 4.5), [note(is_mask=False, shift=shifts)]) is None
    assert where_true(RULES[function], (x, True), [note(is_mask=False, shift=shifts)]) is None
    assert where_true(RULES[function], (x, 4), [note(is_mask=False)]) is None
    assert where_true(RULES[torch.eq], (x, 4), [note(is_mask=False, shift=shifts)]) is None


def test_shifts_add_up() -> None:
    x = torch.ones(2)
    shifted = [note(is_mask=False, shift=(0, 4))]
    assert shift_of(RULES[torch.sub], (x, 3), shifted) == (3, 7)
    assert shift_of(RULES[torch.Tensor.sub_], (x, 3), shifted) == (3, 7)
    assert shift_of(RULES[torch.add], (x, 3), shifted) == (-3, 1)
    assert shift_of(RULES[torch.Tensor.__iadd__], (x, 3), shifted) == (-3, 1)
    assert shift_of(RULES[torch.sub], (x, 0.5), shifted) is None
    assert shift_of(RULES[torch.sub], (x, 3), [note(is_mask=True)]) is None
    assert shift_of(RULES[torch.clone], (x,), shifted) == (0, 4)
    mask = note(is_mask=True, true=((), ()))
    assert shift_of(RULES[torch.mul], (x, x), [*shifted, mask]) == (0, 4)
    assert shift_of(RULES[torch.mul], (x, x), shifted * 2) is None
    assert shift_of(RULES[torch.mul], (x, 2), shifted) is None


@pytest.mark.parametrize(
    ("positions", "first", "count", "words"),
    [
        ((((0, 4),), ((4, 8),)), (0, 4), 4, ""),
        ((((4, 8),), ((0, 4),)), (4, 0), 4, ""),  # in another order of ranks
        ((((0, 4),), ((4, 6),)), (0, 4), 4, ""),  # padding at the end of the table
        ((((0, 4),), ()), (0, 4), 4, ""),
        ((((0, 3),), ((4, 8),)), (0, 4), 4, "on rank 0 it keeps positions 0 to 2, and the rank holds 0 to 3"),
        ((((0, 4),), ((5, 8),)), (0, 4), 4, "on rank 1 it keeps positions 5 to 7, and the rank holds 4 to 7"),
        ((((0, 5),), ((4, 8),)), (0, 4), 4, "on rank 0 it keeps positions 0 to 4"),
        ((((0, 1), (2, 4)), ((4, 8),)), (0, 4), 4, "on rank 0 it keeps positions 0 to 0 and 2 to 3"),
        (((), ((4, 8),)), (0, 4), 4, "on rank 0 it keeps positions none"),
        ((((-float("inf"), 4),), ((4, float("inf")),)), (0, 4), 4, ""),  # beyond the table there is nothing
    ],
)  # fmt: skip
def test_what_a_mask_misses(positions: Any, first: tuple[int, ...], count: int, words: str) -> None:
    said = misses(positions, first, count)
    assert said.startswith(words) and bool(said) == bool(words), said
