"""Marks of tests with a product of parameters, of which `make test` runs some cases and `make test-full` all.

    @pytest.mark.each_value
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_...

With `each_value`, `make test` runs so many cases that every value of every `parametrize` occurs: here max(dtypes,
layouts) of dtypes x layouts. With `each_pair` every pair of values of two of three or more `parametrize` occurs. The
other cases get the mark `full`. The choice is the same each time: it depends on the numbers of values alone. It is
greedy, and prefers values that occurred less often.

`one_in(3)` runs every third case, in their order, of parameters that are samples of one thing.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

__all__ = ["chosen", "mark"]

STRENGTHS = {"each_value": 1, "each_pair": 2}


def mark(metafunc: pytest.Metafunc) -> None:
    """Gives the mark `full` to the cases of a test that its mark leaves to `make test-full`."""
    for name, strength in STRENGTHS.items():
        if metafunc.definition.get_closest_marker(name):
            cases = [call for call in metafunc._calls if all(given.name != "full" for given in call.marks)]
            kept = chosen([tuple(case.indices[axis] for axis in _axes(metafunc)) for case in cases], strength)
            for number, case in enumerate(cases):
                if number not in kept:
                    case.marks.append(pytest.mark.full.mark)
    if marker := metafunc.definition.get_closest_marker("one_in"):
        cases = [call for call in metafunc._calls if all(given.name != "full" for given in call.marks)]
        for number, case in enumerate(cases):
            if number % marker.args[0]:
                case.marks.append(pytest.mark.full.mark)


def _axes(metafunc: pytest.Metafunc) -> list[str]:
    """The first name of each `parametrize`, and the fixtures with parameters."""
    names = [given.args[0] for given in metafunc.definition.iter_markers("parametrize")]
    names = [[name.strip() for name in each.split(",")] if isinstance(each, str) else [*each] for each in names]
    others = metafunc._calls[0].indices.keys() - {name for each in names for name in each}
    return [each[0] for each in names] + sorted(others)


def chosen(cases: list[tuple[int, ...]], strength: int) -> set[int]:
    """Numbers of the cases in which every combination of `strength` values occurs that occurs in all cases."""
    combinations = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    missing = set().union(*combinations)
    uses: Counter[tuple[int, int]] = Counter()
    found: set[int] = set()
    # Shuffled, or the first value of one would meet the first of another, the second the second, and so on.
    order = random.Random(0).sample(range(len(cases)), len(cases))
    while missing:
        best = max(
            order,
            key=lambda number: (
                len(combinations[number] & missing),
                -sum(uses[pair] for pair in enumerate(cases[number])),
            ),
        )
        found.add(best)
        missing -= combinations[best]
        uses.update(enumerate(cases[best]))
    return found
