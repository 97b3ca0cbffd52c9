"""State of a gradient in this step: which reductions may follow one another, and which calls end a state."""

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


# What the whole step's reduction has done, and so its calls by NxD's names find done.
DONE = {"step": {"tp", "cp", "data", "ep"}, "step, without the mean": {"tp"}}


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(4, tp=2), Mesh(4, cp=2)], ids=str)
def test_every_order_of_two_reductions(mesh: Mesh) -> None:
    """Each reduction is done once in a step and asked for once; the whole step's comes first, or not at all."""

    def rank_main() -> None:
        for first, second in product(REDUCTIONS, REDUCTIONS):
            model = Model()
            model.set_gradients(step=0)
            for param in model.parameters():
                param.sequence_parallel_enabled = True  # else the sum over tp has nothing to refuse
            REDUCTIONS[first](model)
            before = values(model)
            if "step" in second:
                with pytest.raises(RuntimeError, match=r"\(done: .*\).*zero_grad before the next step"):
                    REDUCTIONS[second](model)
                continue
            if first == second:
                with pytest.raises(RuntimeError, match=rf"\(done: {first}\).*second call for '{first}'"):
                    REDUCTIONS[second](model)
                continue
            with comm.record() as calls:
                REDUCTIONS[second](model)
            if second in DONE.get(first, ()):
                assert calls == [] and all(map(torch.equal, values(model), before))
            elif second == "tp" and mesh.tp > 1:
                assert calls and not any(map(torch.equal, values(model), before))
            with pytest.raises(RuntimeError, match=f"second call for '{second}'"):
                REDUCTIONS[second](model)
            with pytest.raises(RuntimeError, match="reduced already"):
                REDUCTIONS["step"](model)

    comm.threads.run(mesh, rank_main)


@pytest.mark.parametrize("first", REDUCTIONS)
def test_what_ends_a_state_and_what_keeps_it(first: str) -> None:
    def refused(model: Model) -> bool:
        states = [ReductionState.of(param.grad).stages for param in model.parameters()]
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
        assert "step" in ReductionState.of(model.weight.main_grad).stages
        assert ReductionState.of(model.weight.grad).stages == set()
        with pytest.raises(RuntimeError, match="reduced already"):
            grads.reduce_gradients(model)
        model.weight.main_grad.add_(1)
        grads.reduce_gradients(model)

    comm.threads.run(Mesh(2), rank_main)
