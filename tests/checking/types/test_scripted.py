"""Graphs of torch.jit, run node by node: the values that TorchScript gives, and the types of plain code."""

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
    a, b = y.chunk(2, 0)
    y += 1
    return torch.cat([a, b]).view(x.shape[0], -1), F.layer_norm(y, [y.shape[-1]])


@torch.jit.script
def casting(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.size(0), dtype=torch.int64) == 0
    y = x.to(torch.float32).clamp(min=0.1, max=2.0).masked_fill(~mask[:, None], 0.0)
    return torch.add(y, x.float(), alpha=2).transpose(0, 1).contiguous()


@torch.jit.script
def placing(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 1e9).any()) or int(x.sum() * 0) + float(x.max() * 0) > 0:
        return x
    y = torch.ones(x.size(0), dtype=torch.float32, layout=torch.strided, pin_memory=False)
    z = x.to(torch.float64, non_blocking=True, copy=True)
    z += y.sum()
    w = torch.ones_like(x, memory_format=torch.contiguous_format).copy_(x, non_blocking=True)
    return z.float() + w.contiguous(memory_format=torch.contiguous_format) + x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x)).softmax(-1)


def typed(kind, *shape):
    return spmd.assert_type(torch.randn(*shape), {"tp": kind})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: looping(x, 3),
        lambda x: looping(x, 0, False),
        casting,
        placing,
        torch.jit.script(Block()),
        torch.jit.trace(Block(), torch.zeros(2, 4)),
        torch.jit.trace(lambda x: (x * 2).view(x.shape[0], -1).sum(0), torch.zeros(2, 4)),
    ],
    ids=["loop", "branch", "casts", "options of memory", "module", "traced module", "traced"],
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
    product = torch.jit.script(plain_product)
    x, weight = typed(spmd.S(1), 3, 4), typed(spmd.S(1), 2, 4)
    with spmd.SpmdTypeMode(MESH):
        y = product(x, weight)
        assert spmd.get_local_type(y) == {"tp": spmd.P}
        with pytest.raises(spmd.SpmdTypeError, match="not linear"):
            looping(y, 1)


def plain_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


@torch.jit.script
def counting(x: torch.Tensor) -> torch.Tensor:
    table = {"scale": 2.0}
    return x * table["scale"]


def test_a_graph_that_cannot_be_followed_is_judged_as_a_function_without_a_rule():
    whole, shard, partial = typed(spmd.R, 4), typed(spmd.S(0), 4), typed(spmd.P, 4)
    with spmd.SpmdTypeMode(MESH) as mode:
        assert spmd.get_local_type(counting(whole)) == {"tp": spmd.R}
        assert spmd.get_local_type(counting(shard)) == {"tp": spmd.V}
        assert any("counting" in text and line.startswith(__file__) for text, line in mode.assumed)
        with pytest.raises(spmd.SpmdTypeError, match="counting is linear"):
            counting(partial)


def test_nothing_is_left_changed():
    before = torch._C.ScriptFunction.__call__
    with spmd.SpmdTypeMode(MESH):
        assert torch._C.ScriptFunction.__call__ is not before
    assert torch.equal(casting(torch.ones(2, 2)), torch.full((2, 2), 3.0))
