"""What has been done to a gradient in this step: which reductions may follow one another, what ends a state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.gradients.state import ReductionState
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from tests.support.synthetic import Model

REDUCTIONS: dict[str, Callable[[nn.Module], None]] = {
    "step": grads.reduce_gradients,
    "step, without the mean": lambda model: grads.reduce_gradients(model, average_over_data=False),
    "tp": grads.allreduce_sequence_parallel_gradients,
    "cp": grads.allreduce_context_parallel_gradients,
    "data": lambda model: grads.bucket_allreduce_gradients([param.grad for param in model.parameters()]),
    "ep": lambda model: grads.bucket_allreduce_gradients([param.grad for param in model.parameters()], True),
}


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4, tp=2), Mesh(4, cp=2)], ids=str)
def test_every_order_of_two_reductions(mesh: Mesh) -> None:
    """Each reduction is done once in a step, and none goes before or after the whole step's."""

    def rank_main() -> None:
        for first, second in product(REDUCTIONS, REDUCTIONS):
            model = Model()
            model.set_gradients(step=0)
            for param in model.parameters():
                param.sequence_parallel_enabled = True  # else the sum over tp has nothing to refuse
            REDUCTIONS[first](model)
            if first == second or "step" in first or "step" in second:
                done = first.split(",")[0]
                with pytest.raises(RuntimeError, match=rf"\(done: {done}\).*zero_grad before the next step"):
                    REDUCTIONS[second](model)
            else:
                REDUCTIONS[second](model)
                with pytest.raises(RuntimeError, match=rf"\(done: {', '.join(sorted((first, second)))}\)"):
                    REDUCTIONS["step"](model)

    comm.threads.run(mesh, rank_main)


@pytest.mark.parametrize("first", REDUCTIONS)
def test_what_ends_a_state_and_what_keeps_it(first: str) -> None:
    def refused(model: Model) -> bool:
        states = [ReductionState.stages_of(param.grad) for param in model.parameters()]
        assert len({bool(state) for state in states}) == 1 or first == "tp"
        return any(states)

    def rank_main() -> None:
        model = Model()

        def reduced() -> Model:
            model.set_gradients(step=0)
            REDUCTIONS[first](model)
            assert refused(model)
            return model

        grads.clip_grad_norm(reduced().parameters(), 0.1)
        assert refused(model)
        grads.clip_grad_norm(model.parameters(), 1e9)
        assert refused(model)
        reduced().zero_grad(set_to_none=False)
        assert not refused(model)
        REDUCTIONS[first](model)
        for param in reduced().parameters():
            (param.sum() * 2.0).backward()  # accumulates in place
        assert not refused(model)
        for param in reduced().parameters():
            param.grad = param.grad.clone()
        assert not refused(model)
        reduced().zero_grad()
        model.set_gradients(step=1)
        assert not refused(model)

    comm.threads.run(Mesh(4, tp=2), rank_main)


def test_state_is_that_of_the_accumulator() -> None:
    def rank_main() -> None:
        model = nn.Linear(2, 1, bias=False)
        model.weight.main_grad = torch.ones(1, 2)
        model.weight.grad = torch.ones(1, 2)
        grads.reduce_gradients(model)
        assert ReductionState.stages_of(model.weight.main_grad) == {"step"}
        assert ReductionState.stages_of(model.weight.grad) == set()
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(model)
        model.weight.main_grad.add_(1)
        grads.reduce_gradients(model)

    comm.threads.run(Mesh(2), rank_main)
