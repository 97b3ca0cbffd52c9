"""A recorded program against the module that it was recorded of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist.program.program import Program, Value, run_program
from neuronx_dist.program.record import record_program


class Function(nn.Module):
    """A function of a weight [6, 5], of buffers [6, 5] and [], and of what forward is given."""

    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64, generator=generator))
        self.register_buffer("total", torch.randn(6, 5, dtype=torch.float64, generator=generator))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Any = None) -> Any:
        return self.function(self, x)


def sample() -> torch.Tensor:
    """[6, 5]"""
    return torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_equal(module: nn.Module, arguments: dict[str, Any], training: bool = True) -> Program:
    """The program of `module` returns, differentiates and writes what the module does, twice, to the bit."""
    before = {name: x.clone() for name, x in module.state_dict().items()}
    program = record_program(module, arguments, training=training)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items()), "recording changed it"
    module, other = copy.deepcopy(module).train(training), copy.deepcopy(module)
    for step in range(2):  # what the first writes to buffers, the second reads
        results = []
        for run in (lambda: module(**arguments), lambda: run_program(program, tensors_of(program, other, arguments))):
            torch.manual_seed(step)
            results.append(run())
            leaves = [x for x in pytree.tree_leaves(results[-1]) if isinstance(x, torch.Tensor) and x.requires_grad]
            if leaves:
                weights = [torch.linspace(1, 2, x.numel(), dtype=x.dtype).reshape(x.shape) for x in leaves]
                torch.autograd.backward(leaves, weights)
        (expected, structure), (computed, other_structure) = map(pytree.tree_flatten, results)
        assert type(results[0]) is type(results[1]) and structure == other_structure
        for a, b in zip(expected, computed, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
            assert not isinstance(a, torch.Tensor) or a.requires_grad == b.requires_grad
        for (name, a), (_, b) in zip(module.named_parameters(), other.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.equal(a.grad, b.grad), name
        for (name, a), (_, b) in zip(module.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(a, b), name
    return program


def in_place_calls(program: Program) -> list[str]:
    """Names of the calls that write in place, but for copies to buffers."""
    names = [call.name for call in program.calls if not call.writes]
    return [name for name in names if name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))]


def tensors_of(program: Program, module: nn.Module, arguments: Mapping[str, Any]) -> dict[Value, torch.Tensor]:
    """The tensor of each value that no call makes: of the module, and among the arguments."""
    leaves = pytree.tree_leaves(dict(arguments))
    of_module = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {value: leaf for value, leaf in zip(program.arguments, leaves) if isinstance(value, Value)}
    tensors |= {value: of_module[value.path] for value in (*program.parameters, *program.buffers)}
    return tensors | {value: value.constant for value in program.constants if value.constant is not None}
