"""Consecutive windows after one exchange: a rank gets all that its last outputs need, and computes the rest itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from .intervals import Bounds, Plan, Run
from .windows import IndexMap, Range, needed, out_bounds_of

__all__ = ["Chain", "Stage", "plan_chain"]


class Stage(NamedTuple):
    """One of several windows that are computed after one exchange.

    Attributes:
        outputs: for each rank the outputs that it computes, also those that other ranks own.
        windows: for each rank the inputs, virtual ones, that they need.
        local: for each rank a plan that makes this window of what the stage before has computed there; None: the
            exchange does.
    """

    outputs: tuple[Range, ...]
    windows: tuple[Range, ...]
    local: tuple[Plan, ...] | None


class Chain(NamedTuple):
    """Consecutive windows with one exchange.

    Attributes:
        redundant: outputs of all stages that are computed on more than one rank, each counted once less than it is.
    """

    plan: Plan
    out_bounds: Bounds
    stages: tuple[Stage, ...]
    redundant: int


@cache
def plan_chain(maps: tuple[IndexMap, ...], bounds: Bounds) -> Chain:
    """The composition of maps: each rank gets all that the last one's outputs need, and computes the rest itself.

    Raises:
        ValueError: as `plan_windows`; or a map is not of the outputs of the one before.
    """
    out_bounds = bounds
    for windows in maps:
        out_bounds = out_bounds_of(windows, out_bounds)
    outputs = tuple(pairwise(out_bounds))
    stages: list[Stage] = []
    redundant = 0
    runs: list[tuple[Run, ...]] = []
    for windows in reversed(maps):
        redundant += sum(high - low for low, high in outputs) - _union(outputs)
        ranges, runs = needed(windows, outputs)
        stages.append(Stage(outputs, ranges, None))
        outputs = tuple(map(_covered, runs))
        local = tuple(
            Plan((0, high - low), [[run._replace(start=run.start - low) if run.start >= 0 else run for run in own]])
            for own, (low, high) in zip(runs, outputs)
        )
        stages[-1] = stages[-1]._replace(local=local)
    stages[-1] = stages[-1]._replace(local=None)
    return Chain(Plan(bounds, runs), out_bounds, tuple(reversed(stages)), redundant)


def _union(ranges: Sequence[Range]) -> int:
    """How many positions are in any of the ranges."""
    count, reached = 0, 0
    for low, high in sorted(ranges):
        count += max(0, high - max(low, reached))
        reached = max(reached, high)
    return count


def _covered(runs: Sequence[Run]) -> Range:
    """From the first to the last position of runs."""
    ends = [end for run in runs if run.start >= 0 for end in (run.start, run.start + (run.length - 1) * run.step)]
    return (min(ends), max(ends) + 1) if ends else (0, 0)
