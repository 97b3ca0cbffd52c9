"""Functions along a sharded dim whose shards move to another one: Fourier transforms, matrices of a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor, fallback, report
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs

_fft = torch.fft
ONE = [_fft.fft, _fft.ifft, _fft.rfft, _fft.irfft, _fft.hfft, _fft.ihfft]
MANY = [_fft.fft2, _fft.ifft2, _fft.rfft2, _fft.irfft2, _fft.fftn, _fft.ifftn, _fft.rfftn, _fft.irfftn]
OPTIONS = [dict(), dict(norm="ortho"), dict(norm="forward")]


def whole(shape, function) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    is_complex = function in (_fft.irfft, _fft.irfft2, _fft.irfftn, _fft.hfft, _fft.ifft, _fft.fftn)
    return torch.complex(x, x.flip(0)) if is_complex else x


def real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def equals_one_process(mesh, function, shape, placements, sizes=None, mode="error", **options):
    """Compares values and gradients, and returns the collectives of the forward pass and the result."""
    x = whole(shape, function).requires_grad_()
    leaf = distribute_tensor(x.detach().clone().requires_grad_(), mesh, placements, sizes=sizes, src=None)
    with fallback(mode), comm.record() as calls:
        y = function(leaf, **options)
    expected = function(x, **options)
    what = f"{function.__name__} {shape} {placements} {options}"
    assert_close(real(y.full_tensor()), real(expected), what)
    weight = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weight).abs().square().sum().backward()
    with fallback(mode):
        (y * weight).abs().square().sum().backward()
    assert_close(real(leaf.grad.full_tensor()), real(x.grad), f"{what}, gradient")
    return verbs(calls), y


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("function", ONE + MANY, ids=lambda f: f.__name__)
@pytest.mark.slow
def test_any_sharded_dim(function, mesh_shape) -> None:
    def rank(mesh):
        for dim in range(3):
            placements = [Shard(dim), *[Replicate()] * (mesh.ndim - 1)]
            for options in OPTIONS[: 1 if dim else None]:
                equals_one_process(mesh, function, (4, 6, 5), placements, **options)
        uneven = [(1, 5) if mesh.shape[0] == 2 else (0, 2, 4), *[None] * (mesh.ndim - 1)]
        equals_one_process(mesh, function, (4, 6, 5), [Shard(1), *[Replicate()] * (mesh.ndim - 1)], uneven)
        if mesh.ndim == 2:  # the domain of a field of two dims, and a field without another dim
            equals_one_process(mesh, function, (4, 3, 6, 5), [Shard(2), Shard(3)])
            equals_one_process(mesh, function, (4, 6), [Shard(0), Shard(1)], mode="gather")

    on_ranks(torch.Size(mesh_shape).numel(), rank, mesh_shape)


def test_sizes_and_dims_are_those_of_torch() -> None:
    def rank(mesh):
        for function, options in (
            (_fft.fftn, dict(s=(3, 8))),
            (_fft.rfftn, dict(s=(-1, 4), dim=(2, 1))),
            (_fft.irfftn, dict(s=(7,), dim=(1,))),
            (_fft.irfft2, dict(s=(6, 8), dim=(0, 1))),
            (_fft.fft2, dict(dim=(1, 0))),
        ):
            equals_one_process(mesh, function, (4, 6, 5), [Shard(1)], **options)
        x = distribute_tensor(whole((4, 6), _fft.fft), mesh, [Shard(1)], src=None)
        with pytest.raises(RuntimeError, match="dims must be unique"):
            _fft.fftn(x, dim=(0, 0))

    on_ranks(2, rank)


def test_a_field_is_exchanged_once_and_not_gathered() -> None:
    """Pencils: rows are sharded, columns are transformed, their shards are exchanged for those of rows."""

    def rank(mesh):
        with report() as found:
            calls, y = equals_one_process(mesh, _fft.rfft2, (2, 4, 8, 6), [Shard(2)])
        assert calls == ["all_to_all"] and y.placements == (Shard(3),) and found.gathers == []

    on_ranks(4, rank)


def solved(x: torch.Tensor) -> torch.Tensor:
    square = x @ x.transpose(-1, -2) + 3 * torch.eye(x.shape[-2], dtype=x.dtype)
    return torch.linalg.solve(square, x)


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.det, torch.linalg.eigvalsh, torch.linalg.cholesky])
def test_matrices_of_a_batch(function) -> None:
    def call(x):
        return function(x @ x.transpose(-1, -2) + 3 * torch.eye(4, dtype=torch.float64))

    def rank(mesh):
        for dim in (0, 1):
            equals_one_process(mesh, call, (6, 4, 5), [Shard(dim)])

    on_ranks(2, rank)


def test_padding_of_few_modes_to_a_field_is_shared_by_all_ranks() -> None:
    """A layer of a Fourier neural operator: else the rank with the modes would hold the whole field."""

    def low(x: torch.Tensor) -> torch.Tensor:
        return _fft.rfft2(x)[:, :, :3, :2]

    def padded(x: torch.Tensor) -> torch.Tensor:
        return F.pad(low(x), (0, 3, 0, 7))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return _fft.irfft2(padded(x), s=x.shape[2:]) + x

    def rank(mesh):
        for sizes in (None, [(1, 0, 7, 2)]):
            x = distribute_tensor(whole((2, 1, 10, 8), _fft.rfft2), mesh, [Shard(2)], sizes=sizes, src=None)
            with report() as found:
                y = padded(x)
            assert (y.placements, y._spec.sizes) == ((Shard(3),), ((2, 2, 1, 0),)) and found.gathers == []
            equals_one_process(mesh, padded, (2, 1, 10, 8), [Shard(2)], sizes)
            _, y = equals_one_process(mesh, layer, (2, 1, 10, 8), [Shard(2)], sizes)
            assert y.placements == (Shard(2),)

    on_ranks(4, rank)


def test_uneven_shards_of_other_dims_stay() -> None:
    def rank(mesh):
        sizes = [(1, 3), (2, 4)]
        calls, y = equals_one_process(mesh, _fft.fft2, (4, 5, 6, 8), [Shard(0), Shard(2)], sizes)
        assert y._spec.sizes[0] == (1, 3) and len(calls) == 1

    on_ranks(4, rank, (2, 2))
