"""Views that split or merge dims, of shards that they cut: equal to one process, by one exchange, on any layout."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_tensor, fallback, report
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs

SHAPES = [(4, 6), (2, 6, 4), (1, 8, 6), (2, 4, 6, 3), (6, 1, 4), (0, 4, 6), (3, 0, 2), (8,)]
MOST = 6 if os.environ.get("NXD_FULL") else 3  # views of each layout


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def regroupings(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes with as many elements: neighbouring dims merged, split elsewhere, or all of them flat."""
    found = [(torch.Size(shape).numel(),)]
    for i in range(len(shape)):
        for j in range(i + 1, min(i + 3, len(shape)) + 1):
            count = torch.Size(shape[i:j]).numel()
            found.append((*shape[:i], count, *shape[j:]))
            factors = [d for d in range(2, count) if count % d == 0]
            found += [(*shape[:i], d, count // d, *shape[j:]) for d in factors]
    return [x for x in dict.fromkeys(found) if x != shape]


def layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], seed: random.Random):
    """Placements and sizes, uneven, some of them empty; every dim is sharded in one of them."""
    for first in range(len(shape)):
        dims = [first, *seed.sample([d for d in range(len(shape)) if d != first], len(shape) - 1)][: len(mesh_shape)]
        sizes = []
        for dim, count in zip(dims, mesh_shape):
            bounds = sorted(seed.randrange(shape[dim] + 1) for _ in range(count - 1))
            sizes.append(tuple(b - a for a, b in zip([0, *bounds], [*bounds, shape[dim]])))
        placements = [Shard(dim) for dim in dims] + [Replicate()] * (len(mesh_shape) - len(dims))
        yield placements, [*sizes, *[None] * (len(mesh_shape) - len(dims))]
        yield placements, None


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_any_view_of_any_layout_equals_that_of_one_process(mesh_shape: tuple[int, ...]) -> None:
    def rank(mesh):
        seed, count = random.Random(7), 0
        for shape in SHAPES:
            for placements, sizes in layouts(shape, mesh_shape, seed):
                for target in seed.sample(every := regroupings(shape), min(MOST, len(every))):
                    x = whole(*shape).requires_grad_()
                    weight = whole(*target).cos()
                    leaf = distribute_tensor(x, mesh, placements, sizes=sizes, src=None)
                    with fallback("gather"):
                        y = leaf.view(target)
                    what = f"{shape} -> {target}, {placements}, {sizes}"
                    assert torch.equal(y.full_tensor(), x.view(target)), what
                    (y * distribute_tensor(weight, mesh, y.placements, sizes=y._spec.sizes, src=None)).sum().backward()
                    assert_close(leaf.grad.full_tensor(), weight.view(shape), what)
                    count += 1
        return count

    assert min(on_ranks(torch.Size(mesh_shape).numel(), rank, mesh_shape)) > 25 * MOST


def collectives(mesh, shape, placements, call, sizes=None):
    x = distribute_tensor(whole(*shape), mesh, placements, sizes=sizes, src=None)
    with comm.record() as calls, report() as found:
        y = call(x)
    return verbs(calls), y, found


def test_a_merged_inner_dim_moves_by_one_exchange_and_nothing_is_gathered() -> None:
    def rank(mesh):
        with fallback("error"):
            calls, y, found = collectives(mesh, (4, 6, 8), [Shard(1)], lambda x: x.flatten(0, 1))
        assert y.placements == (Shard(0),) and calls == ["all_to_all"], calls
        assert found.notes == [("flatten", "shards of dim 1 of (4, 6, 8) move to dim 0, sizes (2, 2)")]
        return calls

    on_ranks(2, rank)


def test_bounds_that_a_split_would_cut_move_within_the_dim() -> None:
    def rank(mesh):
        with fallback("error"):
            calls, y, _ = collectives(mesh, (12, 2), [Shard(0)], lambda x: x.view(3, 4, 2), [(5, 7)])
        assert y.placements == (Shard(0),) and y._spec.sizes == ((2, 1),)
        return calls

    assert all(len(calls) == 1 for calls in on_ranks(2, rank))


def test_views_that_cut_nothing_do_not_communicate() -> None:
    def rank(mesh):
        for shape, target in (((4, 6), (24,)), ((4, 6), (4, 2, 3)), ((8, 3), (2, 4, 3)), ((1, 4, 6), (24,))):
            placements = [Shard(0 if shape[0] > 1 else 1)]
            assert collectives(mesh, shape, placements, lambda x: x.view(target))[0] == []  # noqa: B023

    on_ranks(2, rank)


def test_a_shard_for_which_no_dim_is_left_is_gathered_or_refused() -> None:
    """On a mesh of some of the job's ranks: mesh dims of it cannot be merged."""

    def rank(_):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        x = distribute_tensor(whole(2, 2, 2), mesh, [Shard(0), Shard(1)], src=None)
        if mesh.get_coordinate() is None:
            return
        with fallback("error"), pytest.raises(NotImplementedError, match=r"interleave the shards of dims \[1\]"):
            x.flatten()
        with fallback("gather"), report() as found:
            y = x.flatten()
        assert torch.equal(y.full_tensor(), whole(8))
        assert [(gather.op, gather.bytes) for gather in found.gathers] == [("flatten", 64)]

    on_ranks(5, rank)


def language_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), ignore_index=-100)


def windows(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Attention in shifted windows of a Swin, of [batch, height, width, channels]."""
    b, h, w, c = x.shape
    y = x.roll((-1, -1), (1, 2)).view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    y = F.softmax(y @ y.transpose(1, 2), -1) @ y
    y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c).roll((1, 1), (1, 2))
    return (y * x).square().mean()


def patches(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Tokens of a picture [batch, channels, height, width], as a ViT makes them."""
    tokens = x.flatten(2).transpose(1, 2)
    return (F.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens).square().mean()


@pytest.mark.parametrize(
    "loss, shape, placements, mesh_shape",
    [
        (language_loss, (2, 6, 5), [Shard(1)], (2,)),
        (language_loss, (2, 6, 5), [Shard(1)], (4,)),
        (language_loss, (4, 6, 5), [Shard(0), Shard(1)], (2, 2)),
        (windows, (2, 8, 8, 3), [Shard(1)], (2,)),
        (windows, (2, 8, 8, 3), [Shard(2)], (3,)),
        (windows, (1, 8, 8, 4), [Shard(1), Shard(2)], (2, 2)),
        (patches, (2, 4, 6, 4), [Shard(2), Shard(3)], (2, 2)),
        (patches, (2, 4, 6, 4), [Shard(3)], (4,)),
    ],
)
def test_models_equal_one_process(loss, shape, placements, mesh_shape) -> None:
    labels = torch.arange(torch.Size(shape[:2]).numel()).view(shape[:2]) % shape[-1]
    labels[0, 1] = -100
    expected = whole(*shape).sin().requires_grad_()
    loss(expected, labels).backward()

    def rank(mesh):
        x = whole(*shape).sin().requires_grad_()
        on_labels = [p if p.dim < 2 else Replicate() for p in placements]
        with fallback("gather"):
            leaf = distribute_tensor(x, mesh, placements, src=None)
            found = loss(leaf, distribute_tensor(labels, mesh, on_labels, src=None))
            found.backward()
        assert_close(found.full_tensor(), loss(expected, labels), "loss")
        assert_close(leaf.grad.full_tensor(), expected.grad, "gradient")

    on_ranks(torch.Size(mesh_shape).numel(), rank, mesh_shape)


def test_where_all_dims_are_short_most_ranks_get_a_shard():
    """Not the first of the merged dims, of which two ranks of four would."""
    whole = torch.arange(2.0 * 6 * 3).view(2, 6, 3)

    def rank(mesh):
        y = distribute_tensor(whole, mesh, [Shard(1)], src=None).flatten(0, 1)
        assert (y.placements, y._spec.sizes) == ((Shard(1),), ((1, 1, 1, 0),))
        assert torch.equal(y.full_tensor(), whole.flatten(0, 1))

    on_ranks(4, rank)
