"""The exact minimum of a sum of tables over discrete variables, by variable elimination.

    minimize([3, 2], [(costs_of_a, (0,)), (costs_of_b, (1,)), (costs_of_both, (0, 1))])
    -> Choice(cost=..., values=[2, 0], ...)

Eliminating a variable adds the tables that read it and takes the minimum over it: a table over its neighbours is left.
The variable whose elimination needs the smallest table goes first. What an elimination gives depends only on its tables
and on how they are connected, so it is remembered by these: equal parts of a problem (the layers of a model) are worked
out once, and the answer is that of the whole problem.

Source: Bertele and Brioschi, Nonserial Dynamic Programming, 1972.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import NamedTuple

import torch

__all__ = ["Choice", "Impossible", "TooLarge", "minimize"]

Scope = tuple[int, ...]


class Impossible(ValueError):
    """No assignment has a finite cost; `variables`: some that contradict one another."""

    def __init__(self, variables: Sequence[int]) -> None:
        self.variables = list(variables)
        super().__init__(f"no choice has a finite cost: variables {self.variables} contradict one another")


class TooLarge(ValueError):
    """An elimination needs a table of more than the allowed entries; `variables`: those of the table."""

    def __init__(self, variables: Sequence[int], entries: int, limit: int) -> None:
        self.variables = list(variables)
        super().__init__(
            f"the exact minimum needs a table of {entries:,} entries over variables {self.variables}, more than the "
            f"{limit:,} allowed: give these fewer values, or raise the limit"
        )


class Choice(NamedTuple):
    """The minimum: its cost, the value of each variable, and what the search took."""

    cost: float
    values: list[int]
    computed: int  # eliminations that were worked out; the others were equal to one of these
    largest: int  # entries of the largest table


class _Elimination(NamedTuple):
    """What is left when a variable is gone: the minimum over it less `offset`, and which value gives it."""

    table: int
    best: torch.Tensor
    offset: float


class _Tables:
    """Tables by number: equal ones have one number, so that equal eliminations have equal keys."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._by_object: dict[int, tuple[torch.Tensor, int]] = {}
        self.eliminations: dict[tuple[int, tuple[tuple[int, Scope], ...]], _Elimination] = {}

    def number(self, table: torch.Tensor) -> int:
        """The number of a table, of the caller's or of a result."""
        known = self._by_object.get(id(table))
        if known is None:
            values = table.to("cpu", torch.float64).contiguous()
            content = ctypes.string_at(values.data_ptr(), values.nbytes) if values.numel() else b""
            number = self._by_content.setdefault((tuple(values.shape), content), len(self.tables))
            if number == len(self.tables):
                self.tables.append(values)
            known = self._by_object[id(table)] = (table, number)  # the table is kept: its id stays its own
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
            # Less its minimum, the table of a chain of equal blocks comes to repeat itself.
            known = _Elimination(self.number(least - offset) if offset < inf else -1, best, offset)
            self.eliminations[key] = known
        return known


def _spread(table: torch.Tensor, scope: Scope, count: int) -> torch.Tensor:
    """A table over the variables of `scope` as one over `count` variables, of size 1 where it has none."""
    order = sorted(range(len(scope)), key=scope.__getitem__)
    shape = [1] * count
    for axis in order:
        shape[scope[axis]] = table.shape[axis]
    return table.permute(order).reshape(shape)


def minimize(sizes: Sequence[int], tables: Iterable[tuple[torch.Tensor, Scope]], *, limit: int = 100_000_000) -> Choice:
    """The assignment of least total cost.

    Args:
        sizes: how many values each variable has.
        tables: costs, and which variables their dims are. Infinity: not allowed. Costs are added in float64; multiples
            of one power of two (2**-40 s) add without rounding, and so in any order to the same sum.
        limit: entries that a table may have at most.

    Raises:
        Impossible: every assignment has an infinite cost.
        TooLarge: a table would exceed the limit.
        ValueError: a table's shape is not that of its variables.
    """
    known = _Tables()
    search = _Search(sizes, known, limit)
    for table, scope in tables:
        if tuple(table.shape) != tuple(sizes[variable] for variable in scope) or len(set(scope)) != len(scope):
            raise ValueError(
                f"a table over variables {scope} has shape {tuple(table.shape)}: not that of its variables"
            )
        search.add(known.number(table), tuple(scope))
    return search.run()


class _Search:
    """The tables that are left, and in which order variables go."""

    def __init__(self, sizes: Sequence[int], tables: _Tables, limit: int) -> None:
        self.sizes, self.tables, self.limit = sizes, tables, limit
        self.scopes: dict[int, tuple[int, Scope]] = {}  # of each part that is left: table, variables
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
        """The variables of the table that eliminating this one needs, itself included, ascending."""
        return sorted({other for part in self.parts_of[variable] for other in self.scopes[part][1]} | {variable})

    def entries(self, variables: Iterable[int]) -> int:
        return prod(self.sizes[variable] for variable in variables)

    def run(self) -> Choice:
        steps: list[tuple[int, list[int], torch.Tensor]] = []
        current = {variable: self.entries(self.neighbours(variable)) for variable in range(len(self.sizes))}
        queue = [(entries, variable) for variable, entries in current.items()]
        heapq.heapify(queue)
        while queue:
            entries, variable = heapq.heappop(queue)
            if current.get(variable) != entries:
                continue  # gone, or its neighbours have changed since
            del current[variable]
            others, best = self.eliminate(variable, entries)
            steps.append((variable, others, best))
            for other in others:
                size = self.entries(self.neighbours(other))
                if size != current[other]:
                    current[other] = size
                    heapq.heappush(queue, (size, other))
        values = [0] * len(self.sizes)
        for variable, others, best in reversed(steps):
            values[variable] = int(best[tuple(values[other] for other in others)])
        return Choice(self.cost, values, len(self.tables.eliminations), self.largest)

    def eliminate(self, variable: int, entries: int) -> tuple[list[int], torch.Tensor]:
        """Takes the minimum over a variable; its neighbours, and its best value for each of their assignments."""
        scope = self.neighbours(variable)
        if entries > self.limit:
            raise TooLarge(scope, entries, self.limit)
        self.largest = max(self.largest, entries)
        place = {other: position for position, other in enumerate(scope)}
        parts = [self.scopes.pop(part) for part in self.parts_of[variable]]
        local = sorted((table, tuple(place[other] for other in variables)) for table, variables in parts)
        result = self.tables.eliminate(place[variable], [self.sizes[other] for other in scope], local)
        if result.offset == inf:
            raise Impossible(scope)
        self.cost += result.offset
        others = [other for other in scope if other != variable]
        gone = self.parts_of[variable]
        for other in others:
            self.parts_of[other] -= gone
        self.parts_of[variable] = set()
        self.add(result.table, tuple(others))
        return others, result.best
