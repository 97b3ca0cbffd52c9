"""An operator that is registered once, in any of three ways, is known to checker, ShardTensor and `parallelize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallelize import ComputeConfig, parallelize, register_op
from neuronx_dist.rules import RULES, Spec
from neuronx_dist.rules.spec import HANDLERS, contraction
from neuronx_dist.shard_tensor import Replicate, Shard, ShardTensor, distribute_tensor, fallback, sharded
from neuronx_dist.spmd import I, P, R, S
from tests.parallelize.support.calls import by_name, call_of, parameter
from tests.shard_tensor.support.cases import on_ranks

WAYS = ["by_rule", "by_annotation", "by_handler"]


def by_rule(x: Tensor, w: Tensor) -> Tensor:
    if has_torch_function((x, w)):
        return handle_torch_function(by_rule, (x, w), x, w)
    return 2 * (x @ w.t())


def by_handler(x: Tensor, w: Tensor) -> Tensor:
    if has_torch_function((x, w)):
        return handle_torch_function(by_handler, (x, w), x, w)
    return 2 * (x @ w.t())


def by_annotation(x: Tensor, w: Tensor) -> Tensor:
    return 2 * (x @ w.t())


def product(x: Tensor, w: Tensor) -> Spec:
    return contraction("mk,nk->mn", x.shape, w.shape)


def rows(func: Any, types: Any, args: Any, kwargs: Any) -> ShardTensor:
    """The handler: rows of `x` are sharded, and every rank has `w`."""
    x, w = args
    y = func(x.to_local(), w.to_local())
    return ShardTensor.from_local(y, x.device_mesh, x.placements, sharding_shapes={0: [(1, 5), (3, 5)]})


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    global by_annotation
    rules, handlers, original = dict(RULES), dict(HANDLERS), by_annotation
    linear = ((0,), (1,))
    spmd.register_rule(by_rule, linear=linear)(product)
    sharded(by_handler, spec=product, linear=linear)(rows)
    register_op("m k+, n k+ -> m n")(by_annotation)
    yield
    by_annotation = original
    for table, before in ((RULES, rules), (HANDLERS, handlers)):
        for function in table.keys() - before.keys():
            del table[function]


@pytest.mark.parametrize("way", WAYS)
def test_the_checker_knows_it(way: str) -> None:
    function = globals()[way]
    with nxd.comm.as_rank(nxd.Mesh(2, tp=2), 0), spmd.typecheck():
        x, w = (spmd.assert_type(torch.randn(2, 4), {"tp": type_}) for type_ in (S(0), R))
        assert spmd.get_local_type(function(x, w))["tp"] == S(0)
        x, w = (spmd.assert_type(torch.randn(2, 4), {"tp": S(1)}) for _ in range(2))
        y = function(x, w)
        assert spmd.get_local_type(y)["tp"] == P
        assert spmd.get_local_type(function(y, spmd.assert_type(torch.ones(3, 2), {"tp": R})))["tp"] == P, "linear"


@pytest.mark.parametrize("way", WAYS)
def test_shard_tensor_knows_it(way: str) -> None:
    full, weight = torch.randn(4, 3), torch.randn(5, 3)

    def program(mesh: Any) -> bool:
        x = distribute_tensor(full, mesh, [Shard(0)], sizes=[(1, 3)], src=None)
        w = distribute_tensor(weight, mesh, [Replicate()], src=None)
        with fallback("error"), comm.record() as calls:
            y = globals()[way](x, w)
        assert list(calls) == [] and y.placements == (Shard(0),)
        return torch.allclose(y.full_tensor(), 2 * full @ weight.t())

    assert on_ranks(2, program) == [True, True]


@pytest.mark.parametrize("way", WAYS)
def test_parallelize_knows_it(way: str) -> None:
    strategies = by_name(call_of(globals()[way], parameter(4, 6), parameter(8, 6)))
    assert strategies["S(0) of operand 0"] == ((S(0), R), (S(0),))
    assert strategies["S(1) of operand 0"] == ((S(1), S(1)), (P,))
    assert strategies["P of 0"] == ((P, R), (P,)) and strategies["I"] == ((I, I), (I,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for function, weight in zip((by_rule, by_annotation, by_handler), self.weights):
            x = function(x, weight).relu()
        return x.sum()


@pytest.mark.slow
def test_a_program_of_all_three_is_divided(tmp_path: Any) -> None:
    module, x = Net().double(), torch.randn(4, 8).double()
    config = ComputeConfig(2, 2)

    def program() -> float:
        return float(parallelize(module, {"x": x}, "tp", config, gen_savedir=tmp_path)(x).detach())

    torch.testing.assert_close(
        comm.threads.run(config.mesh(), program), [float(module(x).detach())] * 2, rtol=1e-10, atol=0
    )
    text = next(tmp_path.rglob("gencode0.py")).read_text()
    assert all(f"import {way} as {way}_2" in text for way in WAYS)
    assert "# [4, 4 of 8] S(1)" in text, "columns of one product are divided"


def test_a_plan_of_an_earlier_rule_is_not_used() -> None:
    def program(mesh: Any) -> list[Any]:
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], sizes=[(1, 3)], src=None)
        before = by_rule(x, torch.ones(4, 3)).placements
        comm.barrier()
        spmd.register_rule(by_rule)(lambda x, w: product(x, w)._replace(fixed={0: "rows mix"}))
        with fallback("gather"):
            return [before, by_rule(x, torch.ones(4, 3)).placements]

    assert on_ranks(2, program) == [[(Shard(0),), (Replicate(),)]] * 2
