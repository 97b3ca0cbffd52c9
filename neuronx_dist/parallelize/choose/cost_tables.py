"""The choice of a program's strategies as cost tables over variables, whose sum `planning.choice` minimizes.

The variables are the strategy of each call, the type of each parameter, and, for each value with several consumers, the
set of *forms* (types) that the value is converted to, so that a form that several consumers want is paid for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...planning.choice import Scope
from ...planning.costs import Costs
from ...program.program import Call, Program, Strategy, Value, operands_of
from ...rules.spec import ALL, RULES
from ...spmd.types import I, R, Shard, SpmdType
from .. import composites
from .conversions import OPERATORS, WholeOnRank, conversion

__all__ = ["Constraints", "CostTables", "HeldBytes", "Saved", "drawn_bytes", "saves"]

Saved = tuple[Value | Call, SpmdType]  # a tensor saved for backward in a type; a call: the mask that it draws
Wants = tuple[frozenset[int], ...]  # by option of a consumer, the numbers of the types that it wants a value in
GRAIN = 2.0**-40  # seconds: sums of multiples of it are exact in float64 up to 8192 s
FEW = 4  # consumers whose forms are always chosen exactly
CONVERSIONS = frozenset(OPERATORS.values())  # conversions of the first axis, as calls of its local program
MAX_FORMS = 6  # types in one variable of forms
_ATTENTION = {F.scaled_dot_product_attention, composites.scaled_dot_product_attention}
_DROPOUT = {F.dropout, torch.dropout, composites.dropout}


@dataclass
class Constraints:
    """Constraints on the choice: the strategies that a call may have, the types that a parameter may have.

    Attributes:
        strategies: by call, tests that its strategy must all pass.
        types: by parameter, the types that it may have.
    """

    strategies: dict[Call, list[Callable[[Strategy], bool]]] = field(default_factory=dict)
    types: dict[Value, tuple[SpmdType, ...]] = field(default_factory=dict)

    def allows(self, call: Call, strategy: Strategy) -> bool:
        return all(allowed(strategy) for allowed in self.strategies.get(call, ()))


class HeldBytes(NamedTuple):
    """Bytes that a rank holds: parameters with gradients and optimizer state, and tensors saved for backward."""

    parameters: float
    activations: float

    def total(self, stages: int = 1) -> float:
        """Bytes on each of `stages` pipeline stages, which holds the activations of up to `stages` microbatches."""
        return self.parameters / stages + self.activations


def saves(call: Call) -> bool:
    """Returns whether a call's backward reads its operands, as in all functions not linear in all operands at once."""
    if not call.grad or not any(result.requires_grad for result in call.results) or call.function in CONVERSIONS:
        return False
    rule = RULES.get(call.function)
    if rule is None:
        return True
    return rule.linear != ALL and not any(set(range(len(operands_of(call)))) <= set(group) for group in rule.linear)


def drawn_bytes(call: Call, device_type: str) -> int:
    """Returns the bytes that dropout saves for backward besides its operands, by the kernels of a device.

    CUDA saves a mask of bool, and of attention a seed. A CPU saves the mask in the dtype of the input, and of attention
    with dropout, for which it has no fused kernel, the scores, the mask and their product, in float32 or wider.
    """
    if not call.random or not call.grad or not any(result.requires_grad for result in call.results):
        return 0
    result, on_cpu = call.results[0], device_type == "cpu"
    if call.function in _ATTENTION:
        keys = operands_of(call)[1].shape[-2]
        return 3 * prod(result.shape[:-1]) * keys * max(4, result.dtype.itemsize) * on_cpu
    return prod(result.shape) * (result.dtype.itemsize if on_cpu else 1) * (call.function in _DROPOUT)


class CostTables:
    """The tables of one program, for one size of the axis.

    Args:
        options: the strategies that each call may have, none of them empty.
        types: the types that each leaf of the program may have.
        forms: number of types that a value of many consumers may be converted to; None: any number, which is exact.
        tied: False: if a parameter has several consumers, each has a copy of it, in any type; and `forms` holds for
            values of few consumers too.
    """

    def __init__(
        self,
        program: Program,
        size: int,
        costs: Costs,
        options: Mapping[Call, Sequence[Strategy]],
        types: Mapping[Value, Sequence[SpmdType]],
        *,
        backward: bool,
        forms: int | None = None,
        tied: bool = True,
    ) -> None:
        self.program, self.size, self.costs, self.backward = program, size, costs, backward
        self.options, self.types = options, types
        self.forms, self.few = forms, FEW if tied else 1
        self.sizes: list[int] = []
        self.owner: list[Call | Value] = []  # the call or value of each variable, for messages
        self.variable: dict[Call | Value, int] = {}  # the variable of each call and parameter
        consumers = {} if tied else program.consumers()
        self.copies: dict[Value, dict[Call, int]] = {x: {} for x in program.parameters if len(consumers.get(x, ())) > 1}
        self._number: dict[SpmdType, int] = {}
        self._types: list[SpmdType] = []
        self._cache: dict[object, torch.Tensor] = {}
        self._of_call: dict[Call, torch.Tensor] = {}
        self._wants: dict[Value, list[tuple[Call, Wants]]] = {}
        self._sources: dict[Value, tuple[int, ...]] = {}
        self.saved: set[Value] = set()  # values that a backward reads
        self._drawn: dict[Call, int] = {}  # bytes that a call's backward reads besides, of all ranks
        self.update: Callable[[Value], float] | None = None
        self._describe()
        self._count = len(self.sizes)

    @cached_property
    def forward(self) -> CostTables:
        """The tables of the same program without backward, for `times`."""
        return CostTables(
            self.program, self.size, self.costs, self.options, self.types, backward=False, forms=1, tied=False
        )

    # The variables.

    def _describe(self) -> None:
        for value in self.program.leaves:
            self._sources[value] = tuple(map(self.number, self.types[value]))
        for call in self.program.calls:
            options = self.options[call]
            operands = operands_of(call)
            wanted = [[self.number(option.operands[i]) for option in options] for i in range(len(operands))]
            for value in dict.fromkeys(operands):
                if len(self._sources[value]) > 1 and value.producer is None:
                    if value in self.copies:
                        self.copies[value][call] = len(self.sizes)
                        self.sizes.append(len(self._sources[value]))
                        self.owner.append(value)
                    elif value not in self.variable:
                        self._add(value, len(self._sources[value]))
                reads = [wanted[i] for i, operand in enumerate(operands) if operand is value]
                self._wants.setdefault(value, []).append((call, tuple(map(frozenset, zip(*reads, strict=True)))))
            if saves(call):
                self.saved.update(operands)
            if self.backward and (nbytes := drawn_bytes(call, self.costs.device_type)):
                self._drawn[call] = nbytes
            for index, result in enumerate(call.results):
                self._sources[result] = tuple(self.number(option.results[index]) for option in options)
            self._add(call, len(options))

    def _add(self, owner: Call | Value, size: int) -> None:
        self.variable[owner] = len(self.sizes)
        self.sizes.append(size)
        self.owner.append(owner)

    def number(self, type_: SpmdType) -> int:
        """Returns the number of a type: numbers hash faster than types."""
        number = self._number.setdefault(type_, len(self._types))
        if number == len(self._types):
            self._types.append(type_)
        return number

    # The costs.

    def all(self, price: float, *, relaxed: bool = False) -> list[tuple[torch.Tensor, Scope]]:
        """Returns all tables at a price of memory, in seconds per byte. Adds the variables of forms to `sizes`.

        Args:
            relaxed: values of many consumers are converted for nothing, so that the minimum is a lower bound.
        """
        return list(self._all(price, relaxed))

    def _all(self, price: float, relaxed: bool) -> Iterator[tuple[torch.Tensor, Scope]]:
        del self.sizes[self._count :], self.owner[self._count :]
        for call in self.program.calls:
            yield self._seconds(call), (self.variable[call],)
            if price and self._drawn.get(call):
                held = tuple(price * self._drawn_by(call, option) for option in self.options[call])
                yield self._once(("drawn", held), partial(_rounded_row, held)), (self.variable[call],)
        for value in self.program.parameters:
            variables = [*self.copies[value].values()] if value in self.copies else [self.variable.get(value)]
            for variable in variables if price or self.update else ():
                if variable is not None:
                    types = [self._types[t] for t in self._sources[value]]
                    held = tuple(
                        (price * self.parameter_bytes(value, t) + self.update_seconds(value, t)) / len(variables)
                        for t in types
                    )
                    yield self._once(("parameter", held), partial(_rounded_row, held)), (variable,)
        for value, wants in self._wants.items():
            if relaxed and len(wants) > self.few:
                continue
            yield from self._conversions(value, wants, price if value in self.saved else 0.0)
        yield from self._outputs()

    def only(self, call: Call, strategy: Strategy) -> tuple[torch.Tensor, Scope]:
        """Returns a table that forbids all other strategies of a call."""
        return _rounded_row([0.0 if option is strategy else inf for option in self.options[call]]), (
            self.variable[call],
        )

    def update_seconds(self, value: Value, type_: SpmdType) -> float:
        """Seconds of reducing and updating a rank's part of a parameter, which count as one microbatch's; 0 by default.

        `update` has the seconds of the whole parameter.
        """
        return self.local(self.update(value), type_) if self.update else 0.0

    def times(
        self,
        chosen: Mapping[Call, Strategy],
        type_of: Callable[[Value], SpmdType],
        calls: Sequence[Call] | None = None,
    ) -> list[float]:
        """Seconds of each call in a division, including the conversions that it is the first to need.

        Args:
            calls: those of one stage; None: all.
        """
        paid: set[tuple[Value, int]] = set()
        times = []
        for call in self.program.calls if calls is None else calls:
            seconds = float(self._seconds(call)[self.options[call].index(chosen[call])])
            for value, want in zip(operands_of(call), map(self.number, chosen[call].operands), strict=True):
                if (value, want) not in paid:
                    seconds += self.conversion(value, self.number(type_of(value)), want)
                    paid.add((value, want))
            times.append(seconds)
        return times

    def _once(self, key: object, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the same tensor for equal tables, which `planning.choice` recognizes by identity."""
        table = self._cache.get(key)
        if table is None:
            table = self._cache[key] = build()
        return table

    def _seconds(self, call: Call) -> torch.Tensor:
        """Seconds of a call under each of its strategies, forward and backward."""
        if call not in self._of_call:
            self._of_call[call] = self._seconds_of(call)
        return self._of_call[call]

    def _seconds_of(self, call: Call) -> torch.Tensor:
        options = self.options[call]
        moved, backward = self._moved(call), self._has_backward(call)
        types = tuple(tuple(map(self.number, (*option.operands, *option.results))) for option in options)
        work = tuple((option.share, option.steps, self.sent_inside(call, option)) for option in options)

        def build() -> torch.Tensor:
            return _rounded_row([sum(self.seconds(call, option)) for option in options])

        return self._once(("call", types, work, moved, call.flops, backward, call.function in CONVERSIONS), build)

    def seconds(self, call: Call, option: Strategy) -> tuple[float, float]:
        """Seconds of a call under a strategy, forward and backward: of computing, and of collectives inside of it."""
        moved = self._moved(call)
        backward = self._has_backward(call)
        local = sum(self.local(b, t) for b, t in zip(moved, (*option.operands, *option.results), strict=False))
        compute = self.costs.compute(call.flops * option.share, local, backward=backward)
        if any(isinstance(t, WholeOnRank) for t in option.results):  # the rank that has most makes a part of the calls
            compute = option.share * self.costs.compute(call.flops, sum(moved), backward=backward)
        compute = 0.0 if call.function in CONVERSIONS else compute
        sent, sent_back = self.sent_inside(call, option)
        messages = bool(sent) * (option.steps or 1) + bool(sent_back) * (2 * option.steps or 1)
        seconds = self.costs.communicate(sent + sent_back, messages)
        return compute, max(0.0, seconds - compute) if option.steps else seconds

    def sent_inside(self, call: Call, option: Strategy) -> tuple[int, int]:
        """Returns the bytes sent inside of a call, forward and backward.

        Backward sends for the gradient of the first operand; of whole tables, if any of them has a gradient.
        """
        forward, backward = option.bytes_moved
        operands = operands_of(call)
        tables = [x for x, t in zip(operands, option.operands) if isinstance(t, WholeOnRank)]
        needed = self._has_backward(call) and any(x.requires_grad for x in tables or operands[:1])
        return forward, backward if needed else 0

    def _moved(self, call: Call) -> tuple[int, ...]:
        """Returns the bytes of the tensors that a call reads and writes; a view moves none."""
        rule = RULES.get(call.function)
        if rule is not None and rule.aliases:
            return ()
        return tuple(value.nbytes for value in (*operands_of(call), *call.results))

    def _has_backward(self, call: Call) -> bool:
        return self.backward and call.grad and any(result.requires_grad for result in call.results)

    def local(self, nbytes: float, type_: SpmdType) -> float:
        """Bytes of a tensor on one rank; of those that are whole on ranks, each counts for the rank that has most."""
        if isinstance(type_, WholeOnRank):
            return nbytes * type_.share
        return nbytes / self.size if isinstance(type_, Shard) else nbytes

    def parameter_bytes(self, value: Value, type_: SpmdType) -> float:
        """Bytes of a parameter on one rank, with its gradient and the optimizer's state."""
        nbytes = value.nbytes
        if value.requires_grad and self.backward:
            nbytes += value.nbytes + self.costs.optimizer_bytes * prod(value.shape)
        return self.local(nbytes, type_)

    def conversion(self, value: Value, src: int, dst: int) -> float:
        """Seconds of converting a value from one type to another, types by number; infinite if that is impossible.

        A conversion that sends nothing costs `GRAIN`, so that none is made without need.
        """
        if src == dst:
            return 0.0
        converted = conversion(value, self._types[src], self._types[dst], self.size)
        if converted is None:
            return inf
        seconds = self.costs.communicate(converted.forward, converted.collectives[0])
        if self.backward:
            seconds += self.costs.communicate(converted.backward, converted.collectives[1])
        return max(seconds, GRAIN) if value.requires_grad else seconds

    def _conversions(
        self, value: Value, wants: Sequence[tuple[Call, Wants]], price: float
    ) -> Iterator[tuple[torch.Tensor, Scope]]:
        """Yields the tables of one value: from the types that it may be made in to those that its consumers want."""
        sources = self._sources[value]
        maker = self.variable.get(value.producer or value)
        backward = self.backward and value.requires_grad
        facts = (sources, value.shape, value.dtype, backward, value.producer is None, price)
        if len(wants) == 1 or value in self.copies:
            for call, wanted in wants:
                table = self._once(("one", facts, wanted), partial(self._matrix, value, wanted, price))
                yield _between(table, self.copies.get(value, {}).get(call, maker), self.variable[call])
            return
        every = sorted(set().union(*(forms for _, wanted in wants for forms in wanted)))
        paid = [form for form in every if price or any(self.conversion(value, t, form) > 0 for t in sources)]
        for start in range(0, len(paid), MAX_FORMS):
            group = paid[start : start + MAX_FORMS]
            most = max(len(forms) for _, wanted in wants for forms in wanted) * len(wants)
            sets = _subsets(group, self.forms if self.forms and len(wants) > self.few else most)
            forms = len(self.sizes)
            self.sizes.append(len(sets))
            self.owner.append(value)
            table = self._once(("forms", facts, sets), partial(self._matrix, value, sets, price))
            yield _between(table, maker, forms)
            for call, wanted in wants:
                table = self._once(("in", sets, wanted), partial(_contained, sets, wanted, frozenset(group)))
                yield table, (forms, self.variable[call])

    def _matrix(self, value: Value, sets: Iterable[frozenset[int]], price: float) -> torch.Tensor:
        """Cost of converting a value from each type (row) to each set of types (column), memory price included."""
        leaf = value.producer is None  # a leaf is in memory already, in the type that it is stored in

        def seconds(src: int, form: int) -> float:
            held = 0.0 if leaf and src == form else self.local(value.nbytes, self._types[form])
            return self.conversion(value, src, form) + price * held

        sets = list(sets)
        rows = {src: [sum(seconds(src, form) for form in forms) for forms in sets] for src in set(self._sources[value])}
        return _rounded([rows[src] for src in self._sources[value]])

    def _outputs(self) -> Iterator[tuple[torch.Tensor, Scope]]:
        """Yields the tables of outputs, which are R, or I with a gradient: all ranks receive the same gradient."""
        for value in self.program.outputs:
            if isinstance(value, Value) and value.producer is not None:
                seconds = [self.output_conversion(value, src)[0] for src in self._sources[value]]
                yield _rounded_row(seconds), (self.variable[value.producer],)

    def output_conversion(self, value: Value, src: int) -> tuple[float, SpmdType]:
        """Returns the seconds of converting an output to R or I, and that type."""
        ends = (I,) if value.requires_grad else (R, I)
        return min(((self.conversion(value, src, self.number(end)), end) for end in ends), key=lambda pair: pair[0])

    # The memory of a choice.

    def saved_by(self, chosen: Mapping[Call, Strategy], types: Mapping[Value, SpmdType]) -> dict[Call, float]:
        """Returns the bytes that a rank saves for backward, by the first call that wants a tensor in this type."""
        saved: dict[Call, float] = {}
        counted: set[Saved] = set()
        for call in self.program.calls if self.backward else ():
            tensors = self.saved_of(call, chosen[call], types)
            if new := tensors.keys() - counted:
                saved[call] = sum(tensors[tensor] for tensor in new)
                counted |= new
        return saved

    def saved_of(self, call: Call, strategy: Strategy, types: Mapping[Value, SpmdType]) -> dict[Saved, float]:
        """Returns the bytes of each tensor that a rank may save for a call; a call in place of a tensor: its mask."""
        saved: dict[Saved, float] = {}
        for value, want in zip(operands_of(call), strategy.operands, strict=True):
            if value in self.saved and want != types.get(value):
                saved[value, want] = self.local(value.nbytes, want)
        if call in self._drawn:
            saved[call, strategy.results[0]] = self._drawn_by(call, strategy)
        return saved

    def _drawn_by(self, call: Call, strategy: Strategy) -> float:
        return self.local(self._drawn[call], strategy.results[0])

    def held_by(self, chosen: Mapping[Call, Strategy], types: Mapping[Value, SpmdType]) -> list[float]:
        """Returns the bytes that a rank holds of each call: parameters that it is the first to read, and saved ones."""
        saved, counted, sizes = self.saved_by(chosen, types), set[Value](), []
        for call in self.program.calls:
            first = {x for x in operands_of(call) if x.kind == "parameter"} - counted
            counted |= first
            sizes.append(saved.get(call, 0.0) + sum(self.parameter_bytes(value, types[value]) for value in first))
        return sizes

    def held(self, chosen: Mapping[Call, Strategy], types: Mapping[Value, SpmdType]) -> HeldBytes:
        """Returns the bytes that a rank holds at the end of forward."""
        parameters = sum(self.parameter_bytes(value, types[value]) for value in self.program.parameters)
        activations = sum(self.saved_by(chosen, types).values())
        return HeldBytes(parameters, activations)


def reachable(value: Value, sources: Iterable[SpmdType], want: SpmdType, size: int) -> bool:
    """Returns whether a conversion exists from one of these types to the wanted one."""
    return want in sources or any(conversion(value, src, want, size) is not None for src in sources)


def _between(table: torch.Tensor, maker: int | None, consumer: int) -> tuple[torch.Tensor, Scope]:
    """Returns a table over maker and consumer, or over the consumer only if the maker is no variable."""
    return (table[0], (consumer,)) if maker is None else (table, (maker, consumer))


def _subsets(items: Sequence[int], largest: int) -> tuple[frozenset[int], ...]:
    return tuple(
        frozenset(chosen) for count in range(min(largest, len(items)) + 1) for chosen in combinations(items, count)
    )


def _contained(sets: Sequence[frozenset[int]], wanted: Wants, among: frozenset[int]) -> torch.Tensor:
    """Returns 0 where the set of forms (row) contains the forms that an option (column) wants, else infinity."""
    return torch.tensor(
        [[0.0 if forms & among <= available else inf for forms in wanted] for available in sets]
    ).double()


def _rounded(seconds: Sequence[Sequence[float]]) -> torch.Tensor:
    return (torch.tensor(seconds, dtype=torch.float64) / GRAIN).round() * GRAIN


def _rounded_row(seconds: Sequence[float]) -> torch.Tensor:
    return _rounded([seconds])[0]
