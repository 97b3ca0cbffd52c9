"""Which dims of a program's tensors have one size: all that calls see as the same positions.

The label spec of a call says which factors of its operands' and results' dims belong together. What one call sees as
one label another one sees as several (a view of the hidden dim as heads and their width), so labels are cut into
`Size`s, the common refinement of all calls, and sizes that any call sees as one are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from ..checking.types.rules import Spec
from .congruence import Slot, spec_of
from .derivation import whole_tensor
from .program import Call, Program, Value, operands_of, substituted
from .strategies import facts_of, frozen

__all__ = ["CallSizes", "Size", "Sizes"]


class Size:
    """A factor of dims, of `length` positions; `current`: how many of them are left."""

    def __init__(self, length: int) -> None:
        self.length = self.current = length
        self.same_as: Size | None = None
        self.parts: list[Size] = []
        self.kept = ""  # why it stays as it is

    def root(self) -> Size:
        size = self
        while size.same_as is not None:
            if size.same_as.same_as is not None:  # half of the way, the next time
                size.same_as = size.same_as.same_as
            size = size.same_as
        return size


class CallSizes(NamedTuple):
    """What a call says of sizes: its spec, without factors of 1 (None: it has none), and the sizes of its labels."""

    spec: Spec | None
    labels: dict[int, list[Size]]


class Sizes:
    """The sizes of a program.

    Attributes:
        calls: of each call what it says.
    """

    def __init__(self, program: Program) -> None:
        self._dims: dict[Value, list[list[Size]]] = {}
        self._specs: dict[object, Spec | None] = {}
        self.calls: dict[Call, CallSizes] = {}
        for value in program.leaves:
            self._add(value)
        for call in program.calls:
            for value in call.results:
                self._add(value)
            self.calls[call] = self._of_call(call)

    def of(self, value: Value) -> list[list[Size]]:
        """The sizes of each dim, outer to inner; none of a dim of length 1."""
        return [_roots(dim) for dim in self._dims[value]]

    def of_label(self, call: Call, label: int) -> list[Size]:
        return _roots(self.calls[call].labels[label])

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape that a value has at the current sizes."""
        return tuple([prod([size.current for size in dim]) for dim in self.of(value)])

    def _add(self, value: Value) -> None:
        self._dims[value] = [[Size(length)] if length != 1 else [] for length in value.shape]

    def _of_call(self, call: Call) -> CallSizes:
        spec = self._spec(call)
        if spec is None:
            return CallSizes(None, {})
        labels = {label: [Size(length)] for label, length in spec.sizes.items() if length != 1}
        for value, dims in (*zip(operands_of(call), spec.ins), *zip(call.results, spec.outs)):
            for dim, factors in zip(self._dims[value], dims or ()):
                inner = [size for factor in factors for size in labels.get(factor, ())]
                if prod(size.length for size in dim) == prod(size.length for size in inner):
                    _unify(dim, inner)
                else:
                    _keep((*dim, *inner), f"{call!r} sees another length than it has")
        return CallSizes(spec, labels)

    def _spec(self, call: Call) -> Spec | None:
        """The spec of a call; None: its rule has none, or it asks for values."""
        facts = facts_of(call, "", 1, (), [])
        if facts.rule is None or facts.rule.spec is None or facts.rule.kind != "op":
            return None
        key = None
        try:
            key = facts.function, frozen(facts.arguments)
            if key in self._specs:
                return self._specs[key]
        except TypeError:  # an argument that cannot be hashed
            pass
        try:
            spec = spec_of(facts.rule, substituted(facts.arguments, Slot, whole_tensor))
        except Exception:  # whatever a rule says that asks for the values of its arguments
            spec = None
        if spec is not None and len(spec.ins) != len(facts.slots):
            spec = None
        if key is not None:
            self._specs[key] = spec
        return spec


def _roots(sizes: Iterable[Size]) -> list[Size]:
    """Sizes as they are now: each in its parts, each by the one that it is the same as."""
    found = []
    for size in sizes:
        root = size.root()
        found += _roots(root.parts) if root.parts else [root]
    return found


def _unify(a: Sequence[Size], b: Sequence[Size]) -> None:
    """That two products of sizes are one dim: each pair of factors that begin together is one size, or cut."""
    left, right = _roots(a)[::-1], _roots(b)[::-1]
    while left and right:
        one, other = left.pop().root(), right.pop().root()
        if one.parts or other.parts:
            left += _roots([one])[::-1]
            right += _roots([other])[::-1]
        elif one is other:
            continue
        elif one.length == other.length:
            other.same_as = one
            one.kept = one.kept or other.kept
        elif max(one.length, other.length) % min(one.length, other.length) == 0:
            large, small = (one, other) if one.length > other.length else (other, one)
            rest = Size(large.length // small.length)
            large.parts = [small, rest]
            small.kept = rest.kept = small.kept or large.kept
            (left if large is one else right).append(rest)
        else:
            _keep((one, other, *left, *right), "calls see it in factors that have no common ones")
            return


def _keep(sizes: Iterable[Size], why: str) -> None:
    for size in _roots(sizes):
        size.kept = size.kept or why
