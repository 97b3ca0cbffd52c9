"""Training that goes on from merged states: under the same plan to the bit, under any other as one process does."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import load_merged_state_dict, merge_state_dicts
from tests.parallelize.support.matrix import (
    ASYNC,
    LAYOUTS,
    OPTIMIZERS,
    ZERO,
    Layout,
    Sampled,
    built,
    case,
    close,
    compiled,
    sample,
    whole_weights,
)

pytestmark = pytest.mark.slow

PLANS = {
    "one": Layout("dp", 1, micro=2),
    "tp2": Layout("tp", 2, micro=2),
    "tp4": Layout("tp", 4, micro=2),
    "zero2": Layout("dp", 1, 2, micro=2, options=ZERO),
    "tp2 zero2": LAYOUTS["end2end tp2 zero2"],
    "async tp2 dp2": Layout("tp", 2, 2, micro=2, options=ASYNC),
    "pp2": LAYOUTS["pp2"],
    "pp2 tp2": LAYOUTS["pp2 tp2"],
    "pp2 zero2": LAYOUTS["pp2 zero2"],
}
PAIRS = [("tp2", "tp4"), ("tp2", "pp2"), ("zero2", "tp2"), ("pp2 tp2", "one"), ("pp2 zero2", "zero2")]


def trained(
    name: str, plan: str, optimizer: str, steps: range, folder: Path, merged: Any = None
) -> tuple[list[Any], list[dict[str, torch.Tensor]], Any]:
    """Returns the losses and whole weights of each rank, and the merged states of all."""
    layout, arguments = PLANS[plan], case(name).arguments

    def rank() -> Any:
        parallel, stepper = built(name, layout, optimizer, folder)
        if merged is not None:
            load_merged_state_dict(parallel, copy.deepcopy(merged[0]), stepper, copy.deepcopy(merged[1]))
        losses = []
        for step in steps:
            samples = [sample(arguments, step, comm.rank("dp"), number) for number in range(layout.micro)]
            losses += [result["loss"].item() for result in parallel.train_step(samples)]
            stepper.step()
        return losses, whole_weights(parallel), parallel.state_dict(), stepper.state_dict()

    compiled(name, layout, folder)
    losses, weights, models, optimizers = zip(*threads.run(layout.config.mesh(layout.pp), rank))
    return list(losses), list(weights), merge_state_dicts(list(models), list(optimizers))


@cache
def saved(plan: str, optimizer: str, folder: Path) -> Any:
    return trained("gpt", plan, optimizer, range(4), folder / plan / optimizer)[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.full), "AdamW"])
@pytest.mark.parametrize(
    "source, target",
    [*PAIRS[1:], *(pytest.param(*pair, marks=pytest.mark.full) for pair in [PAIRS[0], *(p[::-1] for p in PAIRS)])],
)
def test_saved_under_one_plan_and_loaded_under_another(
    source: str, target: str, optimizer: str, folder: Path, tmp_path: Path
) -> None:
    merged = saved(source, optimizer, folder)
    losses, weights, _ = trained("gpt", target, optimizer, range(4, 8), tmp_path, merged)
    whole = Sampled(copy.deepcopy(case("gpt").module))
    whole.load_state_dict(merged[0])
    stepper = OPTIMIZERS[optimizer](whole.parameters())
    stepper.load_state_dict(copy.deepcopy(merged[1]))
    units = PLANS[target].units
    expected: list[list[float]] = [[] for _ in range(units)]
    for step in range(4, 8):
        whole.zero_grad()
        for unit in range(units):
            for number in range(PLANS[target].micro):
                loss = whole(sample(case("gpt").arguments, step, unit, number))["loss"]
                loss.backward()
                expected[unit].append(loss.item())
        stepper.step()
    per_unit = len(losses) // units
    for rank, (rank_losses, held) in enumerate(zip(losses, weights)):
        close("losses", torch.tensor(rank_losses), torch.tensor(expected[rank // per_unit]), 1e-9)
        for name, x in held.items():
            close(name, x, whole.state_dict()[name], 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_32_steps_are_16_and_from_merged_states_16_more_to_the_bit(
    name: str, plan: str, optimizer: str, tmp_path: Path
) -> None:
    straight, weights, states = trained(name, plan, optimizer, range(32), tmp_path)
    first, _, merged = trained(name, plan, optimizer, range(16), tmp_path)
    resumed, again, after = trained(name, plan, optimizer, range(16, 32), tmp_path, merged)
    assert [start + rest for start, rest in zip(first, resumed)] == straight
    torch.testing.assert_close((again, after), (weights, states), rtol=0, atol=0)
