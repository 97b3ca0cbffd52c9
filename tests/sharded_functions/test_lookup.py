"""Rows that a rank holds of a table, zeros for the others; positions of ids in shards of any sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.sharded_functions.vocabulary import embedding, local_positions
from tests.sharded_functions.shards import SIZES, randn


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("padding", [None, 0, 5])
def test_the_ranks_rows_sum_to_those_of_the_table(size, padding):
    table, ids, cotangent = randn(8, 3).requires_grad_(), torch.tensor([[0, 5, 7], [5, 2, 0]]), randn(2, 3, 3, seed=1)
    expected = F.embedding(ids, table, padding)
    expected.backward(cotangent)

    def rank():
        part = table.detach().chunk(size)[comm.rank("tp")].clone().requires_grad_()
        rows = embedding(ids, part, padding, axis="tp")
        rows.backward(cotangent)
        return rows.detach(), part.grad

    rows, gradients = zip(*threads.run(Mesh(size, tp=size), rank))
    torch.testing.assert_close(sum(rows), expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(gradients), table.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_positions(sizes):
    ids = torch.arange(8)

    def rank():
        index = comm.rank("tp")
        return local_positions(ids, sizes[index], "tp", first=sum(sizes[:index]))

    ranks = threads.run(Mesh(len(sizes), tp=len(sizes)), rank)
    owners = torch.stack([~elsewhere for _, elsewhere in ranks])
    assert owners.sum(0).tolist() == [1] * 8
    found = [position + sum(sizes[:r]) for r, (position, _) in enumerate(ranks)]
    assert all(torch.equal(ids[owner], position[owner]) for owner, position in zip(owners, found))
    assert all(not position[elsewhere].any() for position, elsewhere in ranks)
