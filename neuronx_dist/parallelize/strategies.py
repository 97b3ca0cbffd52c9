"""The strategies of a call: the ways to run it on the ranks of one axis that typing rules allow.

They are derived (`derivation.py`) once for all calls that look alike: of one function, one rule, one set of shapes,
dtypes and other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..checking.types.rules import RULES, operands
from ..spmd.types import Shard
from .congruence import Arguments, Slot
from .derivation import Derivation, Facts, Refusal
from .program import Call, LocalCall, Strategy, Value, substituted
from .second_axis import derive_second

__all__ = ["Refusal", "candidates", "facts_of", "frozen", "refusals"]

_derived: dict[Any, Derivation] = {}


def candidates(call: Call, axis: str, size: int, *, strides: Sequence[int] = ()) -> list[Strategy]:
    """The strategies of a call on an axis of `size` ranks.

    Args:
        strides: blocks that a chunk or split of the program cuts: labels are cut in so many blocks, too.

    Returns:
        At least "R", all ranks compute the whole.
    """
    values: list[Value] = []
    facts = facts_of(call, axis, size, tuple(strides), values)

    def value(slot: Slot) -> Value:
        return values[slot.number]

    strategies = []
    for template in _derivation(call, facts).templates:
        args, kwargs = call.args, call.kwargs
        if template.arguments is not None:
            args, kwargs = substituted(template.arguments, Slot, value)
        types = template.operands, template.results
        share = 1 / size if any(isinstance(spmd_type, Shard) for spmd_type in (*types[0], *types[1])) else 1.0
        local = LocalCall(template.function or call.function, args, kwargs)
        on_first = call.outer.bytes_moved if call.outer else (0, 0)
        sent = tuple(own + int(first * share) for own, first in zip(template.bytes_moved, on_first, strict=True))
        strategies.append(Strategy(template.name, *types, local, share, (sent[0], sent[1])))
    return strategies


def refusals(call: Call, axis: str, size: int, *, strides: Sequence[int] = ()) -> list[Refusal]:
    """The candidates of a call that are no strategies, and why."""
    return _derivation(call, facts_of(call, axis, size, tuple(strides), [])).refusals


def facts_of(call: Call, axis: str, size: int, strides: tuple[int, ...], values: list[Value]) -> Facts:
    """The facts of a call; its tensors are put into `values`, by the numbers of their slots."""

    def slot(value: Value) -> Slot:
        values.append(value)
        return Slot(len(values) - 1, value.shape, value.dtype, call.grad and value.requires_grad)

    arguments: Arguments = substituted((call.args, call.kwargs), Value, slot)
    return Facts(
        call.function,
        RULES.get(call.function),
        arguments,
        tuple(operands(*arguments, Slot)),
        tuple(value.shape for value in call.results),
        call.writes,
        any(value.varies for value in (*values, *call.results)),
        call.random,
        axis,
        size,
        strides,
        call.outer and call.outer._replace(bytes_moved=(0, 0), whole=None),
        _original(call),
    )


def _original(call: Call) -> tuple[Callable[..., Any], Arguments] | None:
    """The function and arguments of the whole call in whose place a composite stands."""
    whole = call.outer.whole if call.outer else None
    if whole is None or whole.function is call.function:
        return None
    values: list[Value] = []

    def slot(value: Value) -> Slot:
        values.append(value)
        return Slot(len(values) - 1, value.shape, value.dtype, False)

    return whole.function, substituted((whole.args, whole.kwargs), Value, slot)


def _derivation(call: Call, facts: Facts) -> Derivation:
    try:
        key = facts.function, facts.rule, frozen(facts.arguments), facts[4:-1], frozen(facts.original)
        hash(key)
    except TypeError:  # an argument that cannot be hashed
        return derive_second(facts)
    if key not in _derived:
        _derived[key] = derive_second(facts)
    return _derived[key]


def frozen(x: Any) -> Any:
    """Arguments as a key: 1, 1.0 and True are different ones."""
    if isinstance(x, Slot):
        return x
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(frozen, x))
    if isinstance(x, dict):
        return dict, tuple((name, frozen(item)) for name, item in x.items())
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    return type(x), x
