"""Results of a walk over a model are cached until the model changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.weights.module_tree import ModuleTree
from tests.support.pipeline_models import Block, Model


def network() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.LayerNorm(2), nn.Identity()), shared)
    model.register_parameter("absent", None)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    return model


def assert_is_a_walk(tree: ModuleTree, model: nn.Module) -> None:
    assert tree.is_current() and tree.modules == list(model.modules())
    named = [(slot.name, slot.parameter) for slot in tree.slots]
    expected = list(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in named] == [name for name, _ in expected]
    assert all(a is b is c for (_, a), (_, b), c in zip(named, expected, tree.parameters(), strict=True))


def replace_a_layer(model: nn.Module) -> None:
    model[1][1] = nn.ReLU()


def add_a_layer(model: nn.Module) -> None:
    model[1].append(nn.Linear(2, 2))


def move_a_layer(model: nn.Module) -> None:
    model[1].add_module("2", model[1][1])
    del model[1]._modules["1"]


def reorder_layers(model: nn.Module) -> None:
    first = model[1]._modules.pop("0")
    model[1]._modules["0"] = first


def replace_a_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def rename_a_parameter(model: nn.Module) -> None:
    model[0].register_parameter("kernel", model[0]._parameters.pop("weight"))


def remove_a_parameter(model: nn.Module) -> None:
    model[0].bias = None


def replace_a_table(model: nn.Module) -> None:
    model[0].__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(2, 2))}


@pytest.mark.parametrize(
    "change",
    [replace_a_layer, add_a_layer, move_a_layer, reorder_layers, replace_a_parameter, rename_a_parameter,
     remove_a_parameter, replace_a_table],
)  # fmt: skip
def test_a_change_is_seen(change):
    model = network()
    before = ModuleTree(model)
    assert_is_a_walk(before, model)
    change(model)
    assert not before.is_current()
    assert_is_a_walk(ModuleTree(model), model)


def test_values_modes_and_what_requires_gradients_change_nothing():
    model = network()
    tree = ModuleTree(model)
    model.eval().double().requires_grad_(False)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert_is_a_walk(tree, model)


def test_names_that_move_between_neighbouring_modules_are_seen():
    """All names in a row, and all parameters in a row, are the same before and after."""
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].a, model[0].b, model[1].c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    tree = ModuleTree(model)
    moved = model[0]._parameters.pop("b")
    model[1]._parameters = {"b": moved, **model[1]._parameters}
    assert not tree.is_current()


@pytest.mark.slow
def test_a_replaced_parameter_is_freed():
    model = network()
    tree = ModuleTree(model)
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    gc.collect()
    assert old() is None and not tree.is_current()


def test_a_pipeline_model_follows_its_module():
    def rank_main():
        model = nxd.NxDPPModel(Model(), transformer_layer_cls=Block, num_microbatches=1, auto_partition=True,
                               output_loss_value_spec=True)  # fmt: skip
        before = dict(model.local_named_parameters())
        assert model.device == torch.device("cpu")
        name = next(name for name in before if name.endswith("weight"))
        owner = model.original_module.get_submodule(name.rpartition(".")[0])
        owner.weight = nn.Parameter(torch.zeros_like(owner.weight))
        after = dict(model.local_named_parameters())
        assert list(after) == list(before) and after[name] is owner.weight is not before[name]
        assert all(after[other] is before[other] for other in before if other != name)
        model.original_module.to("meta")
        assert model.device == torch.device("meta") == next(model.local_parameters()).device
        model.original_module = nn.Module()
        assert list(model.local_parameters()) == []

    comm.threads.run(nxd.Mesh(2, pp=2), rank_main)
