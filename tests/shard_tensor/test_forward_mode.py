"""Forward-mode AD of ShardTensors: tangents of one process, or an error that names the cause; never another tangent."""

from __future__ import annotations

import re

import pytest
import torch
from torch.autograd import forward_ad

from neuronx_dist.comm import CommError
from neuronx_dist.shard_tensor import Shard, ShardTensor, distribute_tensor, fallback
from tests.shard_tensor.support.cases import assert_close, distributed, layouts, on_ranks, operands, tensors
from tests.shard_tensor.support.table import CASES

LEFT_OUT = ("logcumsumexp",)  # torch's tangent is no number
REFUSALS = (
    "has a tangent|implement the jvp function|does not support it because it (is an out= function|has not been impl)"
)


def dual(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(x, tangent)


def tangent_of(x: torch.Tensor) -> torch.Tensor:
    found = forward_ad.unpack_dual(x).tangent
    return torch.zeros_like(forward_ad.unpack_dual(x).primal) if found is None else found


def check(case) -> list[str]:
    """Compares tangents in some layouts on two ranks; returns "" or the refusal of each. The level is the process's."""
    plain = [x.detach() for x in operands(case)]
    tangents = [x.cos() for x in plain]
    try:
        expected = [tangent_of(y).detach() for y in tensors(case.function(*map(dual, plain, tangents)))]
    except (NotImplementedError, RuntimeError):
        return ["torch has none"]
    outcomes = []
    for layout in layouts(case, (2,), 1):

        def rank(mesh, layout=layout):
            given = [
                dual(x.clone(), t.clone())
                if i in case.plain
                else dual(distributed(x, mesh, d, layout.split), distributed(t, mesh, d, layout.split))
                for i, (x, t, d) in enumerate(zip(plain, tangents, layout.placements))
            ]
            try:
                with fallback("gather"):
                    results = [
                        x.full_tensor() if isinstance(x, ShardTensor) else x for x in tensors(case.function(*given))
                    ]
            except (CommError, NotImplementedError) as error:
                return str(error)
            except ValueError as error:
                assert case.refusals and case.refusals in str(error), error
                return "torch has none"
            for actual, wanted in zip(results, expected, strict=True):
                assert_close(tangent_of(actual), wanted, f"tangent of {case} {layout}", 1e-9)
            return ""

        outcomes += on_ranks(2, rank)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.full) for turn in (1, 2, 3))])
def test_tangents_are_exact_or_refused(turn):
    cases = [case for case in CASES if case.gradients and case.name not in LEFT_OUT]
    with forward_ad.dual_level():
        outcomes = [outcome for case in cases[turn::8] for outcome in check(case)]
    assert outcomes.count("") > len(outcomes) / 4
    for outcome in outcomes:
        if outcome not in ("", "torch has none"):
            assert re.search(REFUSALS, outcome), outcome


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (0, 8)])
def test_a_softmax_over_shards(sizes):
    x = torch.arange(24, dtype=torch.float64).view(8, 3).sin()

    def rank(mesh):
        y, t = (distribute_tensor(z, mesh, [Shard(0)], sizes=[sizes], src=None) for z in (x, x.cos()))
        for function in (torch.softmax, torch.log_softmax, torch.logsumexp, torch.sum, torch.mean):
            z = function(dual(y, t), 0)
            expected = tangent_of(function(dual(x, x.cos()), 0))
            tangent = tangent_of(z)
            assert_close(
                tangent.to_local(), expected if z.dim() == 1 else expected.split(sizes)[mesh.get_rank()], function
            )

    with forward_ad.dual_level():
        on_ranks(2, rank)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (0, 8)])
def test_halos_and_transposes_with_a_tangent_on_one_rank_alone(sizes):
    """An empty shard's result may have no tangent, and a plain operand has none anywhere."""
    x = torch.arange(48, dtype=torch.float64).view(1, 2, 8, 3).sin()
    weight = torch.arange(36, dtype=torch.float64).view(2, 2, 3, 3).cos()

    def function(y):
        z = torch.nn.functional.conv2d(y, weight, padding=1)
        return torch.fft.fft(torch.cat([z, z.flip(2)], 2), dim=2).abs().topk(2, 1).values.diff(dim=2)

    def rank(mesh):
        expected = tangent_of(function(dual(x, x.cos())))
        y, t = (distribute_tensor(z, mesh, [Shard(2)], sizes=[sizes], src=None) for z in (x, x.cos()))
        with fallback("error"):
            z = function(dual(y, t) if sizes[mesh.get_rank()] else y)
            assert_close(tangent_of(z.full_tensor()), expected, "tangent")

    with forward_ad.dual_level():
        on_ranks(2, rank)
