"""Whole training steps of a two-layer Llama at tp 2 x dp 2 on four virtual devices, against four gloo processes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from neuronx_dist.mesh import Mesh
from tests.xla.programs import training as programs
from tests.xla.programs.training import Training
from tests.xla.training_parity import assert_trains_as_elsewhere, replayed

MESH = Mesh(4, tp=2)

CASES = {
    "zero1 sgd": Training("sgd", "zero1"),
    "zero1 adamw": Training("adamw", "zero1"),
    "zero1 adamw, sequence parallel": Training("adamw", "zero1", sequence_parallel=True),
    "zero1 adamw, tied, 2 microbatches": Training("adamw", "zero1", tied=True, microbatches=2),
    "plain adamw": Training("adamw", "plain"),
    "master adamw, sequence parallel": Training("adamw", "master", sequence_parallel=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_gloo_and_of_one_process(name):
    weights = assert_trains_as_elsewhere(CASES[name], tp=2)
    assert {len(of_rank) for of_rank in weights} == {22 if CASES[name].tied else 23}


def test_after_the_first_step_nothing_is_compiled():
    """The first step makes the optimizer's state; from the second on there is one program, whatever the step."""
    found = replayed(MESH, CASES["zero1 adamw"], steps=4)
    assert found.compiled == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "sizes, microbatches",
    [(dict(tp=2), 1), (dict(tp=2), 2), (dict(pp=2), 2)],
    ids=["one program", "gradients accumulated", "pipeline"],
)
def test_a_schedule_from_zero_to_zero_compiles_nothing(sizes, microbatches):
    """A learning rate of 0 is a constant of the program, unless it is a tensor on the device."""
    found = programs.scheduled(Mesh(4, **sizes), Training("adamw", "zero1", microbatches=microbatches))
    if "pp" not in sizes:
        assert found.compiled[:2] == [1, 1]
    assert found.compiled[2:] == [0, 0, 0]
    assert found.host_reads == [1, 0, 0, 0, 0]  # the model is recorded at the first step
    assert found.uploads[1:] == [found.uploads[1]] * 4 and found.uploads[1] <= 4
    assert found.outputs[0][1]["loss"] != found.outputs[0][2]["loss"]
    assert all(torch.isfinite(value).all() for state in found.states for value in state.values())


def test_what_a_step_communicates():
    """docs/architecture.md's table, in the lowered program."""
    program = replayed(MESH, CASES["zero1 adamw"], steps=2).programs[-1]
    assert program.counts() == Counter(
        {
            ("all-reduce", "tp"): 12,  # embedding 1, two layers of 2 forward and 2 backward, head 1, loss 2
            ("all-reduce", "dp,cp"): 2,  # number of labels, mean of the loss
            ("reduce-scatter", "dp,cp"): 1,
            ("all-gather", "dp,cp"): 1,
            ("all-reduce", "world"): 1,  # the norm
        }
    )
    assert {c.axis: c.groups for c in program.collectives} == {
        "tp": ((0, 1), (2, 3)),
        "dp,cp": ((0, 2), (1, 3)),
        "world": ((0, 1, 2, 3),),
    }
