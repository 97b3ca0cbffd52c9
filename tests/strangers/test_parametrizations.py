"""torch's parametrizations, norms of weights and pruning on shards: the values of one process, or a refusal by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize import ComputeConfig
from tests.parallelize.support.training import original, parallel
from tests.strangers.test_parallel_modules import trained as trained_by_units
from tests.strangers.toy import Net, batch, message_of, whole_weights

Weights = dict[str, torch.Tensor]


class Stretched(nn.Module):
    """Scales by a parameter with one element for each row or column."""

    def __init__(self, module: nn.Module, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 1.5, dtype=torch.float64))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


class LowRank(nn.Module):
    """Adds a product of two factors, as an adapter does."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, weight.shape[1], dtype=weight.dtype))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], 2, dtype=weight.dtype))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def norms_along_the_cut(model: Net) -> None:
    parametrizations.weight_norm(model.embed)
    parametrizations.weight_norm(model.up)
    parametrizations.weight_norm(model.down, dim=1)
    parametrizations.weight_norm(model.norm)


def rows_stretched(model: Net) -> None:
    parametrize.register_parametrization(model.up, "weight", Stretched(model, model.up.weight.shape[0], 1))


def norm_of_stretched(model: Net) -> None:
    norms_along_the_cut(model)
    rows_stretched(model)


def masked(model: Net) -> None:
    prune.identity(model.down, "weight")
    prune.custom_from_mask(model.up, "weight", model.up.weight > 0)
    prune.l1_unstructured(model.norm, "weight", 0.25)


def trained(model: nn.Module) -> Weights:
    """Weights after clipped SGD, with the norms of gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(3):
        model(**batch(step)).backward()
        nxd.reduce_gradients(model)
        norms.append(nxd.clip_grad_norm(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms).double(), **whole_weights(model)}


def near(values: Weights, reference: Weights) -> None:
    assert values.keys() == reference.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("change", [norms_along_the_cut, rows_stretched, norm_of_stretched, masked])
def test_along_the_cut_dim_is_one_process(change, sequence_parallel):
    def train() -> Weights:
        model = Net(sequence_parallel=sequence_parallel)
        change(model)
        return trained(model if change is masked else copy.deepcopy(model))  # torch copies no pruned modules

    with comm.as_rank(Mesh(1), 0):
        reference = train()
    for weights in comm.threads.run(Mesh(2, tp=2), train):
        near(weights, reference)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight_norm of rows": (
        lambda layer: parametrizations.weight_norm(layer),
        r"weight_norm\(module, 'weight', dim=1\)",
    ),
    "weight_norm of all": (
        lambda layer: parametrizations.weight_norm(layer, dim=None),
        "norms would be those of this shard",
    ),
    "spectral_norm": (parametrizations.spectral_norm, "parametrizations.spectral_norm.*Leave the layer whole"),
    "orthogonal": (parametrizations.orthogonal, "parametrizations.orthogonal.*Leave the layer whole"),
    "old weight_norm": (
        nn.utils.weight_norm,
        r"utils.weight_norm.*parametrizations.weight_norm\(module, 'weight', dim=1",
    ),
    "old spectral_norm": (nn.utils.spectral_norm, "utils.spectral_norm.*Leave the layer whole"),
    "l1": (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), "prune.l1_unstructured.*custom_from_mask"),
    "random": (lambda layer: prune.random_unstructured(layer, "weight", 0.3), "random_unstructured.*custom_from_mask"),
    "ln": (lambda layer: prune.ln_structured(layer, "weight", 0.3, 2, 0), "prune.ln_structured.*custom_from_mask"),
    "rows at random": (lambda layer: prune.random_structured(layer, "weight", 0.3, 0), "prune.random_structured"),
    "smallest of several": (
        lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.3),
        "prune.global_unstructured.*custom_from_mask",
    ),
    "scale of other dim": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Stretched(layer, layer.weight.shape[0], 1)),
        r"gradient of scale \[\d+, 1\] of the parametrization Stretched",
    ),
    "adapter": (
        lambda layer: parametrize.register_parametrization(layer, "weight", LowRank(layer.weight)),
        r"gradient of a \[2, \d+\] of the parametrization LowRank",
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_other_shards_is_refused(name):
    call, pattern = REFUSED[name]

    def refused() -> str:
        model = Net()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        message = message_of(lambda: call(model.down))
        assert all(map(torch.equal, before.values(), model.state_dict().values())), "changed"
        return message

    for message in comm.threads.run(Mesh(2, tp=2), refused):
        assert "weight of a RowParallelLinear is one of 2 shards along dim 1, and" in message
        assert re.search(pattern, message), message
    with comm.as_rank(Mesh(1), 0):
        call(Net().down)


def test_elements_of_all_stages_are_not_pruned_by_one():
    def refused() -> str:
        return message_of(
            lambda: prune.global_unstructured([(nn.Linear(4, 4), "weight")], prune.L1Unstructured, amount=0.3)
        )

    for message in comm.threads.run(Mesh(2, pp=2), refused):
        assert "prune.global_unstructured would choose elements of one pipeline stage alone, of 2" in message


def _message(call: Callable[[Any], Any], make: Callable[[], Any]) -> str:
    return message_of(lambda: call(make().layers[1]))


@pytest.mark.parametrize("config", [ComputeConfig(2, 2), ComputeConfig(2, 4)], ids=["2x1", "2x2"])
def test_modules_of_parallelize(config):
    """A norm along the cut dim is one process's; others are refused."""

    def train(module: Any) -> Weights:
        for dim in range(2):
            parametrizations.weight_norm(module.layers[dim], dim=dim)
        return trained_by_units(module)

    module = original()
    module.alone = config.units
    reference = train(module)
    with parallel(config) as make:
        for weights in comm.threads.run(config.mesh(), lambda: train(make())):
            near(weights, reference)
        for name in ("orthogonal", "old weight_norm", "l1"):
            call, pattern = REFUSED[name]
            start = pattern.partition(".*")[0] + ": weight of a Container is one of 2 shards"
            for message in comm.threads.run(config.mesh(), _message, call, make):
                assert re.search(start, message), message
