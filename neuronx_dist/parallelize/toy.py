"""An emitted program at toy sizes beside one process: what types do not see of programs that are too large to run.

Of the recorded program's equal blocks two stay (`fold.py`); it is made small (`shrink.py`) and divided as the whole is:
each call by the strategy of the same types. It is emitted, run for real on threads in float64, and compared with the
small program in one process. Its text is that of the whole, but for integers and the repetitions of equal blocks
(`same_text.py`).

Weights are the first positions of the real ones along every size, or drawn; indices are drawn, within the tables that
they index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..spmd.types import Shard
from .blocks import strides_of
from .compare import EmittedProgramError, check_program, drawn, given_tensors
from .emit import emit
from .fold import folded
from .interpret import running
from .local_program import local_program
from .modes import Deterministic
from .program import Call, Division, Program, Strategy, Value, operands_of, substituted
from .same_text import text_difference
from .shrink import FEW, Kept, Resized, Shrunk, picked_of, shrunk
from .stored import constants_of
from .strategies import candidates

__all__ = ["NotShrunk", "Toy", "check_toy", "toy_of"]

ATTEMPTS = 8  # at sizes that every call runs at


class NotShrunk(Exception):
    """A program that cannot be made small, and why."""


class Toy(NamedTuple):
    """A small division, its source, and the values of its leaves.

    Attributes:
        sizes: which of the whole have become which, in words.
        integers: those among the arguments of the whole's local calls that are others here, with what they are here.
    """

    division: Division
    source: str
    constants: dict[str, torch.Tensor]
    tensors: dict[Value, torch.Tensor]
    sizes: str
    integers: set[tuple[int, int]]


class _Unlike(Exception):
    """A call has no such strategy at small sizes, or fails at them.

    Attributes:
        fixed: what is wrong are dims that it needs all of: the table that it looks into is too small.
    """

    def __init__(self, call: Call, why: str, *, fixed: bool = False) -> None:
        super().__init__(call, why)
        self.call, self.why, self.fixed = call, why, fixed


def check_toy(source: str, toy: Toy) -> tuple[float, str]:
    """Compares a division at toy sizes with one process.

    Args:
        source: the emitted text of the whole.

    Returns the largest relative error, and why it was not compared in float64 ("": it was).

    Raises:
        EmittedProgramError: they differ; the message names the tensors. Or the text is not that of the whole.
    """
    difference = text_difference(source, toy.source, toy.division.whole.training, toy.integers)
    if difference:
        raise EmittedProgramError(f"the file is not the program that is compared at toy sizes: {difference}")
    return check_program(toy.source, toy.division, toy.constants, toy.tensors)


def toy_of(division: Division, module: nn.Module, arguments: Mapping[str, Any]) -> Toy:
    """A division at toy sizes.

    Raises:
        NotShrunk: there is none.
    """
    count = len(division.program.calls)
    division = folded(division)
    left_out = count - len(division.program.calls)
    blocks = f"{left_out} of {count} calls are in blocks equal to the last one; " if left_out else ""
    kept: dict[Call, Kept] = {}
    for _ in range(ATTEMPTS):
        small = shrunk(division.whole, division.ranks, kept)
        tensors = _tensors(division.whole, small, module, arguments)
        try:
            _check_runs(small, tensors)
            divided, integers = _divided(division, small)
        except _Unlike as unlike:
            kept[unlike.call] = Kept(unlike.why, unlike.fixed and unlike.call not in kept)
            continue
        constants = {
            name: value.constant for value, name in constants_of(divided).items() if value.constant is not None
        }
        return Toy(divided, emit(divided), constants, tensors, blocks + _described(small.sizes), integers)
    raise NotShrunk(f"{len(kept)} calls are others at small sizes: {', '.join(each.why for each in kept.values())}")


# --- strategies -------------------------------------------------------------------------------------------------------


def _divided(division: Division, small: Shrunk) -> tuple[Division, set[tuple[int, int]]]:
    """The small program divided as the whole is, and the integers that differ.

    Raises:
        _Unlike: a call has no such strategy.
    """
    if division.outer is None:
        return _with_strategies(division, small.program, small.calls, small.values, None)
    outer, integers = _divided(division.outer, small)
    program = local_program(outer).program
    calls, own_calls = division.program.calls, program.calls
    leaves = dict(zip(division.program.leaves, program.leaves, strict=True))
    for call, own in zip(calls, own_calls):
        if call.function is not own.function or len(call.results) != len(own.results):
            raise _Unlike(_whole(call, division), f"{own!r} stands where {call!r} does")
        leaves |= dict(zip(call.results, own.results))
    if len(calls) != len(own_calls):
        raise _Unlike(_whole(calls[-1], division), f"there are {len(own_calls)} calls in place of {len(calls)}")
    divided, others = _with_strategies(division, program, dict(zip(calls, own_calls)), leaves, outer)
    return divided, integers | others


def _with_strategies(
    division: Division,
    program: Program,
    calls: Mapping[Call, Call],
    values: Mapping[Value, Value],
    outer: Division | None,
) -> tuple[Division, set[tuple[int, int]]]:
    """A smaller program divided as `division` is.

    Args:
        calls, values: those of the smaller one.
    """
    axis, size = division.axis, division.size
    strides, small_strides = strides_of(division.program), strides_of(program)
    strategies: dict[Call, Strategy] = {}
    types = {values[value]: spmd_type for value, spmd_type in division.types.items() if value in values}
    integers: set[tuple[int, int]] = set()
    for call, own in calls.items():
        whole = division.strategies[call]
        small_candidates = candidates(own, axis, size, strides=small_strides)
        one = _like(whole, candidates(call, axis, size, strides=strides), small_candidates)
        if one is None:
            raise _Unlike(_whole(call, division), f"{call!r} is not divided by {whole.name!r}")
        strategies[own] = one
        integers.update(_integers((whole.local.args, whole.local.kwargs), (one.local.args, one.local.kwargs)))
        for value, wanted, small_wanted in zip(operands_of(call), whole.operands, one.operands):
            if value.producer is None and division.types[value] == wanted:
                types[values[value]] = small_wanted
    divided = replace(division, program=program, strategies=strategies, types=types, outer=outer)
    for call, own in calls.items():
        whole, one = division.strategies[call], strategies[own]
        for value, wanted, small_wanted in zip(operands_of(call), whole.operands, one.operands):
            same = division.type_of(value) == wanted
            if same != (divided.type_of(values[value]) == small_wanted):
                raise _Unlike(_whole(call, division), f"{call!r} takes {value.name} as {small_wanted}")
    return divided, integers


def _whole(call: Call, division: Division) -> Call:
    """The call of the whole program; of a conversion the one that it is for."""
    if call.outer is None:
        return call
    following = division.program.calls[division.program.calls.index(call) :]
    found = (each.outer.whole for each in following if each.outer and each.outer.whole)
    return next(found, division.whole.calls[-1])


def _like(strategy: Strategy, candidates: Sequence[Strategy], small: Sequence[Strategy]) -> Strategy | None:
    """Which of the strategies of a small call is that of the whole one; None: none is.

    It has the same name, or is at the same place among those of the same types: a stride that counts positions of
    another dim is smaller where there are less.
    """
    alike = [each.name for each in candidates if _looks(each) == _looks(strategy)]
    found = [each for each in small if _looks(each) == _looks(strategy)]
    same = next((each for each in found if each.name == strategy.name), None)
    return same or (found[alike.index(strategy.name)] if len(alike) == len(found) else None)


def _looks(strategy: Strategy) -> tuple[Any, ...]:
    """What two sizes of one strategy have in common: all but the strides of shards."""
    types = [(x.letter, x.dim if isinstance(x, Shard) else None, x.scale) for x in strategy.operands + strategy.results]
    return strategy.local.function, len(strategy.operands), *types


def _integers(whole: Any, small: Any) -> Iterator[tuple[int, int]]:
    leaves = zip(pytree.tree_leaves(_listed(whole)), pytree.tree_leaves(_listed(small)))
    return ((a, b) for a, b in leaves if type(a) is int and type(b) is int and a != b)


def _listed(x: Any) -> Any:
    """Slices as lists."""
    return substituted(x, slice, lambda each: [each.start, each.stop, each.step])


# --- values -----------------------------------------------------------------------------------------------------------


def _tensors(
    program: Program, small: Shrunk, module: nn.Module, arguments: Mapping[str, Any]
) -> dict[Value, torch.Tensor]:
    """A tensor for each leaf of the small program: of one that there is, the first positions; else it is drawn."""
    generator = torch.Generator().manual_seed(0)
    given = given_tensors(program, module, arguments)
    tensors: dict[Value, torch.Tensor] = {}
    for value in program.leaves:
        limit, shape = small.limits.get(value), small.values[value].shape
        if value in given:
            x = picked_of(given[value], small.dims[value]).cpu()
            x = x if limit is None else torch.where(x < limit, x, x % limit)
        elif limit is not None:
            x = torch.randint(limit, shape, generator=generator, dtype=value.dtype)
        elif value.dtype.is_floating_point or value.dtype.is_complex:
            x = drawn(small.values[value], generator)
        else:  # a mask: nothing is left out
            x = torch.ones(shape, dtype=value.dtype)
        tensors[small.values[value]] = x.requires_grad_(value.requires_grad)
        if value.kind == "constant":
            small.values[value].constant = x
    return tensors


def _check_runs(small: Shrunk, tensors: Mapping[Value, torch.Tensor]) -> None:
    """That each call runs at small sizes: positions that are computed may be outside of a smaller table.

    Raises:
        _Unlike: one does not.
    """
    whole = {own: call for call, own in small.calls.items()}
    known = {value: x.detach().clone() for value, x in tensors.items()}
    call = None
    try:
        with torch.no_grad(), Deterministic():
            for each in running(small.program, known):
                call = each
    except Exception as error:
        assert call is not None
        line = str(error).strip().partition("\n")[0]
        raise _Unlike(whole[call], f"{call!r} fails: {type(error).__name__}: {line}", fixed=True) from error


def _described(sizes: Sequence[Resized]) -> str:
    """Which sizes were compared, equal ones once."""
    changed: dict[tuple[int, int], str] = {}
    for each in sizes:
        if each.after != each.before:
            changed.setdefault((each.before, each.after), each.where)
    text = ", ".join(f"{before} as {after} ({where})" for (before, after), where in changed.items())
    kept: dict[int, str] = {}
    for each in sizes:
        if each.after == each.before and each.before > FEW and each.why:
            kept.setdefault(each.before, f"{each.before} as it is ({each.where}: {each.why})")
    return ", ".join(filter(None, [text, *kept.values()])) or "no size is smaller"
