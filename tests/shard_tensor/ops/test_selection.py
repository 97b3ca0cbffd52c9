"""Selection along sharded dims: communication, and errors on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor, fallback
from neuronx_dist.shard_tensor.points import knn, radius_search
from tests.shard_tensor.support.cases import on_ranks


def sharded(x, mesh, dim=0, sizes=None):
    return distribute_tensor(x, mesh, [Shard(dim)], sizes=[sizes], src=None)


def replicated(x):
    return x.redistribute(placements=[Replicate()])


def traffic(calls):
    return [(call.verb, call.bytes) for call in calls]


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x.topk(2, 0), [("all_gather", 3 * 2 * 4), ("all_gather", 3 * 2 * 8)]),
        (lambda x: x.max(0), [("all_gather", 3 * 4), ("all_gather", 3 * 8)]),
        (lambda x: x[torch.tensor([1, 2, 1])], [("all_reduce", 3 * 8)]),
        (lambda x: x.index_fill(0, torch.tensor([5]), 1.0), []),
        (lambda x: x.roll(1, 0), [("exchange", 8)]),
        (lambda x: torch.cat([x, x]), [("exchange", 2 * 4 * 8)]),
        (lambda x: x.unfold(0, 3, 1), [("exchange", 2 * 8)]),
        (lambda x: x.diff(), [("exchange", 8)]),
    ],
    ids=["topk", "max", "index", "scatter", "roll", "cat", "unfold", "diff"],
)
def test_what_travels(function, expected):
    def rank(mesh):
        x = sharded(torch.arange(12.0, dtype=torch.float64), mesh)
        with fallback("error"), comm.record() as calls:
            function(x)
        return traffic(calls)

    assert max(on_ranks(3, rank), key=lambda calls: sum(size for _, size in calls)) == expected


def test_of_equal_elements_the_first_is_taken():
    def rank(mesh):
        x = sharded(torch.tensor([1.0, 7, 2, 7, 7, 0]), mesh, sizes=(1, 3, 2))
        assert x.max(0).indices.item() == x.argmax().item() == 1
        assert x.topk(3, 0).indices.full_tensor().tolist() == [1, 3, 4]
        y = sharded(torch.ones(6, 1), mesh, sizes=(1, 3, 2))
        assert knn(y, y, 2).indices.full_tensor().tolist() == [[0, 1]] * 6

    on_ranks(3, rank)


@pytest.mark.parametrize("dim", [0, 1])
def test_cat_leaves_out_empty_vectors_wherever_they_are(dim):
    whole = torch.arange(12.0, dtype=torch.float64).view(6, 2)

    def rank(mesh):
        x = sharded(whole, mesh, sizes=(1, 3, 2))
        for tensors in ([torch.empty(0), x], [x, torch.empty(0)]):
            assert torch.equal(torch.cat(tensors, dim).full_tensor(), whole)

    on_ranks(3, rank)


def test_cat_of_plain_tensors_and_an_empty_distributed_vector():
    def join(mesh):
        empty = distribute_tensor(torch.empty(0), mesh, [Shard(0)], src=None)
        y = torch.cat([torch.ones(2, 3), empty, torch.zeros(1, 3)])
        assert torch.equal(y.full_tensor(), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))

    on_ranks(2, join)


def test_of_equally_near_points_those_with_the_smaller_indices_are_taken():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 3, (count, 2), generator=generator).double() for count in (40, 9))
    expected = torch.cdist(y, x).sort(dim=1, stable=True)[1][:, :5]
    assert torch.equal(knn(x, y, 5).indices, expected)

    def rank(mesh):
        points, queries = sharded(x, mesh, sizes=(23, 0, 17)), sharded(y, mesh, sizes=(1, 6, 2))
        assert torch.equal(knn(points, queries, 5).indices.full_tensor(), expected)

    on_ranks(3, rank)


def test_a_ring_moves_each_shard_of_the_points_around():
    def rank(mesh):
        x, y = (sharded(torch.arange(3.0 * count).view(count, 3), mesh) for count in (12, 6))
        with comm.record() as calls:
            knn(x, y, 2)
        return traffic(calls)[:2], [call.verb for call in calls][2:]

    assert on_ranks(3, rank) == [([("exchange", 4 * 3 * 4)] * 2, ["all_gather", "exchange", "exchange"])] * 3


def test_a_radius_without_enough_points():
    def rank(mesh):
        x = sharded(torch.tensor([[0.0], [1], [5]]), mesh, sizes=(0, 3))
        found = radius_search(x, sharded(torch.tensor([[0.5], [9.0]]), mesh), 1.0, 3)
        assert found.indices.full_tensor().tolist() == [[0, 1, -1], [-1, -1, -1]]
        assert found.distances.full_tensor().tolist() == [[0.5, 0.5, float("inf")], [float("inf")] * 3]

    on_ranks(2, rank)


REFUSED = [
    (ValueError, "topk: k=9 is out of range for dim 0, which has 8", lambda x, i: x.topk(9, 0)),
    (IndexError, "dim 2 is out of range for a tensor of 2 dims", lambda x, i: x.argmax(2)),
    (IndexError, "from 1 to 8, but dim 0 has 8", lambda x, i: x[torch.tensor([1, 8])]),
    (IndexError, "for a dim of 8 elements; number of such indices by rank: {1: 1}", lambda x, i: x[i]),
    (IndexError, "from 0 to 8, but dim 1 has 3", lambda x, i: x[0 * replicated(i), replicated(i)]),
    (IndexError, "from 9 to 9, but dim 0", lambda x, i: F.embedding(torch.tensor([9]), x)),
    (NotImplementedError, "not support max_norm", lambda x, i: F.embedding(i, x, max_norm=1.0)),
    (NotImplementedError, "torch.where", lambda x, i: x.__setitem__(x > 0, torch.ones(24))),
    (ValueError, "roll: 2 shifts for 1 dims", lambda x, i: x.roll((1, 2), (0,))),
    (ValueError, "unfold: size=9", lambda x, i: x.unfold(0, 9, 1)),
    (ValueError, "k=9 of 8 points", lambda x, i: knn(x, x, 9)),
    (ValueError, "must be [n, d] and [m, d]", lambda x, i: knn(x, i, 1)),
    (ValueError, "radius=-1", lambda x, i: radius_search(x, x, -1.0, 2)),
]


@pytest.mark.parametrize("error, text, function", REFUSED, ids=[each[1] for each in REFUSED])
def test_refusals_on_all_ranks(error, text, function):
    def rank(mesh):
        x = sharded(torch.ones(8, 3), mesh, sizes=(5, 3))
        with pytest.raises(error) as caught:
            function(x, sharded(torch.tensor([0, 1, 2, 8]), mesh))
        return text in str(caught.value) or str(caught.value)

    assert on_ranks(2, rank) == [True, True]


def test_a_boolean_is_taken_from_the_rank_that_has_it():
    def rank(mesh):
        x = sharded(torch.tensor([True, False, True, True]), mesh)
        y = x[distribute_tensor(torch.tensor([2, 1]), mesh, [Replicate()], src=None)]
        assert y.dtype is torch.bool and y.full_tensor().tolist() == [True, False]

    on_ranks(2, rank)


def test_bytes_are_a_mask_as_in_getitem():
    """torch refuses a number here, and takes bytes for a mask elsewhere."""

    def rank(mesh):
        x = sharded(torch.arange(6.0), mesh, sizes=(1, 5))
        mask = sharded(torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.uint8), mesh, sizes=(1, 5))
        assert x[mask].full_tensor().tolist() == [0, 3, 4]
        x[mask] = 9.0
        assert x.full_tensor().tolist() == [9, 1, 2, 9, 9, 5]

    on_ranks(2, rank)


def test_positions_outside_of_a_dim_do_not_become_other_elements():
    """Positions in several dims are flattened into one."""

    def rank(mesh):
        x = sharded(torch.zeros(4, 3), mesh, sizes=(1, 3))
        for rows, columns in (([2], [-4]), ([0], [3])):
            with pytest.raises(IndexError, match="dim 1 has 3 elements"):
                torch.index_put(x, (torch.tensor(rows), torch.tensor(columns)), torch.ones(1))

    on_ranks(2, rank)


def test_places_in_sequences_of_integers():
    def rank(mesh):
        sequence = sharded(torch.tensor([1, 3, 5]), mesh, sizes=(1, 2))
        assert torch.searchsorted(sequence, 3.5).item() == 2
        assert torch.searchsorted(sequence, sharded(torch.tensor([0.5, 3.5]), mesh)).full_tensor().tolist() == [0, 2]
        with pytest.raises(NotImplementedError, match="use its out-of-place form"):
            torch.searchsorted(sequence, sequence, out=torch.empty(3, dtype=torch.int64))

    on_ranks(2, rank)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.linalg.norm(x.reshape(2, 3, 4), "fro"),
        lambda x: torch.linalg.norm(x.reshape(2, 3, 4), 2),
        lambda x: torch.linalg.matrix_norm(x, 3),
        lambda x: x[:0].aminmax(),
        lambda x: x.long().nanmean(),
        lambda x: torch.dist(x.long(), x.long()),
        lambda x: torch.stft(x[:, 0], 4),
    ],
)
def test_calls_that_torch_refuses_are_refused(call):
    with pytest.raises(RuntimeError):
        call(torch.ones(6, 4))

    def rank(mesh):
        with pytest.raises(RuntimeError):
            call(sharded(torch.ones(6, 4), mesh))

    on_ranks(2, rank)


def test_an_empty_matrix_has_norm_0():
    def rank(mesh):
        x = sharded(torch.ones(4, 0, dtype=torch.float64), mesh)
        return [torch.linalg.matrix_norm(x, ord).item() for ord in ("fro", 2, float("inf"))]

    assert on_ranks(2, rank) == [[0.0] * 3] * 2


@pytest.mark.parametrize("return_complex", [True, False])
def test_a_transform_of_windows_is_real_pairs_if_asked_for(return_complex):
    x = torch.arange(24, dtype=torch.float64).sin()
    z = torch.complex(x, x.cos())
    window = torch.complex(torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))

    def rank(mesh):
        for signal, options in ((z, {}), (x, {"window": window, "onesided": False})):
            expected = torch.stft(signal, 4, return_complex=return_complex, **options)
            actual = torch.stft(sharded(signal, mesh), 4, return_complex=return_complex, **options).full_tensor()
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    on_ranks(2, rank)


@pytest.mark.parametrize("name", ["_base", "_cdata", "name", "_backward_hooks", "grad_dtype"])
def test_attributes_gather_nothing(name):
    """`fully_shard` asks for some."""
    if not hasattr(torch.Tensor, name):
        pytest.skip("this torch has no such attribute")

    def rank(mesh):
        with fallback("error"):
            getattr(sharded(torch.ones(4), mesh), name)

    on_ranks(2, rank)
