"""Layers that are recomputed: by class, by name, by the model's own list; and errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import neuronx_dist as nxd
from neuronx_dist.parallel_layers.activation_checkpoint import (
    apply_activation_checkpointing,
    checkpoint_layers,
    checkpoint_wrapper,
    keep_random_streams,
)
from neuronx_dist.spmd.random import checkpoint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        self.calls += 1
        return torch.tanh(self.linear(x))


class Other(Layer):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Other(), Layer()])
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    "layers, expected",
    [
        (Layer, ["layers.0", "layers.1", "layers.2"]),
        (Other, ["layers.1"]),
        ("Layer", ["layers.0", "layers.2"]),  # a name is of one class
        ("layers.2", ["layers.2"]),
        (["head", Other, "layers.0"], ["layers.0", "layers.1", "head"]),  # in the model's order
        ({"head"}, ["head"]),
        (frozenset([Other]), ["layers.1"]),
        (("Linear",), ["layers.0.linear", "layers.1.linear", "layers.2.linear", "head"]),
        ([nn.ModuleList, nn.Linear], ["layers", "layers.0.linear", "layers.1.linear", "layers.2.linear", "head"]),
    ],
)  # fmt: skip
def test_layers_by_class_and_name(layers: Any, expected: list[str]) -> None:
    model = Model()
    assert checkpoint_layers(model, layers) == expected == wrapped(model)
    before = [module.forward for module in model.modules()]
    assert checkpoint_layers(model, layers) == expected  # again changes nothing
    assert [module.forward for module in model.modules() if "forward" in vars(module)] == [
        forward for forward in before if isinstance(forward, partial)
    ]


@pytest.mark.parametrize(
    "layers, message",
    [
        (
            "Laier",
            "recompute: this Model has no layer 'Laier'; nearest words, classes and names are Layer, Linear",
        ),
        ("", "this Model has no layer ''; nearest"),
        ("Model", "this Model has no layer 'Model'; nearest words, classes and names are Model"),  # it is no layer
        (nn.Conv1d, "this Model has no layer 'Conv1d'; nearest"),
        ([Layer, "nothing"], "this Model has no layer 'nothing'"),
        (3, "'norms', a class, its name, the name of a layer, or a predicate on modules, got 3"),
        (None, "recompute: the transformer layers of this Model are unknown; pass their class"),
    ],
)
def test_layers_that_there_are_not(layers: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ValueError) as error:
        checkpoint_layers(model, layers)
    assert message in str(error.value) and wrapped(model) == []


@pytest.mark.parametrize(
    "said, expected",
    [
        (dict(_no_split_modules=["Layer", "NotThere"]), ["layers.0", "layers.2"]),
        (dict(_no_split_modules={"Other"}), ["layers.1"]),
        (dict(transformer_layer_cls=Other), ["layers.1"]),
        (dict(transformer_layer_cls="Other", _no_split_modules=["Layer"]), ["layers.1"]),
        (dict(transformer_layer_cls=None, _no_split_modules=["Layer"]), ["layers.0", "layers.2"]),
        (dict(transformer_layer_cls=[Other, Layer]), ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_layers_that_a_model_names(said: dict[str, Any], expected: list[str]) -> None:
    model = Model()
    vars(model).update(said)
    assert checkpoint_layers(model) == expected


def test_layers_that_a_model_names_and_has_not() -> None:
    model = Model()
    model._no_split_modules = ["NotThere"]
    with pytest.raises(ValueError, match="has no layer 'NotThere'"):
        checkpoint_layers(model)


def test_a_wrapped_layer_is_recomputed_and_stays_what_it_is() -> None:
    layer, x = Layer(), torch.ones(1, 2, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)
    assert checkpoint_wrapper(layer) is layer and layer.forward.__doc__ == "Doubles."
    layer.calls = 0
    assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], expected[0]) and layer.calls == 2
    with torch.no_grad():
        layer(x)
    assert layer.calls == 3
    replaced = Layer()
    replaced.forward = lambda x: x  # type: ignore[method-assign]  # by somebody else
    checkpoint_wrapper(replaced)
    assert isinstance(replaced.forward, partial) and checkpoint in replaced.forward.args


def test_modules_that_a_function_chooses() -> None:
    model = Model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Other))
    assert wrapped(model) == ["layers.1"]
    model = Model()
    seen: list[nn.Module] = []
    apply_activation_checkpointing(model, lambda module: seen.append(module) or module)  # type: ignore[func-returns-value]
    assert seen == [module for name, module in model.named_modules() if name]
    with pytest.raises(ValueError, match="checkpoint_wrapper_fn returned a Sequential around layers, which changes"):
        apply_activation_checkpointing(model, nn.Sequential)


def test_hugging_faces_checkpointing_replays_every_stream() -> None:
    model = Model()
    for module in (model, model.layers[1], model.layers[2]):
        module.gradient_checkpointing = False
    keep_random_streams(model)
    mine, torchs = partial(print, 1), partial(torch_checkpoint, use_reentrant=False)
    model.layers[1]._gradient_checkpointing_func = torchs
    model.layers[2]._gradient_checkpointing_func = mine
    model.layers[0]._gradient_checkpointing_func = torchs  # which never asks for it
    model(torch.ones(1, 2))
    assert model.layers[1]._gradient_checkpointing_func is checkpoint
    assert model.layers[2]._gradient_checkpointing_func is mine
    assert model.layers[0]._gradient_checkpointing_func is torchs


def gradients(model: nn.Module, **what: Any) -> list[torch.Tensor]:
    model.load_state_dict({key: torch.full_like(x, 0.3) for key, x in model.state_dict().items()})
    if what:
        nxd.recompute(model, **what)
    torch.manual_seed(0)
    return list(torch.autograd.grad(model(torch.ones(3, 2)).square().sum(), list(model.parameters())))


@pytest.mark.parametrize(
    "functions", [[torch.tanh], F.linear, lambda function: True], ids=["tanh", "linear alone", "all"]
)
@pytest.mark.parametrize("offload", [False, True])
def test_functions_inside_of_recomputed_layers(functions: Any, offload: bool) -> None:
    expected = gradients(Model())
    model = Model()
    for what in (dict(what=Layer, functions=functions), dict(what=Layer), dict(functions=functions)):
        assert all(map(torch.equal, gradients(model, **what, offload=offload), expected))
    model = Model()
    nxd.recompute(model, functions=functions)
    assert all(map(torch.equal, gradients(model, what=Layer), expected))


class Biased(Layer):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(self.linear(x + bias))


class Changing(nn.Module):
    """Adds 1, in place, to a bias after each layer; or its layers write to their inputs."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        layer = Biased if activation == "bias" else partial(nn.Linear, 2, 2)
        self.layers, self.activation = nn.ModuleList([layer(), layer()]), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(2)
        for layer in self.layers:
            if self.activation == "bias":
                x = layer(x, bias=bias)
                bias += 1
            else:
                x = torch.sigmoid_(layer(x)) if self.activation == "sigmoid_" else F.relu(layer(x), inplace=True)
        return x


@pytest.mark.parametrize("offload", [False, True])
def test_changes_in_place(offload: bool) -> None:
    for activation in ("sigmoid_", "relu"):  # left as they are
        actual = gradients(Changing(activation), functions=lambda function: True, offload=offload)
        assert all(map(torch.equal, actual, gradients(Changing(activation))))
    with pytest.raises(RuntimeError, match="argument .bias. of Biased was changed in place after the call"):
        gradients(Changing("bias"), what=Biased, offload=offload)
    for function in (torch.sigmoid_, torch.Tensor.add_, torch.Tensor.__iadd__):
        with pytest.raises(ValueError, match=f"recompute: {function.__name__} changes its argument in place"):
            nxd.recompute(Model(), functions=[torch.tanh, function])

    class Adds(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(torch.tanh(self.linear(x.detach()))).clone()

    model = nn.Sequential(nn.Linear(2, 2), Adds(), Adds())
    with pytest.raises(RuntimeError, match="argument 0 of Adds was changed in place by the call"):
        gradients(model, what=Adds, offload=offload)
