"""The strategies of a call: the ways to run it on the ranks of one axis that typing rules allow.

They are derived (`derivation.py`) once for all calls with the same function, rule, shapes, dtypes and other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from math import gcd
from types import MappingProxyType
from typing import Any

from ...program.experts import to_experts, to_tokens
from ...program.program import Call, LocalCall, Program, Strategy, Value, operands_of
from ...rules import RULES, operands
from ...rules.containers import substituted
from ...rules.local_call import Arguments, TensorSlot
from ...spmd.types import Shard
from .derivation import Derivation, Facts, Refusal
from .later_axis import derive_later
from .whole_tables import Places

__all__ = ["Refusal", "candidates", "facts_of", "frozen", "refusals", "routed_calls", "strides_of"]

_derived: dict[Any, Derivation] = {}


def candidates(
    call: Call,
    axis: str,
    size: int,
    *,
    strides: Sequence[int] = (),
    routed: Container[Call] = (),
    places: Mapping[Call, Places] = MappingProxyType({}),
) -> list[Strategy]:
    """Returns the strategies of a call on an axis of `size` ranks.

    Args:
        strides: numbers of blocks that the program cuts tensors into: labels may be sharded within such blocks, too.
        routed: calls of the program that read rows of experts (`routed_calls`).
        places: of embedding tables that may be whole on ranks (`whole_tables.places_of`).

    Returns:
        At least the strategy "R": all ranks compute the global call.
    """
    values: list[Value] = []
    facts = facts_of(call, axis, size, tuple(strides), values)._replace(routed=call in routed, places=places.get(call))

    def value(slot: TensorSlot) -> Value:
        return values[slot.number]

    strategies = []
    for template in _derivation(call, facts).templates:
        args, kwargs = call.args, call.kwargs
        if template.arguments is not None:
            args, kwargs = substituted(template.arguments, TensorSlot, value)
        types = template.operands, template.results
        share = template.share
        if share is None:
            share = 1 / size if any(isinstance(spmd_type, Shard) for spmd_type in (*types[0], *types[1])) else 1.0
        local = LocalCall(template.function or call.function, args, kwargs)
        before = call.outer[-1].bytes_moved if call.outer else (0, 0)
        sent = tuple(
            sent_here + int(sent_before * share)
            for sent_here, sent_before in zip(template.bytes_moved, before, strict=True)
        )
        steps = template.steps or (call.outer[-1].steps if call.outer else 0)
        strategies.append(Strategy(template.name, *types, local, share, (sent[0], sent[1]), steps))
    return strategies


def refusals(call: Call, axis: str, size: int, *, strides: Sequence[int] = ()) -> list[Refusal]:
    """Returns the rejected candidates of a call, with the reasons."""
    return _derivation(call, facts_of(call, axis, size, tuple(strides), [])).refusals


def facts_of(call: Call, axis: str, size: int, strides: tuple[int, ...], values: list[Value]) -> Facts:
    """Returns the facts of a call; its tensors are appended to `values`, in the order of slot numbers."""

    def slot(value: Value) -> TensorSlot:
        values.append(value)
        return TensorSlot(len(values) - 1, value.shape, value.dtype, call.grad and value.requires_grad)

    arguments: Arguments = substituted((call.args, call.kwargs), Value, slot)
    return Facts(
        call.function,
        RULES.get(call.function),
        arguments,
        tuple(operands(*arguments, TensorSlot)),
        tuple(value.shape for value in call.results),
        tuple(value.dtype for value in call.results),
        call.writes,
        any(value.varies for value in (*values, *call.results)),
        call.random,
        axis,
        size,
        strides,
        False,
        None,
        tuple(on._replace(bytes_moved=(0, 0), whole=None) for on in call.outer),
        _original(call),
    )


def _original(call: Call) -> tuple[Callable[..., Any], Arguments, int] | None:
    """Returns the function and arguments of the call that a composite replaces, and the number of the axis that has it.

    None: the call is no composite.
    """
    replaced = [
        (number, on.whole)
        for number, on in enumerate(call.outer)
        if on.whole is not None and on.whole.function is not call.function
    ]
    if not replaced:
        return None
    number, whole = replaced[-1]
    values: list[Value] = []

    def slot(value: Value) -> TensorSlot:
        values.append(value)
        return TensorSlot(len(values) - 1, value.shape, value.dtype, False)

    return whole.function, substituted((whole.args, whole.kwargs), Value, slot), number


def _derivation(call: Call, facts: Facts) -> Derivation:
    try:
        key = facts.function, facts.rule, frozen(facts.arguments), facts[4:-1], frozen(facts.original)
        hash(key)
    except TypeError:  # an argument that cannot be hashed
        return derive_later(facts)
    if key not in _derived:
        _derived[key] = derive_later(facts)
    return _derived[key]


def frozen(x: Any) -> Any:
    """Returns arguments as a key, in which 1, 1.0 and True differ."""
    if isinstance(x, TensorSlot):
        return x
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(frozen, x))
    if isinstance(x, dict):
        return dict, tuple((name, frozen(item)) for name, item in x.items())
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    return type(x), x


def routed_calls(program: Program) -> frozenset[Call]:
    """Returns the calls between `to_experts` and `to_tokens`, which read rows in order of experts."""
    calls: set[Call] = set()
    values: set[Value] = set()
    for call in program.calls:
        if call.function is to_experts or not values.isdisjoint(operands_of(call)):
            calls.add(call)
            values.update(call.results if call.function is not to_tokens else ())
    return frozenset(calls)


CUTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
LOOKUPS = ("embedding", "embedding_bag")  # rows of many tables beside one another are blocks of one width
FEW = 8  # positions: so many that are read one by one are blocks; more are steps of a recurrence


def strides_of(program: Program) -> tuple[int, ...]:
    """Numbers of equal blocks such that each chunk, split (of 8 and 4: blocks of 4) or position has whole blocks.

    A fused weight of queries, keys and values is sharded within each of its blocks, and so are the looked-up rows of
    several tables after `cat`: one collective exchanges them all.
    """
    return tuple(sorted({_blocks(call) for call in program.calls} - {0, 1}))


def _blocks(call: Call) -> int:
    if not call.results or not (operands := operands_of(call)):
        return 1
    shape, pieces = operands[0].shape, [result.shape for result in call.results]
    if call.name in CUTS:
        lengths = [extents for extents in zip(shape, *pieces) if len(set(extents)) > 1]
        return lengths[0][0] // gcd(*lengths[0][1:]) if lengths else 1
    count = 1
    if call.name == "cat" and all(x.producer and x.producer.name in LOOKUPS for x in operands):
        return len(operands) if len({x.shape for x in operands}) == 1 else 1
    if call.name == "unbind":
        count = len(pieces)
    elif call.name == "select":
        count = shape[int(call.args[1])] if len(call.args) > 1 else 1
    elif call.name == "__getitem__" and isinstance(call.args[1], int):
        count = shape[0]
    return count if count <= FEW else 1
