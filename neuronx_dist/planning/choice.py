"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimize([3, 2], [(costs_of_a, (0,)), (costs_of_b, (1,)), (costs_of_both, (0, 1))])
    -> Assignment(cost=..., values=[2, 0], ...)

Eliminating a variable adds the tables that read it and takes the minimum over it: a table over its neighbours is left.
The variable whose elimination needs the smallest table goes first. The result of an elimination depends only on its
tables and on their variables, so it is cached by these: equal parts of a problem (the layers of a model) are solved
once, and the result is the minimum of the complete problem.

Source: Bertele and Brioschi, Nonserial Dynamic Programming, 1972.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import NamedTuple

import torch

__all__ = ["Assignment", "Impossible", "TooLarge", "minimize"]

Scope = tuple[int, ...]


class Impossible(ValueError):
    """Error: no assignment has a finite cost; `variables`: some that contradict one another."""

    def __init__(self, variables: Sequence[int]) -> None:
        self.variables = list(variables)
        super().__init__(f"no choice has a finite cost: variables {self.variables} contradict one another")


class TooLarge(ValueError):
    """Error: an elimination needs a table of more than the allowed entries; `variables`: the table's variables."""

    def __init__(self, variables: Sequence[int], entries: int, limit: int) -> None:
        self.variables = list(variables)
        super().__init__(
            f"the exact minimum needs a table of {entries:,} entries over variables {self.variables}, more than the "
            f"{limit:,} allowed: reduce their numbers of values, or raise the limit"
        )


class Assignment(NamedTuple):
    """The minimum: its cost, the value of each variable, and the effort of the search."""

    cost: float
    values: list[int]
    computed: int  # number of different eliminations; the others came from the cache
    largest: int  # entries of the largest table
    marginals: list[list[float]] = []  # by variable, the least total cost with each of its values; [] if not asked for


class _Step(NamedTuple):
    """The elimination of a variable, for the way back: `scope` is its table's variables, `parts` the added tables.

    Attributes:
        parts: number of each table, its variables, and the step that made it (-1: it was passed).
    """

    variable: int
    scope: list[int]
    parts: list[tuple[int, Scope, int]]
    best: torch.Tensor


class _Elimination(NamedTuple):
    """The result of eliminating a variable: the table of minima less `offset`, and the best value for each entry."""

    table: int
    best: torch.Tensor
    offset: float


class _NumberedTables:
    """Tables by number: equal tables have the same number, so that equal eliminations have equal keys."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._by_object: dict[int, tuple[torch.Tensor, int]] = {}
        self.eliminations: dict[tuple[int, tuple[tuple[int, Scope], ...]], _Elimination] = {}

    def number(self, table: torch.Tensor) -> int:
        """Returns the number of a table."""
        known = self._by_object.get(id(table))
        if known is None:
            values = table.to("cpu", torch.float64).contiguous()
            content = ctypes.string_at(values.data_ptr(), values.nbytes) if values.numel() else b""
            number = self._by_content.setdefault((tuple(values.shape), content), len(self.tables))
            if number == len(self.tables):
                self.tables.append(values)
            known = self._by_object[id(table)] = (table, number)  # keeps the table alive, so that its id stays unique
        return known[1]

    def eliminate(self, position: int, sizes: Sequence[int], parts: Sequence[tuple[int, Scope]]) -> _Elimination:
        """Adds tables over variables of these sizes, and takes the minimum over the variable at `position`."""
        key = (position, tuple(parts))
        known = self.eliminations.get(key)
        if known is None:
            total = torch.zeros(tuple(sizes), dtype=torch.float64)
            for number, scope in parts:
                total += _spread(self.tables[number], scope, len(sizes))
            least, best = total.min(dim=position)
            offset = float(least.min())
            # Without its minimum, the table of a chain of equal blocks repeats, so that the cache finds it.
            known = _Elimination(self.number(least - offset) if offset < inf else -1, best, offset)
            self.eliminations[key] = known
        return known


def _spread(table: torch.Tensor, scope: Scope, count: int) -> torch.Tensor:
    """Returns a table over the variables of `scope` as one over `count` variables, with size 1 for the others."""
    order = sorted(range(len(scope)), key=scope.__getitem__)
    shape = [1] * count
    for axis in order:
        shape[scope[axis]] = table.shape[axis]
    return table.permute(order).reshape(shape)


def minimize(
    sizes: Sequence[int],
    tables: Iterable[tuple[torch.Tensor, Scope]],
    *,
    limit: int = 100_000_000,
    marginals: bool = False,
) -> Assignment:
    """Returns the assignment of least total cost.

    Args:
        sizes: number of values of each variable.
        tables: costs, with the variables of the dims. Infinity: not allowed. Costs are added in float64; multiples of
            one power of two (2**-40 s) add without rounding, and so to the same sum in any order.
        limit: maximum entries of a table.
        marginals: also returns the least total cost with each value of each variable, by a second pass in the opposite
            order (min-marginals).

    Raises:
        Impossible: every assignment has an infinite cost.
        TooLarge: a table would exceed the limit.
        ValueError: a table's shape does not match its variables.
    """
    known = _NumberedTables()
    search = _Search(sizes, known, limit)
    for table, scope in tables:
        if tuple(table.shape) != tuple(sizes[variable] for variable in scope) or len(set(scope)) != len(scope):
            raise ValueError(
                f"the shape of a table over variables {scope}, {tuple(table.shape)}, does not match their numbers of "
                "values"
            )
        search.add(known.number(table), tuple(scope))
    return search.run(marginals)


class _Search:
    """The remaining tables, and the order in which variables are eliminated."""

    def __init__(self, sizes: Sequence[int], tables: _NumberedTables, limit: int) -> None:
        self.sizes, self.tables, self.limit = sizes, tables, limit
        self.scopes: dict[int, tuple[int, Scope]] = {}  # (number of the table, variables) of each remaining part
        self.maker: dict[int, int] = {}  # the step that made a part
        self.steps: list[_Step] = []
        self.parts_of: list[set[int]] = [set() for _ in sizes]
        self.cost = 0.0
        self.largest = 0
        self._next = 0

    def add(self, table: int, scope: Scope) -> None:
        if not scope:
            self.cost += float(self.tables.tables[table])
            if self.cost == inf:
                raise Impossible(scope)
            return
        self.scopes[self._next] = (table, scope)
        for variable in scope:
            self.parts_of[variable].add(self._next)
        self._next += 1

    def neighbours(self, variable: int) -> list[int]:
        """Returns the variables, ascending, of the table that eliminating `variable` needs; it is one of them."""
        return sorted({other for part in self.parts_of[variable] for other in self.scopes[part][1]} | {variable})

    def entries(self, variables: Iterable[int]) -> int:
        return prod(self.sizes[variable] for variable in variables)

    def run(self, marginals: bool) -> Assignment:
        current = {variable: self.entries(self.neighbours(variable)) for variable in range(len(self.sizes))}
        queue = [(entries, variable) for variable, entries in current.items()]
        heapq.heapify(queue)
        while queue:
            entries, variable = heapq.heappop(queue)
            if current.get(variable) != entries:
                continue  # eliminated already, or its neighbours have changed since
            del current[variable]
            for other in self.eliminate(variable, entries):
                size = self.entries(self.neighbours(other))
                if size != current[other]:
                    current[other] = size
                    heapq.heappush(queue, (size, other))
        values = [0] * len(self.sizes)
        for step in reversed(self.steps):
            others = (other for other in step.scope if other != step.variable)
            values[step.variable] = int(step.best[tuple(values[other] for other in others)])
        computed = len(self.tables.eliminations)
        return Assignment(self.cost, values, computed, self.largest, self.marginals() if marginals else [])

    def eliminate(self, variable: int, entries: int) -> list[int]:
        """Takes the minimum over a variable, and returns its neighbours."""
        scope = self.neighbours(variable)
        if entries > self.limit:
            raise TooLarge(scope, entries, self.limit)
        self.largest = max(self.largest, entries)
        place = {other: position for position, other in enumerate(scope)}
        makers = [(*self.scopes.pop(part), self.maker.get(part, -1)) for part in self.parts_of[variable]]
        parts = sorted((table, tuple(place[other] for other in variables), maker) for table, variables, maker in makers)
        local = [(table, variables) for table, variables, _ in parts]
        result = self.tables.eliminate(place[variable], [self.sizes[other] for other in scope], local)
        if result.offset == inf:
            raise Impossible(scope)
        self.cost += result.offset
        others = [other for other in scope if other != variable]
        gone = self.parts_of[variable]
        for other in others:
            self.parts_of[other] -= gone
        self.parts_of[variable] = set()
        self.maker[self._next] = len(self.steps)
        self.steps.append(_Step(variable, scope, parts, result.best))
        self.add(result.table, tuple(others))
        return others

    def marginals(self) -> list[list[float]]:
        """Returns the least total cost with each value of each variable.

        On the way back each step gets the cost of all tables that are not behind it, over its neighbours: the minimum
        over the other variables of the step that took its result. Equal steps are computed once, as before.
        """
        found: list[list[float]] = [[] for _ in self.sizes]
        outside = [self.tables.number(torch.zeros(()))] * len(self.steps)  # over the neighbours, less its minimum
        known: dict[object, tuple[list[float], dict[int, int]]] = {}
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            position = step.scope.index(step.variable)
            neighbours = tuple(place for place in range(len(step.scope)) if place != position)
            tables = [(table, variables) for table, variables, _ in step.parts]
            inner = tuple(place for place, (*_, maker) in enumerate(step.parts) if maker >= 0)
            sizes = tuple(self.sizes[variable] for variable in step.scope)
            key = position, sizes, tuple(tables), outside[number], inner
            if key not in known:
                scope = neighbours if self.tables.tables[outside[number]].dim() else ()
                known[key] = self._beliefs(position, sizes, tables, (outside[number], scope), inner)
            least, messages = known[key]
            found[step.variable] = [self.cost + more for more in least]
            for place in inner:
                outside[step.parts[place][2]] = messages[place]
        return found

    def _beliefs(
        self,
        position: int,
        sizes: Sequence[int],
        tables: Sequence[tuple[int, Scope]],
        outside: tuple[int, Scope],
        inner: Sequence[int],
    ) -> tuple[list[float], dict[int, int]]:
        """Returns the cost of each value of a step's variable above the least, and the tables of the steps before.

        Args:
            inner: the positions of the tables that other steps made; each gets the sum of all the others.
        """
        spread = [_spread(self.tables.tables[table], scope, len(sizes)) for table, scope in (*tables, outside)]
        total = torch.zeros(tuple(sizes), dtype=torch.float64)
        for table in spread:
            total += table
        others = [place for place in range(len(sizes)) if place != position]
        least = total.amin(dim=others) if others else total
        messages = {}
        for place in inner:
            rest = torch.zeros(tuple(sizes), dtype=torch.float64)
            for number, table in enumerate(spread):
                rest += 0 if number == place else table
            gone = [axis for axis in range(len(sizes)) if axis not in tables[place][1]]
            message = rest.amin(dim=gone) if gone else rest
            messages[place] = self.tables.number(message - message.min())
        return [float(more) for more in least - least.min()], messages
