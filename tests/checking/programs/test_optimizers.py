"""Optimizers are judged: those that mix elements of a shard are refused, elementwise ones pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import spmd
from neuronx_dist.gradients.reduce import reduce_gradients
from tests.checking.programs import optimizer_programs, whole_steps

pytestmark = pytest.mark.slow

NAMES = whole_steps.names_in(optimizer_programs)


class Counting(torch.optim.SGD):
    """Takes smaller and smaller steps, by a count that it keeps in a tensor and reads as an int."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            count = self.state[param]["step"] = self.state[param].get("step", torch.zeros(())) + 1
            param.sub_(param.grad, alpha=0.1 / len(range(int(count))))


def test_a_count_that_is_read_as_an_int_is_one():
    def step(model, optimizer, x):
        model(x).square().mean().backward()
        reduce_gradients(model)
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 4), torch.zeros(2, 4), {"dp": 2}, step=step, optimizer=Counting)
    assert report.ok, str(report)
    assert (report.collectives, report.programs) == (1, 1) and report.operators > 5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_its_optimizer(name):
    whole_steps.verify(name)
