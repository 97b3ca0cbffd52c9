"""Ids inside and outside of a vocabulary, and columns that are none, rank by rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.func import vmap

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.sharded_functions.vocabulary import check_ids, hide_padding, padded_vocabulary


def test_the_next_multiple() -> None:
    assert [padded_vocabulary(size, 4) for size in (0, 1, 3, 4, 5, 8, 9)] == [0, 4, 4, 4, 8, 8, 12]
    assert [padded_vocabulary(size, 1) for size in (1, 7)] == [1, 7]


@pytest.mark.parametrize("ranks, vocabulary", [(1, 5), (2, 4), (2, 5), (3, 5), (3, 7), (4, 1), (4, 2), (4, 9)])
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_columns_that_are_no_ids(ranks: int, vocabulary: int, axis: str) -> None:
    columns = -(-vocabulary // ranks)

    def rank() -> Any:
        logits = torch.ones(2, 3, columns, requires_grad=True).clone()
        arguments = (logits, vocabulary) if axis == "tp" else (logits, vocabulary, axis)
        with comm.record() as calls:
            assert hide_padding(*arguments) is logits
        assert not calls and logits.grad_fn is not None
        return logits.detach()

    whole = torch.cat(comm.threads.run(Mesh(ranks, tp=ranks if axis == "tp" else 1), rank), -1)
    assert whole.shape[-1] == padded_vocabulary(vocabulary, ranks)
    assert whole[..., :vocabulary].eq(1).all() and whole[..., vocabulary:].eq(-math.inf).all()


@pytest.mark.parametrize("columns", [2, 4])
def test_logits_of_another_size(columns: int) -> None:
    with comm.as_rank(Mesh(2, tp=2), 1), pytest.raises(ValueError) as error:
        hide_padding(torch.ones(3, columns), 5)
    assert str(error.value) == (
        f"logits [3, {columns}] must have 3 columns: the shard of a vocabulary of 5 over 2 ranks, padding included"
    )
    with comm.as_rank(Mesh(2, tp=2), 1):  # of a vocabulary that needs no padding nothing is asked
        assert hide_padding(torch.ones(3, columns), 6).eq(1).all()


@pytest.mark.parametrize(
    "ids, ignored, wrong",
    [
        ([0, 4, 2], None, None),
        ([0, -1, 7], None, -1),
        ([5], None, 5),
        ([0, 4, -100], -100, None),
        ([-100, -101], -100, -101),
        ([-100], None, -100),
        ([9, 3], 9, None),
        ([9, 5], 9, 5),
        ([], None, None),
    ],
)
def test_ids_outside_of_the_vocabulary(ids: list[int], ignored: int | None, wrong: int | None) -> None:
    x = torch.tensor(ids, dtype=torch.int64)
    if wrong is None:
        check_ids(x, 5, ignored, "label")
        return
    with pytest.raises(IndexError) as error:
        check_ids(x.view(1, -1), 5, ignored, "label")
    more = "" if ignored is None else f" and is not ignore_index={ignored}"
    assert str(error.value) == f"label {wrong} is outside the vocabulary of 5{more}"


def test_ids_in_a_batch_of_a_transform() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        check_ids(x, 5, None, "id")
        return x

    assert vmap(check)(torch.tensor([[0], [4]])).tolist() == [[0], [4]]
    with pytest.raises(IndexError, match="id 5 is outside the vocabulary of 5$"):
        vmap(check)(torch.tensor([[0], [5]]))


@pytest.mark.slow
def test_ids_in_compiled_code() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def check(x: torch.Tensor) -> torch.Tensor:
        check_ids(x, 5, -1, "id")
        return x + 1

    assert check(torch.tensor([0, 4, -1])).tolist() == [1, 5, 0]
    with pytest.raises(IndexError, match="id 5 is outside the vocabulary of 5 and is not ignore_index=-1"):
        check(torch.tensor([0, 5, -1]))
