"""A program at small sizes: the same calls on smaller tensors, so that it can be run where the whole is too large.

Size by size (`sizes.py`): it gets a smaller length, and every call that sees it is changed in its integers, as a local
call is (`congruence.py`), until the rule sees the same labels with the new lengths and torch gives results of the new
shapes. Where a result is of another length (a convolution's, a padded one's), the size of that dim becomes it. A size
that any call refuses stays as it is. The result is a program of its own: it has other values than the whole one has,
and the same structure.

The count by which a sum is divided is that of the positions left, so that a mean is one. Lengths keep their order
(positions stay within their table) and what they have in common with the number of ranks, so that whatever divides
them still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import gcd, prod
from typing import Any, NamedTuple

import torch

from ..checking.types.rules.normal_form import normal_form
from .congruence import Arguments, Slot
from .program import Call, Program, Value, operands_of, substituted, values_in
from .resized_call import ResizedCall, Shapes, resized_call
from .sizes import Size, Sizes
from .strategies import frozen

__all__ = ["Kept", "Resized", "Shrunk", "picked_of", "shrunk"]

FEW = 4  # of so many positions none is left out
NEAR = 6  # so many calls lie between a sum and its division by a count
DIVISIONS = {"div", "__truediv__", "true_divide", "divide"}


class Resized(NamedTuple):
    """A size, before and after; `why`: it stayed as it is."""

    before: int
    after: int
    where: str
    why: str = ""


class Kept(NamedTuple):
    """Why the sizes that a call sees stay as they are; `fixed`: only those that it needs all of (tables)."""

    why: str
    fixed: bool = False


class Shrunk(NamedTuple):
    """A smaller program.

    Attributes:
        values, calls: those of the small program, by those of the whole.
        sizes: what became of each.
        dims: of each leaf its dims: into which factors each is cut, how many positions there are of each, and are left.
        limits: of leaves of integers that are positions in a table or numbers of classes: how many there are left.
    """

    program: Program
    values: dict[Value, Value]
    calls: dict[Call, Call]
    sizes: list[Resized]
    dims: dict[Value, list[list[tuple[int, int]]]]
    limits: dict[Value, int]


def shrunk(program: Program, size: int, kept: Mapping[Call, Kept] | None = None) -> Shrunk:
    """A program of small sizes.

    Args:
        size: of the axis that it is divided over.
        kept: calls whose sizes stay as they are.
    """
    return _Shrinking(program, size, kept or {}).result()


class _Refused(Exception):
    """A call cannot be made at new sizes."""


class _Other(Exception):
    """A call's result has other lengths than thought: sizes with their lengths."""

    def __init__(self, lengths: dict[Size, int]) -> None:
        self.lengths = lengths


class _Shrinking:
    def __init__(self, program: Program, size: int, kept: Mapping[Call, Kept]) -> None:
        self.program, self.size = program, size
        self.sizes = Sizes(program)
        self.slots: dict[Call, list[Value]] = {}
        self.arguments: dict[Call, Arguments] = {}
        self.readers: dict[Size, list[Call]] = {}
        self.names: dict[Size, str] = {}
        self.known: dict[Any, ResizedCall] = {}
        self.refusals: dict[Size, str] = {}
        for call in program.calls:
            self._slotted(call)
        for value in program.leaves:
            self._name(value)
        for call in program.calls:
            values = [*values_in((call.args, call.kwargs)), *call.results]
            for each in dict.fromkeys(one for value in values for dim in self.sizes.of(value) for one in dim):
                self.readers.setdefault(each, []).append(call)
            for value in call.results:
                self._name(value)
        for call, why in kept.items():
            self._keep(call, why)
        self.least = 0
        for _, group in groupby(sorted(self.readers, key=_length), _length):
            equal = list(group)
            for each in equal:
                self._shrink(each, equal)
            self.least = max([self.least, *(each.current for each in equal if each not in self.refusals)])

    def _slotted(self, call: Call) -> None:
        values: list[Value] = []

        def slot(value: Value) -> Slot:
            values.append(value)
            return Slot(len(values) - 1, value.shape, value.dtype, call.grad and value.requires_grad)

        self.arguments[call] = substituted((call.args, call.kwargs), Value, slot)
        self.slots[call] = values

    def _name(self, value: Value) -> None:
        for number, dim in enumerate(self.sizes.of(value)):
            for each in dim:
                self.names.setdefault(each, f"dim {number} of {value.path or value.name}")

    def _keep(self, call: Call, kept: Kept) -> None:
        spec, labels = self.sizes.calls[call]
        sizes = [one for value in self.slots[call] for dim in self.sizes.of(value) for one in dim]
        if kept.fixed and spec is not None and spec.fixed:
            sizes = [one for label in spec.fixed.keys() & labels.keys() for one in self.sizes.of_label(call, label)]
        for each in sizes:
            each.kept = each.kept or kept.why

    # --- one size after the other

    def _shrink(self, each: Size, equal: Sequence[Size]) -> None:
        """Makes a size small, and as small as those of equal lengths."""
        if each.kept or each.current != each.length or each.length <= FEW:
            return
        for length in self._lengths(each, equal):
            try:
                self._resized({each: length})
            except _Refused as refused:
                self.refusals.setdefault(each, str(refused))
            else:
                return

    def _lengths(self, each: Size, equal: Sequence[Size]) -> Iterator[int]:
        """Which lengths to try: small ones that have as much in common with the number of ranks, then divisors."""
        common = gcd(each.length, self.size)
        same = [other.current for other in equal if other.current < other.length]
        first = max((self.least // common + 1) * common, 2 * common)
        while gcd(first, self.size) != common:
            first += common
        divisors = [x for x in range(first, min(each.length, 512)) if each.length % x == 0 and x % common == 0]
        for length in dict.fromkeys((*same, first, 2 * first, 4 * first, *divisors)):
            if length < each.length:
                yield length

    def _resized(self, lengths: dict[Size, int]) -> None:
        """Gives sizes other lengths, and whatever follows from them.

        Raises:
            _Refused: a call cannot be made with them; nothing is changed.
        """
        for _ in range(len(self.readers) + 1):
            before = {each: each.current for each in lengths}
            for each, length in lengths.items():
                each.current = length
            try:
                calls = dict.fromkeys(call for each in lengths for call in self.readers[each])
                arguments = {call: self._adjusted(call, before) for call in calls}
            except _Other as other:
                lengths = {**lengths, **other.lengths}
            except _Refused:
                self._back(before)
                raise
            else:
                self.arguments.update(arguments)
                return
            self._back(before)
        raise _Refused("one length follows from another without an end")

    def _back(self, before: Mapping[Size, int]) -> None:
        for each, length in before.items():
            each.current = length

    # --- one call

    def _adjusted(self, call: Call, before: Mapping[Size, int]) -> Arguments:
        """The arguments of a call at the current sizes.

        Args:
            before: the lengths of the sizes that changed.
        """
        values = self.slots[call]

        def resized(slot: Slot) -> Slot:
            return Slot(slot.number, self.sizes.shape(values[slot.number]), slot.dtype, slot.differentiable)

        arguments: Arguments = substituted(self.arguments[call], Slot, resized)
        shapes = tuple(self.sizes.shape(value) for value in call.results)
        lengths = tuple((length, each.current) for each, length in before.items())
        spec, labels = self.sizes.calls[call]
        wanted = None
        if spec is not None:
            new = {label: prod(one.current for one in self.sizes.of_label(call, label)) for label in labels}
            wanted = normal_form(spec._replace(sizes={**spec.sizes, **new}, ranges={}))
        try:
            key = call.function, frozen(arguments), shapes, lengths, wanted
            if key not in self.known:
                self.known[key] = resized_call(call, arguments, wanted, shapes, lengths)
            answer = self.known[key]
        except TypeError:  # an argument that cannot be hashed
            answer = resized_call(call, arguments, wanted, shapes, lengths)
        if answer.arguments is None:
            other = self._other(call, answer.shapes, before)
            raise _Other(other) if other else _Refused(f"{call.name} at {call.where}")
        return answer.arguments

    def _other(self, call: Call, shapes: Shapes, fixed: Mapping[Size, int]) -> dict[Size, int]:
        """The sizes that a call gives other lengths than they have, each alone in its dim; none: it cannot be that."""
        found: dict[Size, int] = {}
        for value, shape in zip(call.results, shapes):
            for dim, length in zip(self.sizes.of(value), shape):
                if prod(each.current for each in dim) == length:
                    continue
                free = [each for each in dim if each not in fixed and not each.kept]
                free = [each for each in free if each.current == each.length] if len(free) > 1 else free
                rest = prod(each.current for each in dim if each not in free)
                if (
                    len(free) != 1
                    or length % rest
                    or length < 2 * rest
                    or found.get(free[0], length // rest) != length // rest
                ):
                    return {}
                found[free[0]] = length // rest
        return found

    # --- the whole

    def _why(self, each: Size) -> str:
        return "" if each.current != each.length else each.kept or self.refusals.get(each, "")

    def result(self) -> Shrunk:
        instead = {value: replace(value, shape=self.sizes.shape(value)) for value in self.program.leaves}
        calls = self._small_calls(instead)
        dims = {
            value: [[(each.length, each.current) for each in dim] for dim in self.sizes.of(value)]
            for value in self.program.leaves
        }
        for value in self.program.constants:
            assert value.constant is not None
            instead[value].constant = picked_of(value.constant, dims[value])
        own = self.program
        program = replace(
            own,
            inputs=[instead[value] for value in own.inputs],
            parameters=[instead[value] for value in own.parameters],
            buffers=[instead[value] for value in own.buffers],
            constants=[instead[value] for value in own.constants],
            calls=list(calls.values()),
            outputs=[instead[x] if isinstance(x, Value) else x for x in own.outputs],
            arguments=[instead[x] if isinstance(x, Value) else x for x in own.arguments],
        )
        sizes = [
            Resized(each.length, each.current, self.names[each], self._why(each))
            for each in sorted(self.readers, key=lambda each: each.length)
        ]
        return Shrunk(program, instead, calls, sizes, dims, self._limits())

    def _small_calls(self, instead: dict[Value, Value]) -> dict[Call, Call]:
        """What stands for each call; what stands for its results is added to `instead`."""
        calls: dict[Call, Call] = {}
        for call in self.program.calls:
            small = [instead[value] for value in self.slots[call]]
            args, kwargs = substituted(self.arguments[call], Slot, partial(_numbered, small))
            if call.name in DIVISIONS:
                args = tuple([self._count(call, x) if type(x) is int else x for x in args])
            calls[call] = new = replace(call, args=args, kwargs=kwargs, results=[])
            for value in call.results:
                instead[value] = replace(value, shape=self.sizes.shape(value), producer=new)
                new.results.append(instead[value])
            new.flops = int(call.flops * _ratio(new) / _ratio(call)) if call.flops else 0
        return calls

    def _count(self, call: Call, number: int) -> int:
        """By what a sum is divided: by how many positions it was a sum of, here; else by what it was divided."""
        values = operands_of(call)[:1]
        for _ in range(NEAR):
            if not values or number <= FEW:
                break
            shape = self.sizes.shape(values[0])
            if prod(values[0].shape) == number:
                return prod(shape)
            if number in values[0].shape:
                return shape[values[0].shape.index(number)]
            producer = values[0].producer
            values = operands_of(producer)[:1] if producer is not None else []
        return number

    def _limits(self) -> dict[Value, int]:
        limits: dict[Value, int] = {}
        made_of = {value: {value} for value in self.program.leaves if _counts(value)}
        for call in self.program.calls:
            spec, labels = self.sizes.calls[call]
            read = [value for value in values_in((call.args, call.kwargs)) if value in made_of]
            leaves = {leaf for value in read for leaf in made_of[value]}
            made_of |= {value: leaves for value in call.results if leaves and _counts(value)}
            if spec is None:
                continue
            for value, dims in zip(operands_of(call), spec.ins):
                for label in {label for dim in dims or () for label in dim} & spec.fixed.keys() & labels.keys():
                    if value not in made_of:
                        length = prod(each.current for each in self.sizes.of_label(call, label))
                        limits |= {leaf: min(length, limits.get(leaf, length)) for leaf in leaves}
        return limits


def _ratio(call: Call) -> float:
    """What the operations of a product or convolution go with: the root of the elements of all three."""
    return prod(prod(value.shape) ** 0.5 for value in (*operands_of(call)[:2], *call.results[:1]))


def _numbered(values: Sequence[Value], slot: Slot) -> Value:
    return values[slot.number]


def _counts(value: Value) -> bool:
    """It may be positions in a table, or numbers of classes."""
    return value.dtype in (torch.int64, torch.int32)


def _length(each: Size) -> int:
    return each.length


def picked_of(x: torch.Tensor, dims: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """The first positions along every size of a tensor.

    Args:
        dims: into which factors each dim is cut: how many positions there are, and how many are left.
    """
    shape = [prod(after for _, after in dim) for dim in dims]
    x = x.reshape([before for dim in dims for before, _ in dim])
    for number, (_, after) in enumerate(size for dim in dims for size in dim):
        x = x.narrow(number, 0, after)
    return x.reshape(shape).clone()
