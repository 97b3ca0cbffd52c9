"""Reductions over the units start in the backward of a stage's last microbatch, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import build_optimizer, parallelize
from neuronx_dist.parallelize.train import pipelined as pipelined_module
from tests.parallelize.support.mutants import EAGER
from tests.parallelize.support.pipelines import config, module, samples

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_nstages": 2, "costs": EAGER},
    "gpipe": {"pipeline_nstages": 2, "pipeline_scheduler": "gpipe", "costs": EAGER},
    "interleaved": {"pipeline_nstages": 4, "pp_size": 2, "pipeline_scheduler": "1f1b_interleaved", "costs": EAGER},
}
REDUCTIONS = ("all_reduce", "reduce_scatter")


def trained(name: str, folder: Path, dummies: Callable[[int], list[bool]] | None = None, **options: Any) -> list[Any]:
    """Returns the collectives of each rank's train steps, in order, and its weights after three steps."""
    settings, folder = config(2, 2, **options), folder / str(options.get("reducer"))

    def rank() -> Any:
        given = {"data": samples(name, 1)[0]}
        parallel: Any = parallelize(module(name), given, "hybrid", settings, gen_savedir=folder)
        optimizer = build_optimizer(parallel, torch.optim.SGD, lr=0.1, momentum=0.9)
        unit, steps = comm.rank("dp"), []
        for step in range(3):
            with comm.record() as calls:
                parallel.train_step(samples(name, 4, step, unit), None if dummies is None else dummies(unit))
            steps.append([(call.verb, call.axis) for call in calls])
            optimizer.clip_gnorm(1.0)
            optimizer.step()
        return steps, {key: x.clone() for key, x in parallel.state_dict().items()}

    return threads.run(settings.mesh(2), rank)


@pytest.mark.each_value
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_they_start_in_the_last_backward_and_are_bit_equal(schedule: str, zero: bool, tmp_path: Path) -> None:
    right = trained("mlp", tmp_path, zero=zero, **SCHEDULES[schedule])
    has = trained("mlp", tmp_path, zero=zero, reducer=True, **SCHEDULES[schedule])
    for rank, ((steps, weights), (late_steps, expected)) in enumerate(zip(has, right)):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        for calls, late in zip(steps, late_steps):
            assert not [verb for verb, axis in late if axis.startswith("dp") and verb in REDUCTIONS]
            started = [i for i, (verb, axis) in enumerate(calls) if axis.startswith("dp") and verb in REDUCTIONS]
            sends = [i for i, (verb, axis) in enumerate(calls) if verb == "send" and axis.startswith("pp_backward")]
            receives = [i for i, (verb, axis) in enumerate(calls) if verb == "recv"]
            assert started and started[-1] < len(calls) - 1  # before the results are exchanged
            if rank % 2 == 0:
                assert receives[-1] < started[0]
            elif schedule != "interleaved":  # it sends the last gradients after the reduction has started
                assert sends[-2] < started[0] < sends[-1]


def test_tied_weights_follow_after_their_sum_over_the_stages(tmp_path: Path) -> None:
    right = trained("gpt", tmp_path, **SCHEDULES["1f1b"])
    has = trained("gpt", tmp_path, reducer=True, **SCHEDULES["1f1b"])
    for (steps, weights), (_, expected) in zip(has, right):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        for calls in steps:
            tied = next(i for i, (_, axis) in enumerate(calls) if axis.startswith("pp_tied"))
            assert [i for i, (_, axis) in enumerate(calls) if axis == "dp"] and ("all_reduce", "dp") not in calls[tied:]


@pytest.mark.parametrize("zero", [False, True])
def test_units_with_other_dummies(zero: bool, tmp_path: Path) -> None:
    """One unit's last microbatch is a dummy, all of the other's are."""

    def dummies(unit: int) -> list[bool]:
        return [True] * 4 if unit else [False, True, False, True]

    right = trained("mlp", tmp_path, dummies, zero=zero, **SCHEDULES["1f1b"])
    has = trained("mlp", tmp_path, dummies, zero=zero, reducer=True, **SCHEDULES["1f1b"])
    for rank, ((steps, weights), (_, expected)) in enumerate(zip(has, right)):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        started = [[call for call in calls if call[1].startswith("dp")] for calls in steps]
        assert all(started) if rank < 2 else not any(started)


def test_a_reduction_before_the_last_microbatch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_module, "paused", lambda params: _nothing())
    with pytest.raises(Exception, match="after its reduction over the data may have started"):
        trained("mlp", tmp_path, reducer=True, **SCHEDULES["1f1b"])


def _nothing() -> Any:
    return torch.enable_grad()
