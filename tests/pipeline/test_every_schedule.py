"""Every schedule trains as one process does: losses, norms, all gradients, the weights after some steps.

`make test` runs each schedule with even and odd numbers of microbatches, fewer and more than stages, and compares the
bits where the order of sums is equal; NXD_FULL=1 all.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.support.pipeline_training import (
    CHUNKS,
    OPTIMIZERS,
    STEPS,
    Setting,
    Steps,
    alone,
    check,
    train,
    train_on_threads,
)
from tests.support.pool import processes

pytestmark = pytest.mark.slow

CORNERS = [
    Setting(schedule, pp, microbatches, tied=tied, dtype=dtype)
    for schedule in CHUNKS
    for pp, microbatches, tied, dtype in [
        (1, 2, True, torch.float64),
        (2, 1, True, torch.float64),
        (2, 5, False, torch.float32),
        (2, 8, True, torch.float64),
        (4, 3, False, torch.float64),
        (4, 7, True, torch.float32),
    ]
]
THREE_CHUNKS = [Setting("interleaved", 2, 5, chunks=3, tied=True), Setting("interleaved", 1, 3, chunks=4)]
MATRIX = [
    Setting(schedule, pp, microbatches, tied=tied, dtype=dtype)
    for schedule, pp, microbatches, tied, dtype in itertools.product(
        CHUNKS, (2, 4), range(1, 9), (False, True), (torch.float64, torch.float32)
    )
]
FULL = MATRIX if os.environ.get("NXD_FULL") else []


def in_turn(settings: list[Setting]) -> list[Any]:
    """Settings with SGD or AdamW by turns, also from one schedule to the next; with both with NXD_FULL=1."""
    names = [*OPTIMIZERS]
    return [
        pytest.param(setting, tuple(names) if FULL else (names[(number + number // 6) % 2],), id=str(setting))
        for number, setting in enumerate(settings)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setting, updates", in_turn(CORNERS + THREE_CHUNKS))
def test_as_one_process(setting: Setting, updates: tuple[str, ...]) -> None:
    results = train_on_threads(setting, optimizer_names=updates)
    check(setting, results)
    if not setting.tied:
        check_bits(setting, results)


@pytest.mark.parametrize("schedule", CHUNKS)
def test_the_order_of_ranks_changes_no_bit(schedule: str) -> None:
    """A race between ranks would: in a random order ranks also stop after they send."""
    setting = Setting(schedule, 4, 5, tied=True)
    orders = ["round-robin", *range(20 if os.environ.get("NXD_FULL") else 1)]
    expected, *results = (
        [{name: asdict(steps) for name, steps in rank.items()} for rank in train_on_threads(setting, order=order)]
        for order in orders
    )
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("setting", FULL or MATRIX[:1], ids=str)
def test_whole_matrix(setting: Setting) -> None:
    check(setting, train_on_threads(setting))


ON_PROCESSES = [
    Setting("interleaved", 2, 3, tied=True),
    Setting("zb_h1", 4, 5, dtype=torch.float32),
    Setting("zb_v", 4, 6, tied=True),
]


@pytest.mark.parametrize("setting", ON_PROCESSES, ids=str)
def test_on_processes(setting: Setting) -> None:
    check(setting, processes(setting.pp).run(train, setting, mesh={"pp": setting.pp}))


def check_bits(setting: Setting, results: list[dict[str, Steps]]) -> None:
    """The bits of accumulation in one process, where the order of sums is the same.

    So it is without tied weights, whose gradients several stages sum.
    """
    for optimizer_name in results[0]:
        expected = alone(setting, optimizer_name)
        for result in (steps[optimizer_name] for steps in results):
            for step in range(STEPS):
                assert torch.equal(result.losses[step], expected.losses[step])
                for name, grad in result.gradients[step].items():
                    assert torch.equal(grad, expected.gradients[step][name]), f"gradient of {name} in step {step}"
            for name, weight in result.weights.items():
                assert torch.equal(weight, expected.weights[name]), name


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("pp,microbatches", [(2, 5), (4, 3)])
def test_the_same_bits_as_accumulation_in_one_process(
    pp: int, microbatches: int, schedule: str, dtype: torch.dtype
) -> None:
    """In both dtypes; `make test` has one of each size in `test_as_one_process`."""
    setting = Setting(schedule, pp, microbatches, dtype=dtype)
    check_bits(setting, train_on_threads(setting))
