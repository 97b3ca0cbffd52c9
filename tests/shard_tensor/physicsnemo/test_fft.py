"""Fourier transforms of shards: torch's own of the whole, with gradients, for each norm."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DistributedManager
from neuronx_dist.shard_tensor.physicsnemo.fft import DistributedIRFFT2, DistributedRFFT2
from neuronx_dist.shard_tensor.physicsnemo.primitives import compute_split_shapes
from tests.shard_tensor.support.cases import assert_close as assert_real
from tests.shard_tensor.support.cases import on_ranks

F64 = torch.float64


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype
    parts = (torch.view_as_real(x) if x.is_complex() else x for x in (actual, expected))
    assert_real(*parts, what)


def spatial(count: int) -> int:
    DistributedManager.initialize()
    DistributedManager.create_process_subgroup("spatial_parallel", count)
    return DistributedManager().group_rank("spatial_parallel")


@pytest.mark.parametrize("norm", ["ortho", "backward", "forward"])
@pytest.mark.parametrize("s", [None, (None, None), (9, 6), (5, 14)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rfft2(count, s, norm):
    """12 columns in equal shards become rows, of any number."""
    x = torch.randn(2, 7, 12, dtype=F64, requires_grad=True)
    expected = torch.fft.fft(x, n=(s or (None, None))[0], dim=-2, norm=norm)
    expected = torch.fft.fft(expected, n=(s or (None, None))[1], dim=-1, norm=norm)
    expected = expected[..., : expected.shape[-1] // 2 + 1]
    if s is None:
        assert_close(expected.detach(), torch.fft.rfft2(x.detach(), norm=norm), "torch's own")
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad((expected * weight.conj()).real.sum(), x)
    rows = compute_split_shapes(expected.shape[-2], count)

    def run(mesh):
        rank = spatial(count)
        own = x.detach().chunk(count, -1)[rank].clone().requires_grad_()
        with comm.record() as calls:
            y = DistributedRFFT2.apply(own, s, (-2, -1), norm)
        assert len(calls) == (count > 1)
        assert_close(y.detach(), expected.detach().split(rows, -2)[rank], "spectrum")
        (own_grad,) = torch.autograd.grad((y * weight.split(rows, -2)[rank].conj()).real.sum(), own)
        assert_close(own_grad, grad.chunk(count, -1)[rank], "gradient")

    on_ranks(count, run)


@pytest.mark.parametrize("norm", ["ortho", "backward", "forward"])
@pytest.mark.parametrize("s", [None, (6, 9), (12, 10), (12, 8), (12, 13)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_irfft2(count, s, norm):
    """6 rows in equal shards become columns, of any number; the spectrum is that of no real tensor."""
    x = torch.randn(2, 6, 6, dtype=torch.complex128, requires_grad=True)
    h, w = s or (None, None)
    expected = torch.fft.irfft(torch.fft.ifft(x, n=h, dim=1, norm=norm), n=w, dim=2, norm=norm)
    weight = torch.randn_like(expected)
    (grad,) = torch.autograd.grad((expected * weight).sum(), x)
    columns = compute_split_shapes(expected.shape[2], count)

    def run(mesh):
        rank = spatial(count)
        own = x.detach().chunk(count, 1)[rank].clone().requires_grad_()
        with comm.record() as calls:
            y = DistributedIRFFT2.apply(own, s, (1, 2), norm)
        assert len(calls) == (count > 1)
        assert_close(y.detach(), expected.detach().split(columns, 2)[rank], "field")
        (own_grad,) = torch.autograd.grad((y * weight.split(columns, 2)[rank]).sum(), own)
        assert_close(own_grad, grad.chunk(count, 1)[rank], "gradient")

    on_ranks(count, run)
