"""This rank's part of a batch, and the split that positions show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.attention.batch import split_of_positions
from neuronx_dist.mesh import Mesh

IDS = torch.arange(1, 17).reshape(2, 8)
LABELS = torch.where(IDS == 5, -100, IDS)


@pytest.mark.parametrize(
    "balance, places", [(None, [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
def test_labels_are_shifted_before_the_split_and_positions_match(balance: str | None, places: list[list[int]]) -> None:
    def rank() -> dict[str, Any]:
        return nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS, "labels": LABELS, "n": 3}, balance)

    shifted = torch.cat([LABELS[:, 1:], torch.full((2, 1), -100)], 1)
    for part, columns in zip(comm.threads.run(Mesh(2, cp=2), rank), places):
        assert torch.equal(part["input_ids"], IDS[:, columns]) and torch.equal(part["labels"], shifted[:, columns])
        assert part["position_ids"].tolist() == [columns] * 2 and part["n"] == 3


def test_one_rank_has_the_batch_as_it_is() -> None:
    batch = {"input_ids": IDS, "labels": LABELS}
    assert comm.threads.run(Mesh(2), lambda: nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag") is batch)[0]


@pytest.mark.parametrize("balance, divisor", [(None, 2), ("zigzag", 4)])
def test_a_sequence_that_cp_does_not_divide_is_refused(balance: str | None, divisor: int) -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match=rf"does not divide by {divisor} .* pad it to 8"):
            nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS[:, :7]}, balance)

    comm.threads.run(Mesh(2, cp=2), rank)


@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_positions_show_the_split_and_the_documents(balance: str | None) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])

    def rank() -> Any:
        part = nxd.get_batch_on_this_context_parallel_rank({"position_ids": positions.clone()}, balance)
        with comm.record() as calls:
            first = split_of_positions(part["position_ids"])
            assert split_of_positions(part["position_ids"]) == first and len(calls) == 1  # asked once
        part["position_ids"] += 0
        with comm.record() as calls:
            assert split_of_positions(part["position_ids"]) == first and len(calls) == 1  # written in place
        return first

    runs = (((0, 2), (6, 8)), ((2, 4), (4, 6))) if balance else (((0, 4),), ((4, 8),))
    for split, documents in comm.threads.run(Mesh(2, cp=2), rank):
        assert split.positions == runs and documents == (((0, 3), (3, 8)), ((0, 8),))


def gathered_positions() -> None:
    def rank() -> None:
        part = nxd.get_batch_on_this_context_parallel_rank({"input_ids": IDS}, "zigzag")
        try:
            split, _ = split_of_positions(part["position_ids"])
        except ValueError:
            split = None
        assert split is not None and split.positions[0] == ((0, 2), (6, 8))

    comm.threads.run(Mesh(2, cp=2), rank)
