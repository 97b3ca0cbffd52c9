"""Consecutive windows after one exchange: a rank gets all that its last outputs need, and computes the rest itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ..moves.intervals import Bounds, ExchangePlan, Run
from .index_maps import IndexMap, Range, needed, out_bounds_of

__all__ = ["ChainPlan", "plan_chain"]


class ChainPlan(NamedTuple):
    """Consecutive windows with one exchange.

    Attributes:
        exchange: brings each rank the inputs of its first window.
        local: for each later window and each rank, a plan that makes the inputs of the window of the outputs that the
            rank has computed before.
        out_bounds: of the last outputs.
        redundant: outputs of all windows that are computed on more than one rank, each counted once less than it is.
    """

    exchange: ExchangePlan
    local: tuple[tuple[ExchangePlan, ...], ...]
    out_bounds: Bounds
    redundant: int


@cache
def plan_chain(maps: tuple[IndexMap, ...], bounds: Bounds) -> ChainPlan:
    """Composes maps: each rank receives all inputs that its last outputs need, and computes the rest itself.

    Raises:
        ValueError: as `plan_windows`; or a map is not of the outputs of the one before.
    """
    out_bounds = bounds
    for windows in maps:
        out_bounds = out_bounds_of(windows, out_bounds)
    outputs = tuple(pairwise(out_bounds))
    redundant = 0
    runs: list[tuple[Run, ...]] = []
    local: list[tuple[ExchangePlan, ...]] = []
    for windows in reversed(maps):
        if runs:
            outputs, plans = zip(*map(_computed_before, runs))
            local.insert(0, plans)
        redundant += sum(high - low for low, high in outputs) - _union(outputs)
        _, runs = needed(windows, outputs)
    return ChainPlan(ExchangePlan(bounds, runs), tuple(local), out_bounds, redundant)


def _computed_before(runs: Sequence[Run]) -> tuple[Range, ExchangePlan]:
    """Returns the outputs that a rank computes for the runs of its next window, and the plan from them to the runs."""
    ends = [end for run in runs if run.start >= 0 for end in (run.start, run.start + (run.length - 1) * run.step)]
    low, high = (min(ends), max(ends) + 1) if ends else (0, 0)
    shifted = [run._replace(start=run.start - low) if run.start >= 0 else run for run in runs]
    return (low, high), ExchangePlan((0, high - low), [shifted])


def _union(ranges: Sequence[Range]) -> int:
    """Counts the positions that are in one range or more."""
    count, reached = 0, 0
    for low, high in sorted(ranges):
        count += max(0, high - max(low, reached))
        reached = max(reached, high)
    return count
