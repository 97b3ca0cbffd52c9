"""The exact minimum: brute force agrees, equal blocks are folded without changing the answer."""

from __future__ import annotations

import itertools
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronx_dist.planning.choice import Impossible, TooLarge, minimize

pytestmark = pytest.mark.slow


def brute_force(sizes, tables):
    def cost(values):
        return sum(float(table[tuple(values[v] for v in scope)]) for table, scope in tables)

    return min(map(cost, itertools.product(*map(range, sizes))), default=0.0)


def random_tables(generator, sizes, scopes, infinite=0.0):
    """Whole numbers, so that sums are exact; some entries are not allowed."""
    tables = []
    for scope in scopes:
        shape = tuple(sizes[v] for v in scope)
        table = torch.randint(0, 100, shape, generator=generator).double()
        table[torch.rand(shape, generator=generator) < infinite] = inf
        tables.append((table, tuple(scope)))
    return tables


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=7))
    variables = st.integers(0, len(sizes) - 1)
    scopes = draw(st.lists(st.lists(variables, min_size=0, max_size=4, unique=True), max_size=9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return sizes, random_tables(generator, sizes, scopes, draw(st.sampled_from([0.0, 0.2])))


@given(problems())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_brute_force(problem):
    sizes, tables = problem
    expected = brute_force(sizes, tables)
    if expected == inf:
        with pytest.raises(Impossible):
            minimize(sizes, tables)
        return
    choice = minimize(sizes, tables, marginals=True)
    assert choice.cost == expected
    for variable, size in enumerate(sizes):
        forced = [
            [*tables, (torch.tensor([0.0 if v == value else inf for v in range(size)]), (variable,))]
            for value in range(size)
        ]
        assert choice.marginals[variable] == [brute_force(sizes, with_value) for with_value in forced]
    assert expected == sum(float(table[tuple(choice.values[v] for v in scope)]) for table, scope in tables)
    assert all(0 <= value < size for value, size in zip(choice.values, sizes, strict=True))


def blocks(count, *, same):
    """A chain of blocks of three variables, as layers are; with `same` they share their tables."""
    generator = torch.Generator().manual_seed(0)
    scopes = [(0, 1), (1, 2), (0, 1, 2), (2, 3)]
    sizes = [4, 3, 2] * count + [4]
    first = random_tables(generator, sizes, scopes)
    tables = []
    for block in range(count):
        chosen = first if same else [(table.clone(), scope) for table, scope in first]
        tables += [(table, tuple(3 * block + v for v in scope)) for table, scope in chosen]
    return sizes, tables


def test_equal_blocks_are_worked_out_once():
    few, many = (minimize(*blocks(count, same=True)) for count in (8, 64))
    assert many.computed <= few.computed + 3 < 8 * 4
    assert many.largest == few.largest
    copies = minimize(*blocks(64, same=False))  # equal by content, not by object
    assert copies.computed == many.computed
    assert copies.cost == many.cost


@pytest.mark.parametrize("count", [1, 2, 3])
def test_folded_equals_brute_force(count):
    sizes, tables = blocks(count, same=True)
    assert minimize(sizes, tables).cost == brute_force(sizes, tables)


def test_one_block_that_differs_is_not_taken_for_its_equals():
    sizes, tables = blocks(3, same=True)
    changed = tables[5][0].clone()
    changed[:] += torch.arange(changed.numel()).double().reshape(changed.shape) * 50
    tables[5] = (changed, tables[5][1])
    assert minimize(sizes, tables).cost == brute_force(sizes, tables)


def test_dims_of_a_table_may_be_in_any_order():
    table = torch.tensor([[5.0, 1.0, 7.0], [4.0, 6.0, 2.0]])
    by_rows = minimize([2, 3], [(table, (0, 1)), (torch.tensor([0.0, 9.0]), (0,))])
    by_columns = minimize([2, 3], [(table.T, (1, 0)), (torch.tensor([0.0, 9.0]), (0,))])
    assert (by_rows.cost, by_rows.values) == (by_columns.cost, by_columns.values) == (1.0, [0, 1])


def test_no_finite_cost_names_variables_that_contradict():
    apart = torch.tensor([[inf, 0.0], [0.0, inf]])
    same = torch.tensor([[0.0, inf], [inf, 0.0]])
    with pytest.raises(Impossible, match="contradict") as caught:
        minimize([2, 2, 2], [(apart, (0, 1)), (same, (0, 1)), (torch.zeros(2), (2,))])
    assert set(caught.value.variables) <= {0, 1}


def test_a_table_that_is_too_large_is_refused():
    everything = torch.zeros(2, 2, 2, 2)
    with pytest.raises(TooLarge, match=r"16 entries over variables \[0, 1, 2, 3\]"):
        minimize([2] * 4, [(everything, (0, 1, 2, 3))], limit=15)


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"over variables \(0,\), \(3,\), does not match"):
        minimize([2], [(torch.zeros(3), (0,))])


def test_empty():
    choice = minimize([], [(torch.tensor(3.0), ())])
    assert (choice.cost, choice.values) == (3.0, [])


def test_one_table_read_both_ways_is_not_one_elimination():
    table = torch.tensor([[0.0, 5.0], [7.0, 9.0]])
    tables = [(table, (0, 1)), (table, (3, 2)), (torch.tensor([3.0, 0.0]), (1,)), (torch.tensor([9.0, 0.0]), (3,))]
    assert minimize([2] * 4, tables).cost == brute_force([2] * 4, tables)
