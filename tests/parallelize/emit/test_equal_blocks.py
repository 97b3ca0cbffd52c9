"""Equal layers are one method of an emitted file, linear layers of one input one call; `verify` proves each file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError
from neuronx_dist.parallelize.emit.emitted_class import EmittedProgram, emitted_program
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.prove.verify import verify
from neuronx_dist.parallelize.train.stored import Stored
from tests.parallelize.support.mutants import EAGER

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, scale: float = 0.5, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = scale
        self.__dict__["shared"] = shared  # a weight of another module

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        y = y if self.shared is None else self.shared(y)
        return x + y if bias is None else x + y + bias


class Net(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[nn.Module], *, all_results: bool = False) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, WIDTH), nn.ModuleList(layers)
        self.all_results = all_results

    def forward(self, tokens: torch.Tensor) -> Any:
        x, results = self.table(tokens), []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return torch.stack(results).square().mean() if self.all_results else x.square().mean()


def emitted(
    module: nn.Module, policy: Any = "tp", *, is_proven: bool = True, argument: str = "tokens", **options: Any
) -> EmittedProgram:
    """Returns the source of a module on two ranks, and proves it."""
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"costs": EAGER, **options})
    example = Example(module.double(), {argument: torch.arange(8).reshape(2, 4) % 5})
    program = emitted_program(example, [divide(example.program(training=True), policy, config)])
    if is_proven:
        verify(program)
    return program


def calls(source: str) -> list[str]:
    """Returns the lines that call a method of equal layers, with the heads of their loops."""
    return [line.strip().partition("  #")[0] for line in source.splitlines() if re.search(r"= self\._|for i in", line)]


@pytest.mark.slow
def test_a_file_does_not_grow_with_the_number_of_equal_layers() -> None:
    few, many = (emitted(Net([Layer() for _ in range(count)]), is_proven=count == 2) for count in (2, 12))
    assert few.source.count("\n") == many.source.count("\n") < 80
    (head, call), source = calls(many.source), many.source
    assert head == "for i in range(12):" and re.fullmatch(r"(\w+) = self\._layers\(self\.layers\[i\], \1\)", call)
    assert re.search(r'"""layers\.0 to 11, 12 equal modules\.\n\n +\w+: \[2, 4, 4 of 8\] S\(2\)\n +"""', source)
    assert source.count("Stored(") == 7 and '**numbered("layers", range(12), {' in source
    assert many.stored["layers.7.up.weight"] == Stored(
        "parameter", (16, WIDTH), torch.float64, many.stored["layers.0.up.weight"].type
    )


# Layers, and the numbers of calls of each method, in order; a loop is one call.
NETS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "another constant": (
        lambda: Net([Layer(0.5), Layer(0.5), Layer(0.25), Layer(0.5), Layer(0.5)]),
        ["_layers", "_layers"],
    ),
    "two kinds, in turns": (
        lambda: Net([Layer(0.5 if number % 2 else 0.25) for number in range(4)]),
        ["_layers", "_layers_1", "_layers", "_layers_1"],
    ),
    "each result is read later": (lambda: Net([Layer() for _ in range(3)], all_results=True), ["_layers"] * 3),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_only_equal_layers_are_one_method(name: str) -> None:
    make, wanted = NETS[name]
    assert re.findall(r"= self\.(_\w+)\(", emitted(make()).source) == wanted


class Shared(Net):
    """Layers that read a weight of another module and a value that is made before, and a sum outside of the layer."""

    def __init__(self, layers: int) -> None:
        shared = nn.Linear(WIDTH, WIDTH)
        super().__init__([Layer(shared=shared) for _ in range(layers)])
        self.shared = shared

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        bias = x.sin()
        for layer in self.layers:
            x = x + layer(x, bias)
        return F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.slow
def test_values_and_weights_from_outside_are_arguments() -> None:
    """The first layer needs conversions that the others do not: they move in front of it, where that is shorter."""
    source = emitted(Shared(3)).source
    assert len(calls(source)) == 3 and all("shared_weight_R" in call and "sin" in call for call in calls(source))
    assert source.count("self.shared.weight") == 1
    head, call = calls(emitted(Shared(9), is_proven=False).source)
    assert head == "for i in range(1, 9):" and "shared_weight_R" in call and "sin" in call


class Named(Net):
    """An argument and a module with the names that a loop's index and the method of the layers would have."""

    def __init__(self) -> None:
        super().__init__([Layer(), Layer()])
        self._layers = nn.Linear(WIDTH, WIDTH)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.table(i)
        for layer in self.layers:
            x = layer(x)
        return (self._layers(x) * i[..., None]).square().mean()


@pytest.mark.slow
def test_an_index_and_a_method_have_other_names_than_arguments_and_modules() -> None:
    source = emitted(Named(), argument="i").source
    assert "for i_2 in range(2):" in source and "self._layers_(self.layers[i_2], " in source, source


@pytest.mark.slow
def test_stages_of_a_pipeline_call_the_same_method() -> None:
    source = emitted(Net([Layer() for _ in range(5)]), "pp", pipeline_nmicros=2).source
    assert source.count("def _layers") == 1
    stages = re.split(r"def (?:stage_|_)", source)[1:3]
    assert all("self._layers(" in stage for stage in stages) and "range(3, 5)" in stages[1]


@pytest.mark.slow
def test_recomputed_layers_are_one_method() -> None:
    def policy(graph: Any, config: Any) -> Any:
        for number in range(3):
            graph.recompute(graph.select(module=f"layers.{number}"))
        return graph

    source = emitted(Net([Layer() for _ in range(4)]), policy).source
    assert calls(source)[0] == "for i in range(3):" and source.count("= checkpoint(") == 1
    assert "self.layers[3].up.weight" in source


@pytest.mark.slow
def test_a_loop_over_too_few_layers_is_refused() -> None:
    right = emitted(Net([Layer() for _ in range(3)]))
    wrong = right._replace(source=right.source.replace("in range(3):", "in range(2):"))
    with pytest.raises(EmittedProgramError, match=r"does not read layers\.2\.down\.bias, layers\.2\.down\.weight, "):
        verify(wrong)


class Gate(nn.Module):
    """Two linear layers of one input, without and with another reader of that input."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.table, self.down = nn.Embedding(16, WIDTH), nn.Linear(16, WIDTH)
        self.up, self.gate, self.out = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, last, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).tanh()
        return self.down(self.up(x) * self.gate(x)).square().mean() + self.out(x).sin().mean()


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 16])
def test_linear_layers_of_one_input_are_one_call(last: int) -> None:
    """The gradient of their input is one sum; a layer without a bias, or with a whole weight, keeps them apart."""

    def policy(graph: Any, config: Any) -> Any:
        graph.shard("table", weight=None)
        for name in ("up", "gate", *(["out"] if last == 16 else [])):
            graph.shard(name, weight=0)
        return graph

    source = emitted(Gate(last), policy, costs="cpu").source
    call = "linears(tanh, (self.up.weight, self.gate.weight), (self.up.bias, self.gate.bias), axis="
    assert (call in source) == (last == 3), source
