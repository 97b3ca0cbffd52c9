"""Names of the original that an emitted file, or a parallel module, has for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, parallelize
from tests.parallelize.support.models import WIDTH

X = torch.rand(8, WIDTH, dtype=torch.float64)


class Names(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 2 * WIDTH), head
        self.add_module(head, nn.Linear(2 * WIDTH, WIDTH))
        inner = nn.Module()
        inner.register_parameter(head, nn.Parameter(torch.rand(2 * WIDTH)))
        inner.register_buffer("mask" if head == "_index" else "_index", torch.ones(2 * WIDTH))
        self.inner = inner

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x)) * self.inner._parameters[self.head]
        return self._modules[self.head](y * next(self.inner.buffers()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x)


class Tensors(Names):
    def forward(self, I: torch.Tensor, F: torch.Tensor, S: Any = None, checkpoint: int = 2) -> torch.Tensor:  # noqa: E741
        for letter in S["P"] if S else ():
            I = I + letter  # noqa: E741
        return self.hidden(I) * F * checkpoint


class Modules(Names):
    def forward(self, torch: Any, spmd: torch.Tensor, R: Any, composites: Any, Stored: Any) -> Any:
        return {"P": self.hidden(torch + spmd + R), "I": composites + Stored}


class P(Names):
    """A class whose name an emitted file has for a type."""


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("device", X)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self._buffers["device"]


def check(module: nn.Module, arguments: dict[str, Any], tmp_path: Path, *positional: Any) -> None:
    """Results, gradients and names of a state dict on two ranks, and called by position."""
    module.double()
    expected = module(**arguments)
    first = expected["P"] if isinstance(expected, dict) else expected
    first.square().sum().backward()
    gradient = module.up.weight.grad.chunk(2)  # type: ignore[union-attr, operator]

    def rank() -> Any:
        parallel: Any = parallelize(module, arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path)
        result = parallel(**arguments)
        (result["P"] if isinstance(result, dict) else result).square().sum().backward()
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parallel(*arguments.values()), expected, rtol=1e-12, atol=1e-12)
        assert list(parallel.state_dict()) == list(module.state_dict())
        parallel.load_state_dict(parallel.state_dict())
        assert parallel.device == torch.device("cpu")
        return parallel.up.weight.grad

    found = threads.run(Mesh(2, tp=2), rank)
    torch.testing.assert_close(torch.stack(found), torch.stack(gradient), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "head",
    ["run", "device", "train_step", "STORED", "stage_0", "train_forward", "_index", "compute_config", "initialised"],
)
def test_submodules_and_parameters_by_the_names_of_attributes(head: str, tmp_path: Path) -> None:
    check(Names(head), {"x": X}, tmp_path)


def test_tensors_by_the_names_of_types(tmp_path: Path) -> None:
    check(Tensors("head_"), {"I": X, "F": X[0], "S": {"P": (X, X)}}, tmp_path)


def test_tensors_by_the_names_of_modules(tmp_path: Path) -> None:
    arguments = {"torch": X, "spmd": X[0], "R": X, "composites": X, "Stored": X}
    check(Modules("head_"), arguments, tmp_path)


def test_a_class_by_the_name_of_a_type(tmp_path: Path) -> None:
    check(P("head_"), {"x": X}, tmp_path)


def test_a_buffer_without_a_value_by_the_name_of_an_attribute(tmp_path: Path) -> None:
    module = Adding()
    options: dict[str, Any] = {"gen_savedir": tmp_path, "init_module_params": False}
    parallel: Any = parallelize(module, {"x": X}, "dp", ComputeConfig(1, 1), **options)
    with pytest.raises(RuntimeError, match="buffer 'device' has no value"):
        parallel(x=X)
    parallel.load_state_dict(module.state_dict())
    torch.testing.assert_close(parallel(x=X), X + X)
