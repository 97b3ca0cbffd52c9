"""Tables of what differs by rank: the values of every rank, whatever form they are kept in."""

from __future__ import annotations

import operator
import random
from itertools import product

import pytest

from neuronx_dist.comm.ranks.rank_tables import LARGEST, RankTable, apply

ORDER = ("pp", "dp", "cp", "tp")
SIZES = {"pp": 2, "dp": 4, "cp": 3, "tp": 2}
PLACES = [dict(zip(ORDER, at)) for at in product(*(range(SIZES[name]) for name in ORDER))]


def axis(name: str) -> RankTable:
    return RankTable.of_steps((name,), 0, [range(SIZES[name])])


def number_of_rank() -> RankTable:
    strides = {"pp": 24, "dp": 6, "cp": 2, "tp": 1}
    return RankTable.of_steps(ORDER, 0, [[k * strides[name] for k in range(SIZES[name])] for name in ORDER])


def listed(table: RankTable | int) -> list[int]:
    return [table.at(at) if isinstance(table, RankTable) else table for at in PLACES]


FUNCTIONS = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.xor, operator.eq, operator.lt,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_rank_has_the_value_of_plain_arithmetic(function):
    random_ = random.Random(1)
    tables: list[RankTable | int] = [number_of_rank(), *map(axis, ORDER), 1, 2, 3, 6, 7, 24]
    for _ in range(60):
        one, other = random_.choice(tables), random_.choice(tables)
        if isinstance(one, int) and isinstance(other, int):
            continue
        if function in (operator.floordiv, operator.mod) and 0 in listed(other):
            with pytest.raises(ArithmeticError):
                apply(function, ORDER, one, other)
            continue
        table = apply(function, ORDER, one, other)
        assert table is not None
        assert listed(table) == [function(a, b) for a, b in zip(listed(one), listed(other))]
        again = RankTable.of_values(ORDER, [SIZES[name] for name in ORDER], tuple(listed(table)))
        assert again == table and hash(again) == hash(table)  # one form, however it was made
        assert table.names == again.names
        if len(tables) < 40 and function not in (operator.eq, operator.lt):
            tables.append(table)


@pytest.mark.parametrize("name", ORDER)
def test_slices_are_equal_where_nobody_can_tell_two_coordinates_apart(name):
    for table in (number_of_rank(), apply(operator.mod, ORDER, number_of_rank(), 5)):
        table = apply(operator.lt, ORDER, table, 7)
        if name not in table.names:
            continue
        slices = table.slices(name)
        for i, j in product(range(SIZES[name]), repeat=2):
            same = all(table.at({**at, name: i}) == table.at({**at, name: j}) for at in PLACES)
            assert (slices[i] == slices[j]) == same


@pytest.mark.slow
def test_coordinates_are_taken_out_of_a_number_without_a_list_of_all_ranks():
    sizes = {"pp": 1 << 20, "dp": 1 << 20, "tp": 8}
    assert sizes["pp"] * sizes["dp"] > LARGEST
    rank = RankTable.of_steps(tuple(sizes), 0, [range(0, 1 << 43, 1 << 23), range(0, 1 << 23, 8), range(8)])
    tp, rest = apply(operator.mod, ORDER, rank, 8), apply(operator.floordiv, ORDER, rank, 8)
    assert tp.names == ("tp",) and tp.values == tuple(range(8))
    assert rest.names == ("pp", "dp") and apply(operator.mod, ORDER, rest, 1 << 20).names == ("dp",)
    assert apply(operator.eq, ORDER, rank, 5) is None  # too long a list: the program is told its number


def test_tables_of_other_sizes_are_other_tables():
    values = (True, False, False, False, True, False, False, False)
    one, other = (RankTable.of_values(("dp", "tp"), sizes, values) for sizes in ((2, 4), (4, 2)))
    assert one != other
