"""Pieces against `local_slice` and `assemble`, on tensors whose elements are their own positions."""

import math

import pytest
import torch

from neuronx_dist.checkpoint.pieces import TensorPiece, cut, overlap, pieces_of, rows_of, whole_piece
from neuronx_dist.weights.shard_spec import ShardSpec

SPECS = [
    ShardSpec(full_shape=(5, 3)),
    ShardSpec(full_shape=()),
    ShardSpec("tp", 0, num_partitions=2, full_shape=(6, 3)),
    ShardSpec("tp", 1, num_partitions=3, full_shape=(4, 6)),
    ShardSpec("tp", 0, num_partitions=4, full_shape=(12, 2), unpadded=10),
    ShardSpec("tp", 0, num_partitions=4, full_shape=(16, 2), unpadded=6),  # a shard of zeros alone
    ShardSpec("tp", 0, stride=2, num_partitions=2, full_shape=(12, 3)),
    ShardSpec("tp", 0, stride=2, num_partitions=2, full_shape=(12, 3), unpadded=10),
    ShardSpec("tp", 1, stride=3, num_partitions=2, full_shape=(2, 12, 2), unpadded=9),
    ShardSpec("tp", 0, num_partitions=4, full_shape=(16, 2), unpadded=12, group=(6, 8)),
    ShardSpec("tp", 1, num_partitions=4, full_shape=(3, 16), unpadded=6, group=(3, 4)),
    ShardSpec("tp/2", 0, num_partitions=2, full_shape=(4, 3)),
]


def positions(spec):
    shape = spec.unpadded_shape
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def covered(local, pieces):
    """The local tensor with all that pieces hold set to zero: what is left is padding."""
    rest = local.clone()
    for piece in pieces:
        rest[piece.local] = 0
    return rest


def place(whole, local, pieces):
    for piece in pieces:
        target = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape))
        assert whole[target].eq(0).all(), "written twice"
        whole[target] = local[piece.local]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pieces_of_all_shards_are_the_whole_each_element_once(spec):
    full = positions(spec)
    whole = torch.zeros_like(full)
    for index in range(spec.num_partitions):
        local = spec.local_slice(full, index)
        pieces = pieces_of(spec, index)
        assert covered(local, pieces).eq(0).all()
        place(whole, local, pieces)
    assert torch.equal(whole, full)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.full_shape], ids=str)
@pytest.mark.parametrize("degree", [1, 2, 3, 7])
def test_rows_of_a_shard_are_its_pieces_cut_as_zero1_cuts(spec, degree):
    full = positions(spec)
    whole = torch.zeros_like(full)
    for index in range(spec.num_partitions):
        local = spec.local_slice(full, index)
        rows = -(-local.shape[0] // degree)
        padded = torch.cat([local, local.new_zeros(rows * degree - local.shape[0], *local.shape[1:])])
        for rank in range(degree):
            shard = padded[rank * rows : (rank + 1) * rows]
            pieces = rows_of(pieces_of(spec, index), rank * rows, (rank + 1) * rows)
            assert covered(shard, pieces).eq(0).all()
            place(whole, shard, pieces)
    assert torch.equal(whole, full)


@pytest.mark.parametrize("old", SPECS[2:5] + SPECS[6:7], ids=str)
def test_overlaps_carry_a_tensor_from_one_layout_to_another(old):
    full = positions(old)
    rows, columns = full.shape
    layouts = [ShardSpec(full_shape=(rows, columns))]
    layouts += [ShardSpec("tp", 0, num_partitions=5, full_shape=(rows + -rows % 5, columns), unpadded=rows)]
    layouts += [ShardSpec("tp", 1, num_partitions=2, full_shape=(rows, columns + columns % 2), unpadded=columns)]
    for new in layouts:
        for index in range(new.num_partitions):
            local = torch.zeros(new.local_shape, dtype=full.dtype)
            for source in range(old.num_partitions):
                shard = old.local_slice(full, source)
                for saved in pieces_of(old, source):
                    for piece in pieces_of(new, index):
                        meeting = overlap(saved.offset, saved.shape, piece)
                        if meeting is not None:
                            assert local[meeting[1]].eq(0).all(), "copied twice"
                            local[meeting[1]] = shard[saved.local][meeting[0]]
            assert torch.equal(local, new.local_slice(full, index))


@pytest.mark.parametrize("elements", [1, 2, 3, 5, 12, 24, 100])
def test_cut_pieces_are_small_enough_and_all_of_it(elements):
    full = torch.arange(1, 25).view(4, 3, 2)
    piece = TensorPiece((slice(1, 4), slice(0, 3), slice(0, 2)), (5, 0, 0), (3, 3, 2))
    parts = list(cut(piece, elements))
    assert all(math.prod(part.shape) <= elements for part in parts)
    whole = torch.zeros(8, 3, 2, dtype=full.dtype)
    place(whole, full, parts)
    assert torch.equal(whole[5:], full[1:]) and whole[:5].eq(0).all()
    assert len(list(cut(piece, 18))) == 1


def test_a_tensor_without_dims_is_one_piece():
    assert whole_piece(()) == TensorPiece((), (), ())
    assert overlap((), (), whole_piece(())) == ((), ())
