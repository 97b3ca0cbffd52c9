"""Functions of torch.jit have the types and values of their Python functions; compiled modules are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import spmd

MESH = {"tp": 2}


@torch.jit.script
def looping(x: torch.Tensor, n: int, flag: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    y = x
    for _ in range(n):
        y = y * 0.5 + torch.relu(x)[:, 1:].sum(dim=-1, keepdim=True)
    if flag and x.dim() == 2:
        y = F.dropout(y, 0.1, False)
    return torch.cat(y.chunk(2, 0)).view(x.shape[0], -1), F.layer_norm(y, [y.shape[-1]])


@torch.jit.script
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def typed(kind, *shape):
    return spmd.assert_type(torch.randn(*shape), {"tp": kind})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: looping(x, 3),
        lambda x: looping(x, 0, False),
        torch.jit.trace(lambda x: (x * 2).view(x.shape[0], -1).sum(0), torch.zeros(2, 4)),
    ],
    ids=["loop", "branch", "traced"],
)
def test_values_and_types_are_those_of_plain_code(function):
    x = typed(spmd.R, 4, 4)
    expected = function(x.clone())
    with spmd.SpmdTypeMode(MESH) as mode:
        result = function(x)
        assert mode.operators > 2
    for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (result, expected))):
        assert torch.equal(one, other)
        assert spmd.get_local_type(one)["tp"] in (spmd.R, spmd.I)


def test_a_shard_stays_one_and_a_contraction_over_it_is_partial():
    x, weight = typed(spmd.S(1), 3, 4), typed(spmd.S(1), 2, 4)
    with spmd.SpmdTypeMode(MESH):
        y = product(x, weight)
        assert spmd.get_local_type(y) == {"tp": spmd.P}
        with pytest.raises(spmd.SpmdTypeError, match="not linear"):
            looping(y, 1)


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(1, 4))])
def test_a_compiled_module_is_refused_by_name(compiled):
    module, x = compiled(nn.Linear(4, 2)), typed(spmd.R, 4, 4)
    expected = module(x)
    with spmd.SpmdTypeMode(MESH):
        with pytest.raises(spmd.SpmdTypeError, match="Linear at .*test_scripted.py:[0-9]* was compiled by") as caught:
            module(x)
        assert caught.value.repairs[0].startswith("call Linear as it was before torch.jit")
        with spmd.no_typecheck():  # the other repair
            y = module(x)
        assert spmd.get_local_type(spmd.assert_type(y, {"tp": spmd.R}) * 2) == {"tp": spmd.R}
    assert torch.equal(y, expected)


def test_nothing_is_left_changed():
    before = torch._C.ScriptFunction.__call__
    with spmd.SpmdTypeMode(MESH):
        assert torch._C.ScriptFunction.__call__ is not before
    x, weight = torch.ones(2, 3), torch.ones(1, 3)
    assert torch.equal(product(x, weight), torch.full((2, 1), 3.0))
