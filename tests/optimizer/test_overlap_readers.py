"""ZeRO-1 with `overlap=True`: whoever reads a parameter waits for its new value."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer.gathers import Gathers
from tests.optimizer.overlap_training import (
    LAYERS,
    WIDTH,
    Chain,
    both,
    rows,
    steps,
    zero1,
)
from tests.optimizer.zero1_training import weights_of

READERS: dict[str, Callable[[nn.Module], Any]] = {
    "evaluation": lambda model: model.eval()(rows(9, 0)),
    "no_grad": lambda model: torch.no_grad()(model)(rows(9, 0)),
    "inference": lambda model: torch.inference_mode()(model)(rows(9, 0)),
    "state_dict": lambda model: model.state_dict()["layers.1.weight"],
    "deepcopy": lambda model: copy.deepcopy(model).layers[1].weight.detach(),
    "data": lambda model: model.layers[1].weight.data.clone(),
    "arithmetic": lambda model: torch.zeros(WIDTH, WIDTH).lerp_(model.layers[1].weight.detach(), 0.5),
    "list": lambda model: torch._foreach_norm(list(model.parameters()))[2],
    "save": lambda model: _saved(model.layers[1].weight),
    "double": lambda model: copy.deepcopy(model).double().layers[1].weight.detach(),
    "function": lambda model: _Product.apply(rows(9, 0), model.layers[1].weight),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (rows(9, 0),)),
    "checkpoint": lambda model: checkpoint(model, rows(9, 0), use_reentrant=False),
    "gather_full": lambda model: nxd.parallel_layers.utils.move_all_tensor_to_cpu(model.state_dict())["scale"],
}


def _saved(param: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file, weights_only=True).detach()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.t(), None


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_waits(reader: str) -> None:
    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        optimizer = zero1(model, overlap)
        steps(model, optimizer, last=2)
        value = READERS[reader](model)
        return {"value": value.detach().clone(), **weights_of(model)}

    both(Mesh(2), use)


@pytest.mark.slow
def test_compiled_code_waits() -> None:
    """Compiled code that is not refused runs eagerly up to the first use of a parameter that is not gathered yet."""
    linear, gathers = nn.Linear(3, 3, bias=False), Gathers()
    compiled = torch.compile(linear, backend="eager")
    compiled(torch.ones(1, 3))
    for value in (1.0, 2.0):
        gathers.append([linear.weight], partial(linear.weight.fill_, value))
        assert compiled(torch.ones(1, 3)).tolist() == [[3 * value] * 3]
        assert type(linear.weight) is nn.Parameter


def test_reading_one_parameter_waits_for_its_bucket_alone_and_clearing_gradients_for_none() -> None:
    def rank_main() -> None:
        model = Chain()
        optimizer = zero1(model, True)
        steps(model, optimizer, last=1)
        with comm.record(waits=True) as calls:
            optimizer.zero_grad()
            model.zero_grad()
            assert all(param.grad is None and param.requires_grad and param.shape for param in model.parameters())
            assert not calls
            model.layers[3].weight.sum()
            assert len(calls) == 1
            optimizer.wait()
            assert len(calls) == 2 * LAYERS + 1
            optimizer.wait()
            assert len(calls) == 2 * LAYERS + 1
        assert all(type(param) is nn.Parameter and "awaits" not in param.__dict__ for param in model.parameters())

    comm.threads.run(Mesh(2), rank_main)


def test_parameters_of_a_class_of_their_own_are_there_after_the_step() -> None:
    class Own(nn.Parameter):
        pass

    def rank_main() -> None:
        model = nn.ParameterDict({"w": Own(torch.ones(4)), "v": nn.Parameter(torch.ones(40))})
        optimizer = zero1(model, True)
        (model["w"].sum() * model["v"].sum()).backward()
        with comm.record(waits=True) as calls:
            optimizer.step()
        assert type(model["w"]) is Own and sum(call.verb == "wait:all_gather" for call in calls) == 1

    comm.threads.run(Mesh(2), rank_main)


def test_weights_and_state_that_are_loaded_between_steps() -> None:
    """Loading waits for what is under way, which would overwrite it."""

    def use(overlap: bool) -> dict[str, torch.Tensor]:
        model = Chain()
        optimizer = zero1(model, overlap, "AdamW", save_master_weights=True)
        steps(model, optimizer, last=1)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        steps(model, optimizer, last=2)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        steps(model, optimizer, last=1)
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
        optimizer.init_zero()
        steps(model, optimizer, last=2)
        return weights_of(model)

    both(Mesh(2), use)
