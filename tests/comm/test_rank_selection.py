"""A rank's part of a tensor: by a rank that is a number, and by one that is an input of the program (XLA)."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import rank_selection

SIZE = 3


class Group:
    """A communicator of which only this is asked."""

    size = SIZE

    def __init__(self, rank: int, as_tensor: bool) -> None:
        self.rank = torch.tensor(rank) if as_tensor else rank

    def coordinate(self, x: torch.Tensor) -> Any:
        return self.rank


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
def test_the_part_of_a_rank(rank: int, as_tensor: bool) -> None:
    group = cast(comm.Communicator, Group(rank, as_tensor))
    x = torch.arange(36.0).view(6, 6)
    for dim in (0, 1, -1):
        piece = rank_selection.own_piece(x, group, dim)
        assert torch.equal(piece, x.chunk(SIZE, dim)[rank]) and piece.is_contiguous()
        piece.zero_()  # memory of its own
        whole = rank_selection.in_own_piece(x, group, dim)
        expected = [x if index == rank else torch.zeros_like(x) for index in range(SIZE)]
        assert torch.equal(whole, torch.cat(expected, dim))
        slots = x.unflatten(dim, (SIZE, 2))
        at = dim % 2
        slot = rank_selection.own_slot(slots, group, at)
        assert torch.equal(slot, slots.select(at, rank)) and slot.is_contiguous()
        slot.zero_()
    assert torch.equal(x, torch.arange(36.0).view(6, 6))
    for index in range(SIZE):
        only = rank_selection.only_on(x, group, index)
        assert torch.equal(only, x if index == rank else torch.zeros_like(x)) and only is not x
    infinite = torch.full((2,), torch.inf)
    assert torch.equal(rank_selection.only_on(infinite, group, rank + 1), torch.zeros(2))
    others = cast(comm.Communicator, Group(0, as_tensor))
    assert torch.equal(rank_selection.only_on_first(x, [others, group]), x if rank == 0 else torch.zeros_like(x))
    assert rank_selection.only_on_first(x, []) is x


def test_what_is_in_one_program() -> None:
    assert not rank_selection.in_one_program(torch.ones(2))
    assert rank_selection.in_one_program(cast(torch.Tensor, type("Fake", (), {"device": torch.device("xla")})))


def test_ranks_of_real_communicators_are_numbers() -> None:
    with comm.as_rank(Mesh(3, tp=3), 2):
        assert torch.equal(rank_selection.own_piece(torch.arange(6), comm.communicator("tp"), 0), torch.tensor([4, 5]))
