"""Embedding tables that are each whole on one rank of an axis: where they lie, and the strategies of their calls.

    rows = embedding_on_rank(ids, weight, rank=1, axis="tp")       # on rank 1 the rows of all ids; on others none
    x = cat_from_ranks((x, rows, ...), dim=1, batch=16, axis="tp")    # S(0): one exchange for all tables

This is for the tables whose rows one `cat` or `stack` joins beside one another. Weight and rows are S(0) in pieces of
unequal sizes: all positions on one rank (`WholeOnRank`). Only the join reads such rows. The tables of a join are
distributed once, by their sizes: the choice decides whether, not where.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...program.program import Call, Program, Value, operands_of
from ...rules.local_call import Arguments, TensorSlot
from ...spmd.types import R, Shard, SpmdType
from .. import composites
from .composite_strategies import Template
from .conversions import WholeOnRank

__all__ = ["Places", "places_of", "table_strategy"]

LOOKUPS = {F.embedding: composites.embedding_on_rank, F.embedding_bag: composites.embedding_bag_on_rank}
JOINS = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), composites.cat_from_ranks),
    torch.stack: composites.stack_from_ranks,
}


class Places(NamedTuple):
    """Ranks of the tables of a call.

    Attributes:
        ranks: of a look-up, the rank of its table; of a join, for each operand the rank that has it, None: all do.
        share: bytes of the tables of the rank that has most, as a part of those of all tables of the join.
    """

    ranks: tuple[int | None, ...]
    share: float


def places_of(program: Program, size: int) -> dict[Call, Places]:
    """Returns where tables lie, by look-up and join, if they are whole on the `size` ranks of an axis."""
    places: dict[Call, Places] = {}
    readers = program.consumers()
    for join in program.calls if size > 1 else ():
        rows = [x for x in _joined(join) if _is_rows(x, join, readers, size)]
        if len(rows) < 2 or len({x.dtype for x in rows}) > 1:
            continue
        tables = [_table(x.producer) for x in rows if x.producer]
        ranks = _distributed([x.nbytes for x in tables], [prod(x.shape[1:]) for x in rows], size)
        held = [sum(x.nbytes for x, rank in zip(tables, ranks) if rank == number) for number in range(size)]
        share = max(held) / sum(held)
        of_rows = dict(zip(rows, ranks))
        places[join] = Places(tuple(of_rows.get(x) for x in operands_of(join)), share)
        places.update((x.producer, Places((rank,), share)) for x, rank in of_rows.items() if x.producer)
    return places


def _joined(call: Call) -> Sequence[Value]:
    """Returns the operands of a `cat` or `stack` along another dim than the first; () of any other call."""
    if call.function not in JOINS or call.outer:
        return ()
    operands = operands_of(call)
    whole = call.results[0].shape
    if len({x.dtype for x in operands}) > 1 or _dim(call.args, call.kwargs) % len(whole) == 0:
        return ()
    return operands if {x.shape[:1] for x in operands} == {whole[:1]} else ()


def _dim(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return int(args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0)))


def _arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a look-up by name, without those that are defaults."""
    signature = inspect.signature(function)
    named = signature.bind(*args, **kwargs).arguments
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    return {name: x for name, x in named.items() if x is not defaults[name] and x != defaults[name]}


def _table(call: Call) -> Value:
    weight: Value = _arguments(call.function, call.args, call.kwargs)["weight"]
    return weight


def _is_rows(value: Value, join: Call, readers: dict[Value, list[tuple[Call, int]]], size: int) -> bool:
    """Returns whether a value is the rows of a table that nothing but this look-up and this join read."""
    call = value.producer
    if call is None or call.function not in LOOKUPS or call.outer or len(readers[value]) != 1 or value.shape[0] % size:
        return False
    options = _arguments(call.function, call.args, call.kwargs)
    table = options["weight"]
    is_read_once = table.kind == "parameter" and len(readers[table]) == 1 and readers[value][0][0] is join
    return is_read_once and "per_sample_weights" not in options


def _distributed(sizes: Sequence[int], widths: Sequence[int], count: int) -> list[int]:
    """Returns a rank for each table: equal widths, so that ranks send equally much; then equal sizes, largest first."""
    held, sent = [0] * count, [0] * count
    ranks = [0] * len(sizes)
    limit = max(-(-sum(widths) // count), -(-len(widths) // count) * min(widths))
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):

        def load(rank: int, width: int = widths[number]) -> tuple[float, int, int]:
            fits = sent[rank] + width <= limit
            return (0.0, held[rank], rank) if fits else (inf, sent[rank], rank)

        rank = ranks[number] = min(range(count), key=load)
        held[rank] += sizes[number]
        sent[rank] += widths[number]
    return ranks


def table_strategy(
    function: Callable[..., Any],
    arguments: Arguments,
    slots: Sequence[TensorSlot],
    places: Places,
    axis: str,
    size: int,
) -> Template:
    """Returns the strategy of a look-up or a join of whole tables."""
    types: list[SpmdType] = [
        Shard(0) if rank is None else WholeOnRank(0, rank=rank, share=places.share) for rank in places.ranks
    ]
    if function in LOOKUPS:
        named = _arguments(function, *arguments)
        input, weight = named.pop("input"), named.pop("weight")
        operands = tuple(types[0] if slot is weight else R for slot in slots)
        local: Arguments = (input, weight), {**named, "rank": places.ranks[0], "axis": axis}
        name = f"table on rank {places.ranks[0]}"
        return Template(name, operands, (types[0],), local, LOOKUPS[function], (0, 0), 0, places.share)
    sent = [0] * size  # a rank gets as much in backward
    for slot, rank in zip(slots, places.ranks, strict=True):
        if rank is not None:
            sent[rank] += prod(slot.shape) * slot.dtype.itemsize * (size - 1) // size
    options = {"dim": _dim(*arguments), "ranks": places.ranks, "batch": slots[0].shape[0] // size, "axis": axis}
    local = (list(slots),), options
    moved = max(sent), max(sent)
    return Template("tables exchanged", tuple(types), (Shard(0),), local, JOINS[function], moved, 0, 1 / size)
