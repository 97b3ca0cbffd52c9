"""The costs of a division, call by call, as the choice counted them: data for `plan.json` and for `explain`.

seconds              forward and backward of one microbatch, computing and collectives one after the other
bytes                what a rank sends, and what it holds: parameters with gradients and optimizer state, and what
                     is saved for backward
alternatives         of a call: each of its strategies, with the seconds that the best division that has it takes
                     longer than the best one; `alternatives_exact` is False if the search limits conversions or has
                     fixed the types of shared weights, so that they may be cheaper
joined_collectives   of conversions that are one collective (`joined.py`): the calls that this saves, and, counted in
joined_seconds       `seconds`, the time. The choice does not know of them, and `gap` is that of its seconds
gap                  the seconds above a lower bound of all divisions, as a fraction of the seconds
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ...program.program import Call, Division, Value, operands_of
from .conversions import conversion
from .cost_tables import CONVERSIONS, GRAIN
from .exact import StrategyChoice
from .joined import Wanted, joined_conversions
from .stages import stages_of

__all__ = ["plan_costs"]

_SUMMED = ("times", "forward_bytes", "backward_bytes", "seconds", "joined", "joined_seconds")
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
    joined: dict[Wanted, list[Wanted]] = {}
    for stage in (stages := stages_of(division)):
        joined |= joined_conversions(division, stage.calls, stage is stages[-1])
    paid: set[Wanted] = set()
    times = []
    for call in division.program.calls:
        strategy = division.strategies[call]
        computing, _ = tables.seconds(call, strategy)
        sent = [*_inside(choice, call, division), *_conversions(choice, call, division, paid, joined)]
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
        for entry in _conversion(choice, division, (value, wanted), joined):
            _add(collectives, entry)
            times[-1] += entry["seconds"]
    seconds = sum(times)
    saved_seconds = sum(entry["joined_seconds"] for entry in collectives.values())
    unjoined = seconds + saved_seconds + sum(tables.update_seconds(x, t) for x, t in division.types.items())
    stage_seconds = [sum(times[first:last]) for first, last in pairwise([*division.stages, len(times)])]
    slowest, microbatches = max(stage_seconds), division.microbatches
    return {
        "costs": asdict(choice.costs),
        "seconds": seconds,
        "compute_seconds": compute,
        "collective_seconds": seconds - compute,
        "stage_seconds": stage_seconds,
        "step_seconds": seconds + (microbatches - 1) * slowest,
        "parameter_bytes": round(held.parameters / len(stage_seconds)),
        "saved_bytes": round(held.activations),
        "joined_collectives": sum(entry["joined"] for entry in collectives.values()),
        "joined_seconds": saved_seconds,
        **_gap(choice, division, unjoined),
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
    choice: StrategyChoice, call: Call, division: Division, paid: set[Wanted], joined: Mapping[Wanted, list[Wanted]]
) -> Iterator[dict[str, Any]]:
    """Yields the collectives of the conversions that a call is the first to need."""
    for wanted in zip(operands_of(call), division.strategies[call].operands, strict=True):
        if wanted not in paid:
            paid.add(wanted)
            yield from _conversion(choice, division, wanted, joined)


def _conversion(
    choice: StrategyChoice, division: Division, wanted: Wanted, joined: Mapping[Wanted, list[Wanted]]
) -> Iterator[dict[str, Any]]:
    """Yields a conversion; one of several in one collective has its part of the latency, and the copy of the value."""
    (value, want), tables = wanted, choice.tables
    has = division.type_of(value)
    how = None if has == want else conversion(value, has, want, choice.size)
    if how is None:
        return
    seconds = tables.conversion(value, tables.number(has), tables.number(want))
    backward = how.backward if tables.backward else 0
    if how.forward or backward:
        entry = _entry(how.operator, choice.axis, how.forward, backward, seconds)
        group = joined.get(wanted, [wanted])
        if len(group) > 1:
            calls = sum(how.collectives if tables.backward else how.collectives[:1])
            latency, copy = choice.costs.communicate(0, calls), calls * choice.costs.copy(value.nbytes)
            entry["joined"] = calls * (wanted != group[0])
            entry["times"] = int(wanted == group[0])
            entry["joined_seconds"] = latency * (1 - 1 / len(group)) - copy
            entry["seconds"] -= entry["joined_seconds"]
        yield entry


def _entry(operator: str, axis: str, forward: int, backward: int, seconds: float) -> dict[str, Any]:
    return {
        "operator": operator,
        "axis": axis,
        "times": 1,
        "forward_bytes": forward,
        "backward_bytes": backward,
        "seconds": seconds,
        "joined": 0,
        "joined_seconds": 0.0,
    }


def _add(collectives: dict[tuple[str, str], dict[str, Any]], entry: dict[str, Any]) -> None:
    """Adds a collective to the sums of its operator."""
    key = entry["operator"], entry["axis"]
    total = collectives.setdefault(key, {**entry, **dict.fromkeys(_SUMMED, 0)})
    for name in _SUMMED:
        total[name] += entry[name]
