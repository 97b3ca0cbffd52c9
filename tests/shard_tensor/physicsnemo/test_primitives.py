"""Pieces of any sizes: values and gradients of one process, in float64; sums of 16-bit gradients in fp32."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DistributedManager
from neuronx_dist.shard_tensor.physicsnemo import primitives as p
from tests.shard_tensor.support.cases import assert_close, on_ranks

SIZES = [(3, 4), (2, 0, 5), (1, 3, 0, 2), (4,)]
F64 = torch.float64


def whole(sizes, dim: int, seed: int = 0) -> torch.Tensor:
    shape = [3, 2]
    shape[dim] = sum(sizes)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pieces(sizes, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return whole(sizes, dim, seed).split(sizes, dim)


def gradients(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares gradients of a weighted sum of squares, and of their sum: second derivatives communicate too."""
    (first,) = torch.autograd.grad((result.square() * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.detach(), second


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_all_gather_v(sizes, dim):
    """Rank r weighs what it has by (r + 1): the gradient is the sum of these."""

    def run(mesh):
        rank = mesh.get_rank()
        x = pieces(sizes, dim)[rank].clone().requires_grad_()
        y = p.all_gather_v(x, sizes, dim)
        assert_close(y.detach(), whole(sizes, dim), "gathered")
        total = sum(range(1, len(sizes) + 1))
        first, second = gradients(y, x, torch.tensor(rank + 1.0))
        assert_close(first, 2 * total * x.detach(), "gradient")
        assert_close(second, torch.full_like(x, 2 * total), "second gradient")
        shapes = [piece.shape for piece in pieces(sizes, dim)]
        assert_close(p.all_gather_v_wrapper(x.detach(), shapes, dim), whole(sizes, dim), "by shapes")
        assert_close(p.all_gather_v_wrapper(x.detach(), sizes, dim, mesh.communicator()), whole(sizes, dim), "group")
        summed = p.all_gather_v_bwd_wrapper(whole(sizes, dim) * (rank + 1), sizes, dim)
        assert_close(summed, total * x.detach(), "sum of pieces")

    on_ranks(len(sizes), run)


def test_pieces_of_one_shape_need_no_sizes():
    def run(mesh):
        x = torch.full((2, 1), float(mesh.get_rank()))
        return p.all_gather_v_wrapper(x, dim=1).tolist()

    assert on_ranks(3, run) == [[[0.0, 1.0, 2.0]] * 2] * 3


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_gather_v_and_scatter_v(sizes, dim):
    root = len(sizes) - 1
    weight = torch.arange(1.0, 1 + sum(sizes), dtype=F64)
    weight = weight.view(-1, 1) if dim == 0 else weight.view(1, -1)

    def run(mesh):
        rank = mesh.get_rank()
        own = weight.split(sizes, dim)[rank]
        x = pieces(sizes, dim)[rank].clone().requires_grad_()
        y = p.gather_v(x, sizes, dim, dst=root)
        assert_close(y.detach(), whole(sizes, dim) * (rank == root), "gathered")
        first, second = gradients(y, x, weight)
        assert_close(first, 2 * own * x.detach(), "gradient of gather_v")
        assert_close(second, (2 * own).expand_as(x), "second gradient of gather_v")

        source = (whole(sizes, dim) if rank == root else whole(sizes, dim, 1)).requires_grad_()
        z = p.scatter_v(source, sizes, dim, src=root)
        assert_close(z.detach(), x.detach(), "scattered")
        first, second = gradients(z, source, own)
        assert_close(first, 2 * weight * source.detach() * (rank == root), "gradient of scatter_v")
        assert_close(second, (2 * weight).expand_as(source) * (rank == root), "second gradient of scatter_v")

    on_ranks(len(sizes), run)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_indexed_all_to_all_v(count, dim):
    """Rank r sends r + s positions to s, with repetitions; what comes is in the order of the ranks."""
    sizes = [[src + dst for dst in range(count)] for src in range(count)]
    locals_ = [torch.randn([4, 3] if dim == 0 else [3, 4], dtype=F64) for _ in range(count)]
    indices = [
        [torch.arange(sizes[src][dst]).mul(3).add(src).remainder(4) for dst in range(count)] for src in range(count)
    ]
    weights = [torch.randn(sum(row[dst] for row in sizes), dtype=F64) for dst in range(count)]

    def shaped(weight):
        return weight.view(-1, 1) if dim == 0 else weight.view(1, -1)

    def run(mesh):
        rank = mesh.get_rank()
        x = locals_[rank].clone().requires_grad_()
        y = p.indexed_all_to_all_v(x, indices[rank], sizes, dim=dim)
        expected = [locals_[src].index_select(dim, indices[src][rank]) for src in range(count)]
        assert_close(y.detach(), torch.cat(expected, dim), "received")
        (grad,) = torch.autograd.grad((y * shaped(weights[rank])).sum(), x)
        of_x = torch.zeros_like(x)
        for dst in range(count):
            first = sum(row[dst] for row in sizes[:rank])
            weight = weights[dst][first : first + sizes[rank][dst]]
            of_x.index_add_(
                dim, indices[rank][dst], shaped(weight).expand_as(x.detach().index_select(dim, indices[rank][dst]))
            )
        assert_close(grad, of_x, "gradient")
        again = p.indexed_all_to_all_v_wrapper(x.detach(), indices[rank], sizes, dim, mesh.communicator())
        assert_close(again, y.detach(), "by the other name")

    on_ranks(count, run)


def test_gradients_of_16_bits_are_summed_in_fp32():
    """1 + 3 times 2**-8, which bfloat16 loses one by one."""
    values = [1.0, 2**-8, 2**-8, 2**-8]

    def run(mesh):
        grads = []
        for use_fp32 in (True, False):
            x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
            with comm.record() as calls:
                y = p.all_gather_v(x, [1] * 4, use_fp32=use_fp32)
                (y * values[mesh.get_rank()]).sum().backward()
            dtype = torch.float32 if use_fp32 else torch.bfloat16
            assert [(call.verb, call.dtype) for call in calls] == [
                ("all_gather", torch.bfloat16),
                ("reduce_scatter", dtype),
            ]
            grads.append(x.grad.item())
        x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        sizes = [[4 * (r == 0)] * 4 for r in range(4)]
        index = torch.zeros(4 * (mesh.get_rank() == 0), dtype=torch.int64)
        y = p.indexed_all_to_all_v(x, [index] * 4, sizes)
        (y * torch.tensor(values, dtype=torch.bfloat16)).sum().backward()
        return grads[0], x.grad.item()

    expected = torch.tensor(sum(values)).bfloat16().item()
    four = torch.tensor(4 * sum(values)).bfloat16().item()
    assert on_ranks(4, run) == [(expected, four)] + [(expected, 0.0)] * 3


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mappings(count):
    """A row- and a column-wise product, as tensor parallelism cuts them, equal to one process with all gradients."""
    x, w, v = (torch.randn(5, 5, dtype=F64, requires_grad=True) for _ in range(3))
    loss = (torch.tanh(x @ w) @ v).square().sum()
    expected = torch.autograd.grad(loss, (x, w, v))
    shapes = p.compute_split_shapes(5, count)

    def run(mesh):
        DistributedManager.initialize()
        DistributedManager.create_process_subgroup("model", count)
        rank = mesh.get_rank()
        x_, w_, v_ = (
            x.detach().clone().requires_grad_(),
            w.detach().clone().requires_grad_(),
            v.detach().clone().requires_grad_(),
        )
        columns, rows = w_.split(shapes, 1)[rank], v_.split(shapes, 0)[rank]
        y = p.reduce_from_parallel_region(torch.tanh(p.copy_to_parallel_region(x_, "model") @ columns) @ rows, "model")
        part = p.scatter_to_parallel_region(y, -1, "model")
        assert part.shape == (5, shapes[rank])
        back = p.gather_from_parallel_region(part, 1, shapes, "model")
        assert_close(back.detach(), y.detach(), "scattered and gathered")
        actual = torch.autograd.grad(back.square().sum(), (x_, w_, v_))
        assert_close(actual[0], expected[0], "gradient of x")
        assert_close(actual[1].split(shapes, 1)[rank], expected[1].split(shapes, 1)[rank], "gradient of the columns")
        assert_close(actual[2].split(shapes, 0)[rank], expected[2].split(shapes, 0)[rank], "gradient of the rows")
        equal = p.gather_from_parallel_region(torch.full((1, 2), float(rank)), 1, group="model")
        assert equal.tolist() == [[float(r // 2) for r in range(2 * count)]]

    on_ranks(count, run)


@pytest.mark.parametrize(
    "size, count, sizes",
    [(7, 4, [2, 2, 2, 1]), (5, 4, [1, 1, 1, 2]), (8, 4, [2] * 4), (3, 1, [3]), (2, 4, [0, 0, 0, 2])],
)
def test_sizes_of_pieces(size, count, sizes):
    assert p.compute_split_shapes(size, count) == sizes
    if size >= count:
        parts = p.split_tensor_along_dim(torch.arange(size).view(1, -1), 1, count)
        assert [part.shape[1] for part in parts] == sizes


def test_refusals():
    with pytest.raises(ValueError, match=r"dim 0 of shape \(2,\) is not cut into 3 pieces"):
        p.split_tensor_along_dim(torch.ones(2), 0, 3)
    with pytest.raises(ValueError, match=r"dim 1 of shape \(2,\) is not cut"):
        p.split_tensor_along_dim(torch.ones(2), 1, 1)

    def run(mesh):
        x = torch.ones(2)
        for call in (p.all_gather_v, p.all_gather_v_bwd_wrapper, p.gather_v, p.scatter_v):
            with pytest.raises(ValueError, match=f"{call.__name__} over world: 3 entries, and rank 0, for 2 ranks"):
                call(x, [2, 2, 2])
        for call in (p.gather_v, p.scatter_v):
            with pytest.raises(ValueError, match="2 entries, and rank 2, for 2 ranks"):
                call(x, [2, 2], 0, 2)
        with pytest.raises(ValueError, match=r"indices of lengths \[1, 0\], but sizes\[\d\] is \[0, 0\]"):
            p.indexed_all_to_all_v(
                x, [torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)], [[0, 0]] * 2
            )
        with pytest.raises(ValueError, match="does not match the plan"):
            p.gather_v(x, [3, 3])

    on_ranks(2, run)
