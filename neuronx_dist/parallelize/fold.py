"""Equal blocks of a division, of which the first and the last stay: what runs 32 layers right runs 2 of them right.

Blocks are equal if their calls are, one by one: the same function, shapes, arguments, strategy; and if each reads the
same of itself, of the block before, and of what is outside. The text of the blocks that are left out is compared with
that of the last one (`same_text.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .program import Call, Division, LocalCall, Value, substituted, values_in
from .strategies import facts_of, frozen

__all__ = ["folded"]

PERIODS = 8  # lengths of blocks that are tried


def folded(division: Division) -> Division:
    """A division with the first and the last of its equal blocks; itself where there are no three.

    Pipelines, divisions over two axes and calls that are computed again stay as they are.
    """
    if division.outer is not None or len(division.stages) > 1 or division.recompute:
        return division
    keys = _keys(division)
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for number, key in enumerate(keys):
        distances[number - last.get(key, number)] += 1
        last[key] = number
    best = (0, 0, 0)  # calls that are left out, first call, calls of a block
    for period, _ in distances.most_common(PERIODS + 1):
        best = max(best, *_runs(keys, period)) if period else best
    removed, start, period = best
    if not removed:
        return division
    blocks = removed // period + 2
    return _without(division, start, period, blocks) or division


def _keys(division: Division) -> list[int]:
    """For each call a number; equal ones look alike."""
    numbers: dict[Any, int] = {}
    keys = []
    for number, call in enumerate(division.program.calls):
        facts = facts_of(call, "", 1, (), [])
        strategy = division.strategies[call]
        key: Any
        try:
            key = facts.function, frozen(facts.arguments), facts.results, call.grad, call.autocast, call.writes
            key = *key, call.several, strategy.name, strategy.operands, strategy.results
            keys.append(numbers.setdefault(key, len(numbers)))
        except TypeError:  # an argument that cannot be hashed: like no other
            keys.append(-number - 1)
    return keys


def _runs(keys: list[int], period: int) -> list[tuple[int, int, int]]:
    """`(calls that can be left out, first call, period)` of each run of at least three equal blocks."""
    runs, start = [(0, 0, 0)], 0
    for number in range(len(keys) - period + 1):
        if number < len(keys) - period and keys[number] == keys[number + period]:
            continue
        blocks = (number - start) // period + 1
        runs.append((max(0, blocks - 2) * period, start, period))
        start = number + 1
    return runs


def _without(division: Division, start: int, period: int, blocks: int) -> Division | None:
    """The division without the blocks between the first and the last; None: they are not equal."""
    program = division.program
    calls = program.calls
    stop = start + blocks * period
    home = {value: number for number, call in enumerate(calls) for value in call.results}
    if not _alike(division, home, start, period, blocks):
        return None
    first, last = start + period, stop - period  # of the calls that are left out, and behind them
    read = {value for call in calls[stop:] for value in _read(call)}
    if any(first <= home.get(value, -1) < last for value in (*read, *values_in(program.outputs))):
        return None
    instead: dict[Value, Value] = {}
    for number in range(first, last):  # what the last block reads of the one before is the first one's
        instead |= dict(zip(calls[number].results, calls[start + (number - start) % period].results))
    kept: list[Call] = calls[:first]
    strategies = {call: division.strategies[call] for call in kept}
    for call in calls[last:]:
        args, kwargs = _reading((call.args, call.kwargs), instead)
        new = replace(call, args=args, kwargs=kwargs, results=[])
        new.results = [replace(value, producer=new) for value in call.results]
        instead |= dict(zip(call.results, new.results))
        whole = division.strategies[call]
        local = LocalCall(whole.local.function, *_reading((whole.local.args, whole.local.kwargs), instead))
        strategies[new] = whole._replace(local=local)
        kept.append(new)
    gone = {value for call in calls[first:last] for value in _read(call)}.difference(*map(_read, kept))
    outputs = [instead.get(each, each) if isinstance(each, Value) else each for each in program.outputs]
    own = (program.parameters, program.buffers, program.constants)
    parameters, buffers, constants = ([value for value in values if value not in gone] for values in own)
    small = replace(program, calls=kept, outputs=outputs, parameters=parameters, buffers=buffers, constants=constants)
    return replace(division, program=small, strategies=strategies)


def _reading(arguments: Any, instead: Mapping[Value, Value]) -> Any:
    """Arguments with other values in the place of some."""
    return substituted(arguments, Value, lambda value: instead.get(value, value))


def _alike(division: Division, home: Mapping[Value, int], start: int, period: int, blocks: int) -> bool:
    """Whether the calls of each block read the same: of their own, of the one before, of outside, of parameters."""
    calls = division.program.calls
    reads = [
        [value for call in calls[n : n + period] for value in _read(call)]
        for n in range(start, start + blocks * period, period)
    ]
    if len(set(map(len, reads))) > 1:
        return False
    count = Counter(value for call in calls for value in _read(call))
    reads_of_blocks = []
    for block, values in enumerate(reads):
        own: dict[Value, int] = {}
        own_reads: list[Any] = []
        for number, value in enumerate(values):
            distance = home.get(value, -1) - (start + block * period)
            if value not in home and any(each[number] is not value for each in reads):
                if values.count(value) != count[value]:
                    return False
                own_reads.append((own.setdefault(value, len(own)), division.types[value]))  # a leaf of this block
            elif value in home and home[value] >= start:
                if distance < -period:
                    return False
                own_reads.append((distance, calls[home[value]].results.index(value)))
            else:
                own_reads.append(value)
        reads_of_blocks.append(own_reads)
    return all(own_reads == reads_of_blocks[1] for own_reads in reads_of_blocks[1:])


def _read(call: Call) -> list[Value]:
    return list(values_in((call.args, call.kwargs)))
