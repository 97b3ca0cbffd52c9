"""Conversions that are one collective: those of a layer by one operator whose values are there before the first one.

A join saves a call's latency, and copies each tensor into a buffer. So a tensor is joined if its copy takes at most
half of the latency (`Division.joined_bytes`): then two of them gain. Conversions on axes before the last one are not
joined, as they are calls of the local program. Of I -> R, whose backward sums, only weights are: `composites.linears`
has the sums of activations' gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...program.program import Call, Division, Value, operands_of
from ...spmd.types import I, R, SpmdType
from .conversions import conversion, has_type

__all__ = ["Wanted", "joined_conversions", "recomputed_spans", "type_of_output"]

Wanted = tuple[Value, SpmdType]  # a value, and the type that it is converted to
_Place = tuple[object, ...]  # conversions of one place may be joined
_NUMBERED = re.compile(r".*?\d(?=\.|$)")  # the path of the outermost numbered module
_OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "convert")


def joined_conversions(division: Division, calls: Sequence[Call], is_last: bool = True) -> dict[Wanted, list[Wanted]]:
    """Returns the conversions that are made together, by each of them, in the order in which they are wanted.

    Args:
        calls: those of one stage; `is_last`: the program's results are converted behind them.
    """
    groups: dict[tuple[_Place, int], list[Wanted]] = {}
    newest: dict[_Place, int] = {}  # position of the first conversion of a place's last group
    order = {call: number for number, call in enumerate(calls)}
    seen: set[Wanted] = set()
    for number, place, (value, want) in _wanted(division, calls, is_last):
        key = None if (value, want) in seen else _kind(division, value, want)
        seen.add((value, want))
        if key is not None:
            place = (*place, *key)
            made = -1 if value.producer is None else order.get(value.producer, -1)
            if made >= newest.setdefault(place, number):
                newest[place] = number
            groups.setdefault((place, newest[place]), []).append((value, want))
    return {wanted: group for group in groups.values() if len(group) > 1 for wanted in group}


def _wanted(division: Division, calls: Sequence[Call], is_last: bool) -> Iterator[tuple[int, _Place, Wanted]]:
    """Yields the values that calls and results want, with the position and the place of the reader."""
    spans = recomputed_spans(division)
    layer, run = "", 0
    for number, call in enumerate(calls):
        numbered = _NUMBERED.match(call.module)
        module = numbered[0] if numbered else ""
        run += module != layer  # gradients of the last layer, which come first, do not wait for those of other layers
        layer = module
        for wanted in zip(operands_of(call), division.strategies[call].operands, strict=True):
            yield number, (run, spans.get(call, ())), wanted
    for value in division.program.outputs if is_last else ():
        if isinstance(value, Value):
            yield len(calls), (run + 1,), (value, type_of_output(division, value))


def _kind(division: Division, value: Value, want: SpmdType) -> _Place | None:
    """Returns what joined conversions have in common; None: this one is not joined."""
    has = division.type_of(value)
    if division.size == 1 or has_type(has, want, value) or value.nbytes > division.joined_bytes:
        return None
    how = conversion(value, has, want, division.size)
    calls = (0, 0) if how is None else how.collectives if division.program.training else how.collectives[:1]
    if how is None or not any(calls) or how.operator not in _OPERATORS or how.src.scale:
        return None
    if how.operator == "convert" and value.kind != "parameter":
        return None
    return how.operator, how.src.letter, how.dst.letter, value.dtype, value.requires_grad


def type_of_output(division: Division, value: Value) -> SpmdType:
    """Returns the type in which a result leaves the program, whole on every rank."""
    has = division.type_of(value)
    return has if has.letter in "RI" else I if value.requires_grad else R


def recomputed_spans(division: Division) -> dict[Call, tuple[int, ...]]:
    """Returns the recomputed spans around calls; a call that writes a buffer is in none, or would write twice."""
    found: dict[Call, tuple[int, ...]] = {}
    for number, (start, stop) in enumerate(sorted(division.recompute, key=lambda span: (span[0], -span[1]))):
        for call in division.program.calls[start:stop]:
            if not call.writes:
                found[call] = (*found.get(call, ()), number)
    return found
