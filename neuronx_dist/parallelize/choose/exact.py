"""The strategies of a program at the exact minimum of a documented cost.

    division = choose(program, "tp", 8, costs=H100)

The cost is the seconds of all calls and conversions, forward and backward (`planning.costs`), where a conversion for
several consumers counts once, plus a price of the memory: parameters, gradients, optimizer state and tensors saved for
backward. The price is raised from 0 until the predicted memory fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from ...planning.choice import Impossible, TooLarge, minimize
from ...planning.costs import Costs
from ...planning.plan import PlanError
from ...program.program import Call, Division, Program, Strategy, Value, operands_of
from ...spmd.types import I, R, S, Shard, SpmdType
from .conversions import RowsOfExperts, WholeOnRank
from .cost_tables import Constraints, CostTables, HeldBytes, reachable
from .strategies import candidates, routed_calls, strides_of
from .whole_tables import places_of

__all__ = ["Constraints", "Solution", "StrategyChoice", "choose", "is_whole"]

Candidates = Callable[[Call, int], Sequence[Strategy]]
NEGLIGIBLE = 0.01  # of all seconds
LARGEST = 4_000_000  # entries of a table


def choose(
    program: Program,
    axis: str,
    size: int,
    *,
    costs: Costs,
    constraints: Constraints | None = None,
    memory: float | None = None,
) -> Division:
    """Divides a program over the `size` ranks of an axis, at the least cost.

    Inputs are R, or I with a gradient; buffers and constants R; parameters I or sharded; outputs R or I.

    Args:
        constraints: constraints on strategies and types.
        memory: maximum bytes on a rank: parameters, gradients, optimizer state, tensors saved for backward.

    Raises:
        PlanError: the constraints contradict one another, or nothing fits the memory; names the calls or the bytes.
    """
    strides, routed, places = strides_of(program), routed_calls(program), places_of(program, size)

    def strategies(call: Call, size: int) -> list[Strategy]:
        return candidates(call, axis, size, strides=strides, routed=routed, places=places)

    return StrategyChoice(program, axis, size, costs, constraints or Constraints(), strategies).fitting(memory)


class Solution(NamedTuple):
    """A division, the memory of a rank under it, and its cost: seconds, and the price of memory."""

    division: Division
    held: HeldBytes
    cost: float


class _Attempt(NamedTuple):
    """A search, exact or simpler.

    Attributes:
        left_whole: calls that every rank makes in full.
        forms: number of types that a value of many consumers may be converted to; None: any number.
        tied: False: each consumer of a parameter chooses the parameter's type.
        has_bound: False: calls that depend on parameters are left whole, so that no bound of other divisions is known.
    """

    left_whole: set[Call]
    forms: int | None = None
    tied: bool = True
    has_bound: bool = True


class StrategyChoice:
    """The choice to be made in a program: the strategies of each call, the types of each leaf, and their costs."""

    def __init__(
        self, program: Program, axis: str, size: int, costs: Costs, constraints: Constraints, candidates: Candidates
    ) -> None:
        self.program, self.axis, self.size, self.costs, self.constraints = program, axis, size, costs, constraints
        self.candidates = {call: list(candidates(call, size)) for call in program.calls}
        self.types = self._leaf_types(self.candidates)
        independent, negligible = self._independent()
        # From exact to simpler; the next attempt is made if a table would be too large, as where all layers read the
        # same value, or the same weights, which couple their variables.
        whole = independent if negligible else set()
        self._attempts = [_Attempt(whole), *(_Attempt(independent, forms) for forms in (None, 2, 1))]
        self._attempts += [_Attempt(independent, 1, tied=False)]
        self._update: Callable[[Value], float] | None = None
        self._build(self._attempts.pop(0))
        self.price = 0.0  # of memory, of the division that `fitting` returned
        self._least = 0.0  # seconds of the fastest division

    def _build(self, attempt: _Attempt) -> None:
        """Computes the options of each call, and their tables."""
        self._attempt, (self.left_whole, self.forms, tied, _) = attempt, attempt
        self.options = self._possible(self.candidates)
        backward, forms = self.program.training, self.forms
        self.tables = CostTables(
            self.program, self.size, self.costs, self.options, self.types, backward=backward, forms=forms, tied=tied
        )
        self.tables.update = self._update

    def count_updates(self, update: Callable[[Value], float] | None) -> None:
        """Adds to the cost the seconds of reducing and updating parameters: `update`, of the whole parameter."""
        self._update = self.tables.update = update

    @property
    def alternatives_are_exact(self) -> bool:
        """Whether the search limits no conversions: otherwise `alternatives` may be cheaper than it returns."""
        return self.forms is None

    def _leaf_types(self, candidates: Mapping[Call, Sequence[Strategy]]) -> dict[Value, list[SpmdType]]:
        """Returns the types that each leaf may have: a parameter I, or the shards that its consumers want."""
        types: dict[Value, list[SpmdType]] = {value: [R] for value in self.program.leaves}
        types |= {value: [I] for value in self.program.inputs if value.requires_grad}
        types |= {value: [I] for value in self.program.parameters}
        parameters = set(self.program.parameters)
        for call, options in candidates.items():
            for index, value in enumerate(operands_of(call)):
                if value in parameters:
                    wanted = dict.fromkeys(option.operands[index] for option in options)
                    types[value] += [t for t in wanted if _is_layout(t, value) and t not in types[value]]
        for value, allowed in self.constraints.types.items():
            left = [t for t in types[value] if t in allowed]
            if not left:
                name = f"{value.path or value.name} {list(value.shape)}"
                if any(isinstance(t, WholeOnRank) for t in allowed):
                    raise PlanError(
                        f"{name} cannot be whole on a rank: there are no whole tables in pipelines, nor over several "
                        f"axes; leave graph.whole_tables out. It can be {_listed(types[value])} over {self.size} ranks"
                    )
                raise PlanError(
                    f"{name} cannot be {_listed(allowed)} over {self.size} ranks; it can be {_listed(types[value])}"
                )
            types[value] = left
        return types

    def _possible(self, candidates: Mapping[Call, Sequence[Strategy]]) -> dict[Call, list[Strategy]]:
        """Returns the strategies whose operand types are reachable, the fastest for each combination of types."""
        reachable_types: dict[Value, set[SpmdType]] = {value: set(types) for value, types in self.types.items()}
        options: dict[Call, list[Strategy]] = {}
        for call in self.program.calls:
            operands = operands_of(call)
            best: dict[tuple[tuple[SpmdType, ...], tuple[SpmdType, ...]], Strategy] = {}
            for strategy in candidates[call]:
                if not self.constraints.allows(call, strategy):
                    continue
                if (call in self.left_whole or self.size == 1) and not is_whole(strategy):
                    continue
                wants = zip(operands, strategy.operands, strict=True)
                if all(reachable(value, reachable_types[value], want, self.size) for value, want in wants):
                    known = best.setdefault((strategy.operands, strategy.results), strategy)
                    if (strategy.share, strategy.bytes_moved) < (known.share, known.bytes_moved):
                        best[strategy.operands, strategy.results] = strategy
            if not best:
                raise self._none_left(call, candidates[call])
            options[call] = list(best.values())
            for index, result in enumerate(call.results):
                reachable_types[result] = {strategy.results[index] for strategy in options[call]}
        return options

    def _independent(self) -> tuple[set[Call], bool]:
        """Returns the calls that depend on no parameter (masks, positions), and whether their time is negligible.

        Dividing them could save at most their time.
        """
        dependent = set(self.program.parameters)
        independent: set[Call] = set()
        seconds = {True: 0.0, False: 0.0}
        for call in self.program.calls:
            operands = operands_of(call)
            depends = any(value in dependent for value in operands) or any(r.requires_grad for r in call.results)
            if depends:
                dependent.update(call.results)
            elif not self.constraints.strategies.get(call):
                independent.add(call)
            moved = sum(value.nbytes for value in (*operands, *call.results))
            seconds[depends] += max(call.flops / self.costs.flops, moved / self.costs.bandwidth)
        return independent, seconds[False] * self.size < NEGLIGIBLE * seconds[True]

    def _none_left(self, call: Call, strategies: Sequence[Strategy]) -> PlanError:
        names = [strategy.name for strategy in strategies]
        if call not in self.constraints.strategies:
            return PlanError(f"{call!r}: no strategy's operand types are reachable; strategies: {_listed(names)}")
        axis = next((on.axis for on in call.outer if any(isinstance(x, RowsOfExperts) for x in on.operands)), None)
        why = f" (experts are divided over {axis}, and over one axis only: cut their columns and rows)" if axis else ""
        return PlanError(
            f"{call!r}: the plan allows none of its strategies over {self.size} ranks: {_listed(names)}{why}"
        )

    def solve(self, price: float, forced: Mapping[Call, Strategy] | None = None) -> Solution:
        """Returns the cheapest division at a price of memory, in seconds per byte.

        Args:
            forced: required strategies of some calls.

        Raises:
            PlanError: no strategies fit together.
        """
        tables = self.tables.all(price)
        tables += [self.tables.only(call, strategy) for call, strategy in (forced or {}).items()]
        try:
            choice = minimize(self.tables.sizes, tables, limit=LARGEST)
        except TooLarge as error:
            self._build(self._attempts.pop(0) if self._attempts else self._with_fewer_calls(error.variables))
            return self.solve(price, forced)
        except Impossible as impossible:
            owners = [self.tables.owner[variable] for variable in impossible.variables]
            raise PlanError(
                f"the plan contradicts itself: the strategies of {_listed(owners)} cannot be combined"
            ) from None
        if not price and not forced:
            self._least = choice.cost
        values, variable = choice.values, self.tables.variable
        if any(self.tables.copies.values()):
            return self._with_types(values).solve(price, forced)
        strategies = {call: self.options[call][values[variable[call]]] for call in self.program.calls}
        types = {
            value: options[values[variable[value]] if value in variable else 0] for value, options in self.types.items()
        }
        division = Division(self.program, self.axis, self.size, strategies, types, joined_bytes=self.costs.joined_bytes)
        return Solution(division, self.tables.held(strategies, types), choice.cost)

    def alternatives(self) -> dict[Call, list[tuple[Strategy, float]]]:
        """Returns for each call its strategies with the seconds that the program takes longer with them, at best.

        Memory is in these seconds at the price of the division that `fitting` returned. Strategies that cannot be
        combined with the rest are left out. Weights whose consumers chose their types one by one have the types of the
        division that `fitting` returned.
        """
        tables = self.tables.all(self.price)
        if any(self.tables.copies.values()):
            choice = self._with_types(minimize(self.tables.sizes, tables, limit=LARGEST).values)
            choice.price = self.price
            choice.solve(self.price)
            return choice.alternatives()
        found = minimize(self.tables.sizes, tables, limit=LARGEST, marginals=True)
        alternatives = {}
        for call, options in self.options.items():
            costs = found.marginals[self.tables.variable[call]]
            alternatives[call] = [(option, cost - found.cost) for option, cost in zip(options, costs) if cost < inf]
        return alternatives

    def least(self) -> float | None:
        """Returns seconds that no division of these constraints is below, at any memory; None: they are not known."""
        least = self._least
        if not self._attempt.has_bound:
            return None
        if self.forms is not None:
            tables = self.tables.all(0.0, relaxed=True)
            try:
                least = minimize(self.tables.sizes, tables, limit=LARGEST).cost
            except TooLarge:
                return None
        return least - sum(sum(self.tables.seconds(call, self.options[call][0])) for call in self.left_whole)

    def _with_fewer_calls(self, variables: Sequence[int]) -> _Attempt:
        """Returns an attempt that leaves the calls of too large a table whole, such as those of a recurrence.

        Raises:
            PlanError: the plan names strategies of all of them.
        """
        owners = dict.fromkeys(self.tables.owner[variable] for variable in variables)
        divided = {x for x in self.program.calls if not self.constraints.strategies.get(x)} - self.left_whole
        calls = divided & owners.keys()
        if not calls:  # what is left are types of values between calls that are whole: the recurrence's modules
            modules = {x.module for x in owners if isinstance(x, Call)}
            calls = {x for x in divided if x.module in modules}
        if not calls:
            raise PlanError(
                f"the search of a division over {self.size} ranks is too large, at {_listed([*owners])}: use the "
                f"policy 'dp', 'data' or 'pp', or name the strategies of fewer calls"
            ) from None
        return _Attempt(self.left_whole | calls, 1, tied=False, has_bound=False)

    def _with_types(self, values: Sequence[int]) -> StrategyChoice:
        """Returns the choice in which a parameter has the type that most of its consumers have chosen."""
        types = dict(self.constraints.types)
        for value, copies in self.tables.copies.items():
            if copies:
                ((index, _),) = Counter(values[variable] for variable in copies.values()).most_common(1)
                types[value] = (self.types[value][index],)
        constraints = Constraints(self.constraints.strategies, types)
        choice = StrategyChoice(
            self.program, self.axis, self.size, self.costs, constraints, lambda call, size: self.candidates[call]
        )
        choice._attempts = [*self._attempts]
        choice._update = self._update
        choice._build(self._attempt)
        return choice

    def fitting(self, memory: float | None, *, stages: int = 1) -> Division:
        """Returns the division at the lowest price of memory, within 10 %, at which it fits the memory."""
        self.price = 0.0
        division, held, _ = self.solve(0.0)
        if memory is None or held.total(stages) <= memory:
            return division
        price = 1e-3 / max(held.total(stages), 1.0)  # a millisecond for all bytes
        least = held
        for _ in range(24):  # up to a price at which seconds no longer matter
            self.price = price
            division, held, _ = self.solve(price)
            least = min(least, held, key=lambda h: h.total(stages))
            if held.total(stages) <= memory:
                return self._cheaper(division, price / 4, price, memory, stages)
            price *= 4
        raise PlanError(
            f"every division over {self.size} ranks needs at least {least.total(stages):.3g} bytes on a rank "
            f"({least.parameters:.3g} for parameters, gradients and optimizer state, {least.activations:.3g} saved for "
            f"backward); the limit is {memory:.3g}: use more ranks, smaller microbatches or recomputation"
        )

    def _cheaper(self, division: Division, low: float, high: float, memory: float, stages: int) -> Division:
        """Bisects the price between `low`, which does not fit, and `high`, which does, to within 10 %."""
        while high > 1.1 * low:
            middle = (low * high) ** 0.5
            candidate, held, _ = self.solve(middle)
            if held.total(stages) <= memory:
                division, high = candidate, middle
                self.price = middle
            else:
                low = middle
        return division


def _is_layout(type_: SpmdType, value: Value) -> bool:
    """Returns whether a parameter can be stored in this type: shards, of blocks or not, equal ones on adjacent axes."""
    if isinstance(type_, WholeOnRank):
        return True
    if not isinstance(type_, Shard) or type_ != S(type_.dim, stride=type_.stride):
        return False
    return not any(isinstance(before, Shard) for before in value.outer) or value.outer[-1] == type_


def is_whole(strategy: Strategy) -> bool:
    """Returns whether every rank computes the global call."""
    return all(type_ in (R, I) for type_ in (*strategy.operands, *strategy.results))


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "nothing"
