"""The marks `each_value` and `each_pair`: what of a product of parameters `make test` runs."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.support.covering import STRENGTHS, chosen

TWO = list(itertools.product(range(2), range(5)))
THREE = list(itertools.product(range(2), range(3), range(4)))


@pytest.mark.parametrize(("cases", "strength", "count"), [(TWO, 1, 5), (TWO, 2, 10), (THREE, 1, 4), (THREE, 2, 12)])
def test_every_combination_occurs_in_few_cases(cases: list[tuple[int, ...]], strength: int, count: int) -> None:
    found = [cases[number] for number in chosen(cases, strength)]
    of_all, of_found = (
        {pair for case in some for pair in itertools.combinations(enumerate(case), strength)} for some in (cases, found)
    )
    assert of_found == of_all and len(found) == count


def test_values_of_a_short_axis_take_turns() -> None:
    found = [TWO[number] for number in sorted(chosen(TWO, 1))]
    assert sorted(first for first, _ in found) == [0, 0, 0, 1, 1]


@pytest.mark.each_value
@pytest.mark.parametrize("b", ["x", "y", pytest.param("z", marks=pytest.mark.full)])
@pytest.mark.parametrize("a, twice", [(1, 2), (2, 4), (3, 6)])
def test_a_product(a: int, twice: int, b: str, request: pytest.FixtureRequest) -> None:
    assert twice == 2 * a
    cases = [item for item in request.session.items if getattr(item, "originalname", "") == "test_a_product"]
    run = {item.name for item in cases if not item.get_closest_marker("full")}
    if os.environ.get("NXD_FULL") != "1":
        assert len(run) == len(cases), "full cases are deselected"
    if len(run) > 1:  # not one case, chosen by its name
        assert len(run) == 3 and len(cases) in (3, 9)
        ends = [name.removeprefix("test_a_product[").removesuffix("]").split("-") for name in run]
        assert sorted(first for first, _, _ in ends) == ["1", "2", "3"] and {last for _, _, last in ends} == {"x", "y"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.full), 5, 6, 7])
def test_every_third(number: int, request: pytest.FixtureRequest) -> None:
    assert os.environ.get("NXD_FULL") == "1" or number in (0, 3, 7)


def test_the_marks_are_registered(pytestconfig: pytest.Config) -> None:
    assert {line.partition(":")[0] for line in pytestconfig.getini("markers")} >= {*STRENGTHS, "one_in", "full"}
