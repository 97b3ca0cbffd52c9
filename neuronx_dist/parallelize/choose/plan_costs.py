"""The costs of a division, call by call, as the choice counted them: data for `plan.json` and for `explain`.

seconds              forward and backward of one microbatch, computing and collectives one after the other
bytes                what a rank sends, and what it holds: parameters with gradients and optimizer state, and what
                     is saved for backward
alternatives         of a call: each of its strategies, with the seconds that the best division that has it takes
                     longer than the best one; `alternatives_exact` is False if the search limits conversions or has
                     fixed the types of shared weights, so that they may be cheaper
gap                  the seconds above a lower bound of all divisions, as a fraction of the seconds
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ...program.program import Call, Division, Value, operands_of
from ...spmd.types import SpmdType
from .conversions import conversion
from .cost_tables import CONVERSIONS, GRAIN
from .exact import StrategyChoice

__all__ = ["plan_costs"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan_costs(choice: StrategyChoice, division: Division) -> dict[str, Any]:
    """Returns what a division costs by the choice that made it.

    Calls of a line in equal layers are one row, with the least seconds that an alternative costs in one of them.
    """
    tables = choice.tables
    alternatives = choice.alternatives()
    saved = tables.saved_by(division.strategies, division.types)
    held = tables.held(division.strategies, division.types)
    rows: dict[Any, dict[str, Any]] = {}
    collectives: dict[tuple[str, str], dict[str, Any]] = {}
    compute = 0.0
    paid: set[tuple[Value, SpmdType]] = set()
    times = []
    for call in division.program.calls:
        strategy = division.strategies[call]
        computing, _ = tables.seconds(call, strategy)
        sent = [*_inside(choice, call, division), *_conversions(choice, call, division, paid)]
        seconds = computing + sum(entry["seconds"] for entry in sent)
        times.append(seconds)
        compute += computing
        for entry in sent:
            _add(collectives, entry)
        module, bytes_saved = _NUMBER.sub("*", call.module), round(saved.get(call, 0.0))
        key = module, call.name, call.where, strategy.name, seconds, bytes_saved, tuple(e["operator"] for e in sent)
        row = rows.setdefault(
            key,
            {
                "times": 0,
                "module": module,
                "function": call.name,
                "line": call.where.replace("\\", "/").rpartition("/")[2],
                "source": call.source.strip(),
                "strategy": strategy.name,
                "seconds": seconds,
                "compute_seconds": computing,
                "collectives": sent,
                "saved_bytes": bytes_saved,
                "alternatives": {},
            },
        )
        row["times"] += 1
        for option, more in alternatives[call]:
            if option is not strategy:
                row["alternatives"][option.name] = min(more, row["alternatives"].get(option.name, more))
    for row in rows.values():
        row["alternatives"] = dict(sorted(row["alternatives"].items(), key=lambda pair: pair[1]))
    for value in dict.fromkeys(output for output in division.program.outputs if isinstance(output, Value)):
        _, wanted = tables.output_conversion(value, tables.number(division.type_of(value)))
        for entry in _conversion(choice, value, division.type_of(value), wanted):
            _add(collectives, entry)
            times[-1] += entry["seconds"]
    seconds = sum(times)
    stages = [sum(times[first:last]) for first, last in pairwise([*division.stages, len(times)])]
    slowest, microbatches = max(stages), division.microbatches
    return {
        "costs": asdict(choice.costs),
        "seconds": seconds,
        "compute_seconds": compute,
        "collective_seconds": seconds - compute,
        "stage_seconds": stages,
        "step_seconds": seconds + (microbatches - 1) * slowest,
        "parameter_bytes": round(held.parameters / len(stages)),
        "saved_bytes": round(held.activations),
        **_gap(choice, division, seconds + sum(tables.update_seconds(x, t) for x, t in division.types.items())),
        "alternatives_exact": choice.alternatives_are_exact,
        "collectives": list(collectives.values()),
        "calls": list(rows.values()),
    }


def _gap(choice: StrategyChoice, division: Division, seconds: float) -> dict[str, Any]:
    """Returns the gap of the choice, None if no bound is known, and what it is measured by, in words."""
    if division.outer is not None:
        return {"gap": None, "gap_of": "each axis is divided at the least cost, one after the other: no bound for all"}
    least = choice.least()
    if least is None:
        return {"gap": None, "gap_of": "no lower bound is known: its table would be too large"}
    words = ["the least seconds of all divisions that the policy allows"]
    words += ["that fit any memory"] if choice.price else []
    words += ["with conversions for nothing of values that many calls read"] if choice.forms is not None else []
    words += ["before the cut into stages"] if len(division.stages) > 1 else []
    rounding = GRAIN * 4 * len(division.program.calls)
    return {"gap": (seconds - least) / seconds if seconds - least > rounding else 0.0, "gap_of": ", ".join(words)}


def _inside(choice: StrategyChoice, call: Call, division: Division) -> Iterator[dict[str, Any]]:
    """Yields the collectives inside of a call: those of a composite, or of a conversion on an axis before."""
    forward, backward = choice.tables.sent_inside(call, division.strategies[call])
    _, seconds = choice.tables.seconds(call, division.strategies[call])
    if forward or backward:
        on = next((before.axis for before in call.outer if any(before.bytes_moved)), choice.axis)
        name = call.name if call.function in CONVERSIONS else f"inside {call.name}"
        yield _entry(name, on, forward, backward, seconds)


def _conversions(
    choice: StrategyChoice, call: Call, division: Division, paid: set[tuple[Value, SpmdType]]
) -> Iterator[dict[str, Any]]:
    """Yields the collectives of the conversions that a call is the first to need."""
    for value, want in zip(operands_of(call), division.strategies[call].operands, strict=True):
        if (value, want) not in paid:
            paid.add((value, want))
            yield from _conversion(choice, value, division.type_of(value), want)


def _conversion(choice: StrategyChoice, value: Value, has: SpmdType, want: SpmdType) -> Iterator[dict[str, Any]]:
    how = None if has == want else conversion(value, has, want, choice.size)
    if how is None:
        return
    seconds = choice.tables.conversion(value, choice.tables.number(has), choice.tables.number(want))
    backward = how.backward if choice.tables.backward else 0
    if how.forward or backward:
        yield _entry(how.operator, choice.axis, how.forward, backward, seconds)


def _entry(operator: str, axis: str, forward: int, backward: int, seconds: float) -> dict[str, Any]:
    return {
        "operator": operator,
        "axis": axis,
        "forward_bytes": forward,
        "backward_bytes": backward,
        "seconds": seconds,
    }


def _add(collectives: dict[tuple[str, str], dict[str, Any]], entry: dict[str, Any]) -> None:
    """Adds a collective to the sums of its operator."""
    key = entry["operator"], entry["axis"]
    total = collectives.setdefault(key, {**_entry(*key, 0, 0, 0.0), "times": 0})
    total["times"] += 1
    for name in ("forward_bytes", "backward_bytes", "seconds"):
        total[name] += entry[name]
