"""Combinations that are run: a covering set for `make test`, the whole matrix for `make test-full`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.support.llama_training import Case
from tests.support.pipeline_training import CHUNKS

__all__ = [
    "FACTORS",
    "LAYOUTS",
    "SCHEDULES",
    "all_pairs",
    "covering_set",
    "float32_cases",
    "pairs_of",
    "schedule_matrix",
    "whole_matrix",
    "with_updates_in_turn",
]

# (tp, pp, dp) of {1, 2, 4} with at most 8 ranks.
LAYOUTS = [sizes for sizes in itertools.product((1, 2, 4), repeat=3) if sizes[0] * sizes[1] * sizes[2] <= 8]
CLIP = 0.3  # about a tenth of the norms that occur: it always clips

# Every schedule with tensor and sequence parallelism, ZeRO-1, tied weights, odd numbers of microbatches.
SCHEDULES = [
    Case(tp=2, pp=2, sequence_parallel=True, optimizer="zero1", microbatches=4, tied=True, schedule="interleaved"),
    Case(
        pp=4, dp=2, optimizer="zero1", microbatches=2, labels="empty", clip=CLIP, schedule="interleaved", evaluate=True
    ),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=4, schedule="zb_v", clip=CLIP),
    Case(tp=2, pp=4, microbatches=4, tied=True, optimizer="master", schedule="zb_v", evaluate=True),
    Case(tp=2, pp=2, sequence_parallel=True, microbatches=8, tied=True, heads="padded", schedule="zb_h1"),
    Case(pp=2, dp=2, optimizer="zero1", microbatches=4, tied=True, clip=CLIP, schedule="zb_h1"),
    Case(tp=2, pp=2, sequence_parallel=True, microbatches=2, heads="replicated", schedule="gpipe", tied=True),
    Case(tp=2, pp=2, sequence_parallel=True, microbatches=4, schedule="zb_v", dtype=torch.float32, clip=CLIP),
]

FACTORS: dict[str, list[Any]] = {
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "dp": [1, 2, 4],
    "optimizer": ["plain", "master", "zero1"],
    "microbatches": [1, 2, 4],
    "labels": ["even", "uneven", "empty"],
    "sequence_parallel": [False, True],
    "tied": [False, True],
    "heads": ["gqa", "padded", "replicated"],
    "clip": [None, CLIP],
    "updates": [("sgd",), ("adamw",)],
}
MAX_RANKS = 8
_DEGREES = ("tp", "pp", "dp")
Values = tuple[Any, ...]  # one for each factor


def pairs_of(values: Values) -> set[tuple[int, Any, int, Any]]:
    """All pairs of (factor, value) in a combination."""
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def all_pairs() -> set[tuple[int, Any, int, Any]]:
    """All pairs of (factor, value) that some combination has: two degrees may need too many ranks."""
    options = list(FACTORS.values())
    return {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(options)), 2)
        for a, b in itertools.product(options[i], options[j])
        if _fits({i: a, j: b})
    }


def _fits(values: dict[int, Any]) -> bool:
    """Whether the degrees among these values, by factor, need at most `MAX_RANKS` ranks."""
    return math.prod(values.get(index, 1) for index in range(len(_DEGREES))) <= MAX_RANKS


def covering_set() -> list[Case]:
    """Every layout once, and every pair of values of two factors, in few cases: greedy, and the same each time."""
    options = list(FACTORS.values())
    missing = all_pairs()
    generator = random.Random(0)
    chosen: list[Values] = []
    while missing:
        first = min(missing, key=repr)  # each candidate has this one; the rest is filled in one factor after the other
        best: tuple[int, Values] = (0, ())
        for _ in range(20):
            values: dict[int, Any] = {first[0]: first[1], first[2]: first[3]}
            rest = [i for i in range(len(options)) if i not in values]
            for i in generator.sample(rest, len(rest)):
                values[i] = max(
                    [value for value in generator.sample(options[i], len(options[i])) if _fits({**values, i: value})],
                    key=lambda value: sum(
                        ((i, value, j, other) if i < j else (j, other, i, value)) in missing
                        for j, other in values.items()
                    ),
                )
            candidate = tuple(values[i] for i in range(len(options)))
            best = max(best, (len(pairs_of(candidate) & missing), candidate), key=lambda scored: scored[0])
        chosen.append(best[1])
        missing -= pairs_of(best[1])
    for number, layout in enumerate(layout for layout in LAYOUTS if layout not in {values[:3] for values in chosen}):
        chosen.append((*layout, *(values[number % len(values)] for values in options[3:])))
    return _evaluated_once_a_layout(map(_case, chosen))


def whole_matrix() -> list[Case]:
    """Every combination, each with SGD and AdamW, but that the six of heads and clipping take turns over the others."""
    options = [values for name, values in FACTORS.items() if name not in (*_DEGREES, "heads", "clip", "updates")]
    factors = [list(enumerate(values)) for values in (LAYOUTS, *options)]
    turns = list(itertools.product(FACTORS["heads"], FACTORS["clip"]))
    cases = []
    for combination in itertools.product(*factors):
        turn = turns[sum(index for index, _ in combination) % len(turns)]
        layout, *values = (value for _, value in combination)
        cases.append(_case((*layout, *values, *turn)))
    return _evaluated_once_a_layout(cases)


def schedule_matrix() -> Iterator[Case]:
    """Every schedule, over stages, microbatches and ties, with tp 2; optimizers, clipping and dtypes take turns."""
    combinations = itertools.product(CHUNKS, (2, 4), (1, 2, 4, 8), (False, True), (False, True))
    for index, (schedule, pp, microbatches, tied, sequence_parallel) in enumerate(combinations):
        yield Case(
            2,
            pp,
            sequence_parallel=sequence_parallel,
            optimizer=("zero1", "plain", "master")[index % 3],
            microbatches=microbatches,
            tied=tied,
            clip=CLIP if index % 2 or index % 5 == 0 else None,
            schedule=schedule,
            dtype=torch.float32 if index % 5 == 0 else torch.float64,
        )


def float32_cases() -> Iterator[Case]:
    """Every layout in float32, the options taking turns."""
    for index, (tp, pp, dp) in enumerate(LAYOUTS):
        yield Case(
            tp,
            pp,
            dp,
            sequence_parallel=index % 2 == 0,
            optimizer=("zero1", "plain", "master")[index % 3],
            microbatches=(4, 2, 1, 2)[index % 4],
            tied=index % 4 == 1,
            labels="uneven",
            clip=CLIP if index % 5 == 0 else None,
            dtype=torch.float32,
        )


def with_updates_in_turn(cases: Iterable[Case]) -> list[Case]:
    """SGD and AdamW by turns, in place of both in each case."""
    return [replace(case, updates=FACTORS["updates"][number % 2]) for number, case in enumerate(cases)]


def _evaluated_once_a_layout(cases: Iterable[Case]) -> list[Case]:
    seen: set[Any] = set()
    return [
        replace(case, evaluate=case.mesh not in seen and not seen.add(case.mesh))  # type: ignore[func-returns-value]
        for case in cases
    ]


def _case(values: Values) -> Case:
    return Case(**dict(zip(FACTORS, values)))
