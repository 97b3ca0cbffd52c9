"""Products that other packages ask for: opt_einsum takes the functions of the package of an operand's class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from neuronx_dist.shard_tensor import Shard, ShardTensor, distribute_tensor, fallback
from neuronx_dist.shard_tensor.ops import matmul
from tests.shard_tensor.support.cases import assert_close, on_ranks


def test_opt_einsum_knows_torch_s_functions_for_the_package():
    functions: dict[tuple[str, str], str] = {}
    names = ("einsum", "tensordot", "transpose")
    of_torch, dispatch = SimpleNamespace(**{name: name for name in names}), SimpleNamespace(_cached_funcs=functions)
    matmul.known_to_opt_einsum(SimpleNamespace(backends=SimpleNamespace(dispatch=dispatch, torch=of_torch)))
    assert functions == {(name, ShardTensor.__module__.split(".")[0]): name for name in names}


def test_a_contraction_by_opt_einsum():
    opt_einsum = pytest.importorskip("opt_einsum")
    operands = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (4, 3), (3, 2))]
    expected = torch.einsum("ij,jk,kl->il", *operands)

    def run(mesh):
        x, *others = operands
        x = distribute_tensor(x.clone().requires_grad_(), mesh, [Shard(0)], src=None)
        with fallback("error"):
            y = opt_einsum.contract("ij,jk,kl->il", x, *others)
        assert y.placements == (Shard(0),)
        assert_close(y.full_tensor().detach(), expected, "values")

    on_ranks(2, run)
