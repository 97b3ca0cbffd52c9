"""Under torch.autocast: dtypes and values of plain tensors under autocast, in both passes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.shard_tensor import Replicate, Shard, ShardTensor, distribute_module, distribute_tensor, fallback
from tests.shard_tensor.support import table
from tests.shard_tensor.support.cases import Case, on_ranks, operands, tensors

WINDOWS = [
    Case("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 3, 16), (4, 3, 3), (4,)], whole=((1, 2),)),
    # torch 2.13's own bfloat16 convolution of stride 2 is wrong on CPUs where an output has one column.
    Case("conv2d", lambda x, w: F.conv2d(x, w, stride=2), [(2, 3, 16, 9), (4, 3, 3, 3)], whole=((1, 2), (1, 3))),
    Case("conv_transpose1d", F.conv_transpose1d, [(2, 3, 16), (3, 4, 3), (4,)], whole=((1, 2),)),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1), [(2, 3, 16, 5)]),
    Case("max_pool1d", lambda x: F.max_pool1d(x, 2), [(2, 3, 16)]),
    Case("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(1, 2, 16, 4)]),
]
FAMILIES = {
    "windows": WINDOWS,
    **{
        name.lower(): getattr(table, name)
        for name in ("POINTWISE", "MATMUL", "REDUCE", "NORMALISE", "SOFTMAX", "LOSSES", "ATTENTION")
    },
}
# Single precision has as many digits for both; what bfloat16 rounds off depends on the order of sums.
TOLERANCE = 2e-2
NO_DIGITS = {"layer_norm at mean 1e4", "group_norm at mean 1e4", "instance_norm at mean 1e4", "batch_norm at mean 1e4"}


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def near(actual, expected):
    if not expected.is_floating_point():
        return True  # positions and comparisons may fall the other way
    difference = torch.where(expected.isfinite(), actual - expected, torch.zeros_like(expected)).float().norm()
    return bool(difference <= TOLERANCE * max(1.0, float(torch.nan_to_num(expected, 0, 0, 0).float().norm())))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_and_values(family, dtype):
    expected = []
    with warnings.catch_warnings(), autocast():
        warnings.simplefilter("ignore")
        for case in FAMILIES[family]:
            given = [x.detach().to(dtype) for x in operands(case)]
            expected.append((case, given, tensors(case.function(*given))))

    def step(mesh):
        wrong, checked = [], 0
        for case, plain, wholes in expected:
            for index, dim in [(i, d) for i, shape in enumerate(case.shapes) for d in range(len(shape))]:
                if index in case.plain or (index, dim) in case.whole:
                    continue
                given = [
                    x
                    if i in case.plain
                    else distribute_tensor(x, mesh, [Shard(dim) if i == index else Replicate()], src=None)
                    for i, x in enumerate(plain)
                ]
                try:
                    with autocast(), fallback("gather" if case.gathers else "error"):
                        results = tensors(case.function(*given))
                except ValueError:
                    assert case.refusals
                    continue
                checked += 1
                for actual, whole in zip(results, wholes, strict=True):
                    full = actual.full_tensor()
                    if actual.dtype != whole.dtype or actual.to_local().dtype != whole.dtype:
                        wrong.append(f"{case} {index} {dim}: {actual.dtype} for {whole.dtype}")
                    elif case.name not in NO_DIGITS and not near(full, whole):
                        wrong.append(f"{case} {index} {dim}: {full} for {whole}")
        return wrong, checked

    for wrong, checked in on_ranks(2, step):
        assert wrong == [] and checked > 5


def model():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 3, 2), nn.GroupNorm(2, 4)]
    return nn.Sequential(*layers, nn.Flatten(2), nn.Linear(9, 6), nn.LayerNorm(6), nn.Linear(6, 5))


def test_a_training_step():
    torch.manual_seed(0)
    plain, x, targets = model(), torch.randn(2, 3, 7, 8), torch.tensor([[0, 4, 2, 1], [3, 3, 1, 0]])

    def loss_of(module, x):
        with autocast():
            y = module[:5](x)
            if isinstance(y, ShardTensor):
                y = y.redistribute()
            y = module[5:](y)
            assert y.dtype == torch.bfloat16
            return F.cross_entropy(y.transpose(1, 2), targets)

    exact = model()
    exact.load_state_dict(plain.state_dict())
    F.cross_entropy(exact(x).transpose(1, 2), targets).backward()
    expected = loss_of(plain, x)
    expected.backward()

    def step(mesh):
        module = model()
        module.load_state_dict(exact.state_dict())
        distribute_module(module, mesh)
        loss = loss_of(module, distribute_tensor(x, mesh, [Shard(2)], src=None))
        assert loss.dtype == expected.dtype == torch.float32
        assert abs(loss.item() - expected.item()) < TOLERANCE
        loss.backward()
        for (name, actual), one, true in zip(
            module.named_parameters(), plain.parameters(), exact.parameters(), strict=True
        ):
            assert actual.grad.dtype == one.grad.dtype == torch.float32, name
            off = float((actual.grad.full_tensor() - true.grad).norm())
            assert off <= 2 * float((one.grad - true.grad).norm()) + 1e-3, (name, off)

    on_ranks(2, step)
