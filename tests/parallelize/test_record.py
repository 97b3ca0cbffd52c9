"""Recorded programs equal their modules: outputs, loss and every gradient, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist.parallelize.interpret import run_program, tensors_of
from neuronx_dist.parallelize.program import Program
from neuronx_dist.parallelize.record import record_program
from tests.support.architectures import ARCHITECTURES, Architecture

RECORDED = [each for each in ARCHITECTURES if each.name != "Mixtral"]


def differentiable(result: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]


def assert_equal(module: nn.Module, arguments: dict[str, Any], training: bool = True) -> Program:
    """The program of `module` returns, differentiates and writes what the module does."""
    program = record_program(module, arguments, training=training)
    other = copy.deepcopy(module)
    module.train(training)
    torch.manual_seed(1)
    expected = module(**arguments)
    torch.manual_seed(1)
    result = run_program(program, tensors_of(program, other, arguments))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for outputs in (expected, result):
        if losses := differentiable(outputs):
            weights = [torch.linspace(1, 2, x.numel(), dtype=x.dtype).reshape(x.shape) for x in losses]
            torch.autograd.backward(losses, weights)
    for (name, a), (_, b) in zip(module.named_parameters(), other.named_parameters()):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(module.named_buffers(), other.named_buffers()):
        assert torch.equal(a, b), name
    return program


@pytest.mark.parametrize("architecture", RECORDED, ids=lambda each: each.name)
def test_program_equals_module(architecture: Architecture) -> None:
    assert_equal(architecture.make(2), architecture.inputs())
