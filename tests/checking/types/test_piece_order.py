"""Pieces that ranks take in another order than that of their numbers: zigzag sequences, gathered and put in order."""

from __future__ import annotations

import pickle

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.piece_order import Jumbled
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.moe.dispatch import Slots
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.tensor_type import type_of
from neuronx_dist.spmd.types import Dealt
from tests.checking.types.typed_tensors import checked, typed

ZIGZAG = Dealt(4, ((0, 3), (1, 2)))
ORDERED = [0, 2, 3, 1]  # of the pieces 0 3 1 2, the places of 0 1 2 3


@pytest.fixture
def mode():
    with checked() as mode:
        yield mode


def tp(x: torch.Tensor) -> object:
    return type_of(x).get("tp")


def zigzag(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    pieces, rank, last = x.chunk(2 * comm.size("tp"), dim), comm.rank("tp"), 2 * comm.size("tp") - 1
    return torch.cat([pieces[rank], pieces[last - rank]], dim)


def narrowed(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    size, rank, last = x.shape[dim] // (2 * comm.size("tp")), comm.rank("tp"), 2 * comm.size("tp") - 1
    return torch.cat([x.narrow(dim, rank * size, size), x.narrow(dim, (last - rank) * size, size)], dim)


@pytest.mark.parametrize("cut", [zigzag, narrowed])
def test_the_pieces_that_each_rank_takes_are_its_type(mode, cut):
    x = cut(typed(8, 6))
    assert tp(x) == S(0, order=ZIGZAG) and str(tp(x)) == "S(0, pieces 0 3 | 1 2 of 4)"
    assert tp(x.t() * 2) == S(1, order=ZIGZAG)
    assert tp(x @ typed(6, 3)) == S(0, order=ZIGZAG)
    assert tp(x.view(2, 2, 6)) == S(0, order=ZIGZAG)
    assert tp(x.sum()) is P and tp(x.sum() / x.shape[0]) is P("avg")
    assert tp(typed(8, 6).chunk(4)[comm.rank("tp")]).base is V  # a piece by itself
    assert [tp(half) for half in x.chunk(2)] == [S(0, order=Dealt(4, part)) for part in (((0,), (1,)), ((3,), (2,)))]


def test_all_pieces_in_the_order_of_the_ranks_are_a_shard(mode):
    pieces, rank = typed(8, 6).chunk(4), comm.rank("tp")
    assert tp(torch.cat([pieces[2 * rank], pieces[2 * rank + 1]])) == S(0)
    assert tp(torch.cat([pieces[rank], pieces[rank]])) is V


def test_pieces_in_different_orders_do_not_meet(mode):
    x = zigzag(typed(8, 6))
    with pytest.raises(SpmdTypeError):
        x + typed(4, 6)
    with pytest.raises(SpmdTypeError, match="each the one of its number, and pieces 0 3 . 1 2 of 4"):
        x + typed(4, 6, tp=S(0))
    with pytest.raises(SpmdTypeError, match="cuts through a piece"):
        zigzag(typed(24, 6)).view(3, 4, 6) * 2
    for call in (lambda: spmd.all_to_all(x, "tp", src=S(0), dst=S(1)), lambda: x[:3], lambda: x.softmax(0)):
        with pytest.raises(SpmdTypeError):
            call()


@pytest.mark.parametrize("gather", [
    lambda x: spmd.all_gather(x, "tp", src=S(0), dst=R), lambda x: spmd.all_gather(x, "tp", src=S(0), dst=I),
    lambda x: comm.all_gather(x, "tp", dim=0),
])  # fmt: skip
def test_gathered_pieces_are_jumbled_until_they_are_in_order(mode, gather):
    every = gather(zigzag(typed(8, 6)))
    assert isinstance(tp(every), Jumbled) and "pieces 0 3 1 2 of 4 on dim 0" in str(tp(every))
    assert pickle.loads(pickle.dumps(tp(every))) is tp(every)
    pieces = (every.t() * 2).t().chunk(4)
    assert tp(torch.cat([pieces[i] for i in ORDERED])) is tp(every).plain
    assert isinstance(tp(torch.cat([pieces[i] for i in (0, 1, 2, 3)])), Jumbled)
    assert tp(every.sum(0)) in (R, I)
    assert isinstance(tp(torch.cat([pieces[0], pieces[2]])), Jumbled)


@pytest.mark.parametrize("call", [
    lambda x: x + typed(8, 6), lambda x: x[:3], lambda x: x.softmax(0), lambda x: x.cumsum(0), lambda x: x[0],
    lambda x: torch.cat([x, typed(8, 6)]), lambda x: torch.cat([x, x]),
    lambda x: x * typed(8, 6, tp=V), lambda x: x * typed(8, 6, tp=P),
    lambda x: x.index_select(0, torch.tensor([0, 1])), lambda x: spmd.convert(x, "tp", src=R, dst=S(0)),
    lambda x: comm.all_gather(x, "tp"), lambda x: typed(8, 6).copy_(x), lambda x: typed(8, 6).add_(x),
    lambda x: comm.all_reduce(x, "tp"), lambda x: comm.broadcast(x, "tp") + typed(8, 6), lambda x: x.flip(0),
    lambda x: x @ typed(6, 8) @ x,
    lambda x: torch.nn.functional.scaled_dot_product_attention(typed(8, 6), x, x),
    lambda x: spmd.assert_type(x, {"tp": R}) + typed(8, 6), lambda x: x.mean(0) + x[0],
])  # fmt: skip
def test_nothing_takes_jumbled_pieces_for_ones_in_order(mode, call):
    with pytest.raises(SpmdTypeError):
        call(spmd.all_gather(zigzag(typed(8, 6)), "tp", src=S(0), dst=R))


def test_the_repair_puts_the_pieces_in_order(mode):
    x = spmd.all_gather(zigzag(typed(8, 6)), "tp", src=S(0), dst=R)
    with pytest.raises(SpmdTypeError, match="in the order of the ranks, pieces 0 3 1 2 of 4") as raised:
        x + typed(8, 6)
    assert str(raised.value.repairs[0]) == "torch.cat([x.chunk(4, 0)[i] for i in [0, 2, 3, 1]], 0)"
    with pytest.raises(SpmdTypeError, match="a concatenation in the order of the ranks") as raised:
        spmd.all_to_all(zigzag(typed(8, 6)), "tp", src=S(0), dst=S(1))
    assert "all_gather" in raised.value.repairs[0] and "put in order" in raised.value.repairs[0]


def _both():
    x = torch.arange(24.0).view(8, 3)
    every = spmd.all_gather(zigzag(x), "tp", src=S(0), dst=R)
    return x, torch.cat([every.chunk(4, 0)[i] for i in [0, 2, 3, 1]], 0)


def test_the_repair_gives_the_values_of_one_process():
    for x, ordered in threads.run(Mesh(2, tp=2), _both):
        assert torch.equal(x, ordered)


def test_rows_return_from_experts_as_the_shard_that_they_left_as(mode):
    def data(*shape, order=ZIGZAG):
        return typed(*shape, dp=S(0, stride=2, order=order))

    def choices(order=ZIGZAG):
        return data(8, 3, order=order).topk(2).indices

    tokens, route = data(8, 6), Slots(choices(), 3, 8)
    slots = route.to_experts(tokens)
    assert type_of(route.to_tokens(slots, data(8, 2))).get("dp") == S(0, stride=2, order=ZIGZAG)
    with pytest.raises(SpmdTypeError, match=r"add\(.*stride=2, pieces 0 3 . 1 2 of 4"):
        route.to_tokens(slots, data(8, 2, order=None))
    with pytest.raises(SpmdTypeError, match=r"add\(.*stride=2, pieces 0 3 . 1 2 of 4"):
        Slots(choices(order=None), 3, 8).to_experts(tokens)
