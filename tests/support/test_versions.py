"""The selections of tests for other versions of torch name places that exist, and one contains the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.versions import PLACES, WITHOUT_TORCH, evenly_spaced, mark


class Item:
    """An item of pytest, as far as marks go."""

    def __init__(self, place: str, *marks: str) -> None:
        self.nodeid, self.marks = f"{place}::test_it", {*marks}

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.add(name)


@pytest.mark.parametrize("place", PLACES)
def test_a_place_exists_and_the_short_selection_takes_fewer(place: str) -> None:
    short, full = PLACES[place]
    assert (ROOT / place).exists() and short <= full > 0


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_a_place_without_torch_exists_and_is_in_the_long_selection_alone(place: str) -> None:
    item: Any = Item(place, "fast")
    mark([item])
    assert (ROOT / place).exists() and item.marks == {"fast", "versions"}


def test_fast_tests_are_in_both_and_of_the_others_as_many_as_a_place_says() -> None:
    place = "tests/optimizer/test_zero1.py"
    fast, full, elsewhere = Item("tests/test_main.py", "fast"), Item(place, "full"), Item("tests/test_main.py", "slow")
    slow = [Item(place, "slow") for _ in range(100)]
    items: Any = [fast, full, elsewhere, *slow]
    mark(items)
    assert {"versions", "versions_short"} <= fast.marks
    assert full.marks == {"full"} and elsewhere.marks == {"slow"}
    counts = tuple(sum(name in item.marks for item in slow) for name in ("versions_short", "versions"))
    assert counts == PLACES[place]


def test_evenly_spaced() -> None:
    items: Any = list(range(10))
    assert evenly_spaced(items, 5) == [0, 2, 4, 6, 8]
    assert evenly_spaced(items, 3) == [0, 3, 6]
    assert evenly_spaced(items, 12) == items and evenly_spaced(items, 0) == []
