"""Numbers that are powers of the size of an axis in torch functions: scales, local sizes, literals in views."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.axis_powers import exponents_of
from neuronx_dist.checking.types.mode import _memos
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_dist.spmd import P, R, S, SpmdTypeMode, V, assert_type, get_local_type
from neuronx_dist.spmd.types import scaled


@pytest.fixture
def mode() -> Iterator[SpmdTypeMode]:
    """A mode at dp 2 and tp 2."""
    for memo in _memos.values():
        memo.clear()
    with comm.as_rank(Mesh(4, tp=2), 0), SpmdTypeMode() as mode:
        yield mode


def declared(dp: Any, *shape: int, tp: Any = R, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch._C.DisableTorchFunction():
        x = torch.ones(shape, dtype=dtype)
    return assert_type(x, {"dp": dp, "tp": tp})


def type_on(x: Tensor, axis: str = "dp") -> Any:
    return get_local_type(x)[axis]


# --- factors


@pytest.mark.parametrize(
    ("call", "power"),
    [
        (lambda x, n: x * n, 1),
        (lambda x, n: n * x, 1),
        (lambda x, n: x / n, -1),
        (lambda x, n: x * (1 / n), -1),
        (lambda x, n: torch.mul(x, n), 1),
        (lambda x, n: torch.div(x, other=n), -1),
        (lambda x, n: x / n / n, -2),
        (lambda x, n: x * n / n, 0),
        (lambda x, n: x * n * n**-1, 0),
        (lambda x, n: x.clone().mul_(n), 1),
        (lambda x, n: x.clone().div_(n), -1),
        (lambda x, n: torch._foreach_mul([x], 1 / n)[0], -1),
        (lambda x, n: torch.add(torch.zeros(4), x, alpha=n), 1),
        (lambda x, n: torch.add(x * n, x, alpha=n), 1),
        (lambda x, n: x * torch.tensor(n), 1),
        (lambda x, n: x * torch.full((4,), 1 / n), -1),
        (lambda x, n: x / x.new_full((), n), -1),
        (lambda x, n: x * torch.tensor([n]), 1),
        (lambda x, n: torch.multiply(x, other=n), 1),
        (lambda x, n: torch.true_divide(x, n), -1),
        (lambda x, n: torch.divide(x, other=n), -1),
        (lambda x, n: x * torch.asarray(n), 1),
        (lambda x, n: x * torch.as_tensor(data=n), 1),
        (lambda x, n: x * torch.scalar_tensor(n), 1),
        (lambda x, n: x * x.new_tensor(n), 1),
        (lambda x, n: x * torch.full((), fill_value=n), 1),
        (lambda x, n: x * torch.full_like(torch.zeros(()), n), 1),
        (lambda x, n: x * torch.fill(torch.zeros(()), n), 1),
        (lambda x, n: x * torch.zeros(()).fill_(n), 1),
        (lambda x, n: torch.add(torch.zeros(4), torch.subtract(torch.zeros(4), x, alpha=n)), 1),
        (lambda x, n: torch.rsub(x, torch.zeros(4), alpha=n), 1),
        (lambda x, n: x * 2, 0),
        (lambda x, n: x * (n + 1), 0),
    ],
)
@pytest.mark.parametrize("spmd_type", [P, R, V, S(0)])
def test_a_factor_scales_the_result(mode: SpmdTypeMode, call: Any, power: int, spmd_type: Any) -> None:
    for _ in range(2):  # the second time out of the memo
        x = declared(spmd_type, 4)
        assert type_on(call(x, comm.size("dp"))) == scaled(spmd_type, power)
        assert type_on(call(x, comm.size("tp"))) == spmd_type


def test_a_quotient_of_numbers(mode: SpmdTypeMode) -> None:
    assert type_on(comm.size("dp") / declared(R, 4)) == scaled(R, 1)
    assert type_on(declared(P, 4) / torch.tensor(comm.size(("dp", "tp")))) == scaled(P, -1)


def test_in_place_on_a_list(mode: SpmdTypeMode) -> None:
    grads = [declared(P("avg"), 4), declared(P("avg"), 2)]
    torch._foreach_div_(grads, comm.size("dp"))
    assert [type_on(x) for x in grads] == [P, P]


def test_in_a_packed_buffer(mode: SpmdTypeMode) -> None:
    with torch.no_grad():
        flat = torch.cat([declared(P("avg"), 4), declared(P("avg"), 4, tp=S(0))])
        flat.mul_(1 / comm.size("dp"))
        pieces = flat.split([4, 4])
    assert [type_on(piece) for piece in pieces] == [P, P]
    assert [type_on(piece, "tp") for piece in pieces] == [R, S(0)]


def test_numbers_of_several_powers_are_an_assumption(mode: SpmdTypeMode) -> None:
    torch.tensor([comm.size("dp"), 3])
    assert "in different ways" in next(iter(mode.assumed))[0]


def test_integers_are_positions_where_a_local_size_multiplies_them(mode: SpmdTypeMode) -> None:
    x = declared(S(0), 4, 6)
    rows = torch.arange(6) * x.shape[0]
    assert get_local_type(rows) == {} and get_local_type(torch.arange(6) * comm.size("dp")) == {"dp": scaled(R, 1)}


def test_a_name_means_what_it_does_on_the_mesh() -> None:
    """One memo serves modes of other meshes."""
    for mesh, atoms in ((Mesh(4, tp=1), ["dp"]), (Mesh(4, ep=2), ["edp", "ep"])):
        with comm.as_rank(mesh, 0), SpmdTypeMode():
            assert get_local_type(torch.full((2,), comm.size("dp"))) == {atom: scaled(R, 1) for atom in atoms}


@pytest.mark.parametrize("number", [4, 0.25, 4.0])
def test_a_plain_number_may_be_the_size_of_an_axis_of_one_mesh_and_not_of_another(number: float) -> None:
    for tp, assumed in ((2, False), (4, True), (2, False)):
        with comm.as_rank(Mesh(tp, tp=tp), 0), SpmdTypeMode() as mode:
            declared(R, 3, tp=P) * number
            assert any('comm.size("tp"), to which it is equal' in text for text, _ in mode.assumed) is assumed


def test_only_a_number_that_may_be_a_size_is_looked_up_with_the_mesh(mode: SpmdTypeMode) -> None:
    for number, times in ((0.3, 1), (0.5, 2), (1.0, 1), (-2, 1), (float("inf"), 1), (3, 2)):
        before = len(mode._memo)
        declared(R, 3, tp=P) * number
        assert len(mode._memo) - before == times, number


# --- sizes


@pytest.mark.parametrize(
    "size",
    [
        lambda x: x.shape[0],
        lambda x: x.size(0),
        lambda x: x.size()[0],
        lambda x: x.size(dim=-2),
        lambda x: x.shape[:1][0],
        lambda x: x.numel(),
        lambda x: x.nelement(),
        lambda x: x.shape[0] * x.shape[1],
    ],
)
def test_a_size_of_a_sharded_dim_knows_that_it_is_local(mode: SpmdTypeMode, size: Callable[[Tensor], int]) -> None:
    x = declared(S(0), 4, 6)
    assert exponents_of(size(x)) == {"dp": -1}
    assert type_on(x.sum() / size(x)) == P("avg")
    assert type_on(x.sum() / (size(x) * comm.size("dp"))) == P
    for other in (declared(R, 4, 6), declared(V, 4, 6), declared(P, 4, 6)):
        assert type(size(other)) is int


def test_sizes_of_parameters_and_of_blocks(mode: SpmdTypeMode) -> None:
    with torch.device("meta"):
        layer = ColumnParallelLinear(4, 8, bias=False)
    assert [exponents_of(size) for size in layer.weight.shape] == [{"tp": -1}, {}]
    fused = declared(R, 12, 4, tp=S(0, 3))
    assert exponents_of(fused.shape[0]) == {"tp": -1}
    both = declared(S(0), 8, tp=S(0))
    assert exponents_of(both.shape[0]) == {"dp": -1, "tp": -1}


def test_a_shape_costs_little(mode: SpmdTypeMode) -> None:
    sharded, whole = declared(S(0), 4, 6), declared(R, 4, 6)
    timed = partial(timeit.repeat, timer=time.thread_time, number=2000, repeat=5)
    cost = [min(timed(lambda x=x: x.shape)) / 2000 for x in (sharded, whole)]
    assert cost[0] < 8e-6 and cost[0] - cost[1] < 4e-6


# --- literals


def known(mode: SpmdTypeMode) -> list[str]:
    return [text for text, _ in mode.assumed]


@pytest.mark.parametrize(
    "call",
    [
        lambda h, b: h.view(b, 2, 4),
        lambda h, b: h.view((b, 2, 4)),
        lambda h, b: h.view(b, 2, -1),
        lambda h, b: h.reshape(b, 2, 4),
        lambda h, b: torch.reshape(h, (b, 2, 4)),
        lambda h, b: h.unflatten(1, (2, 4)),
        lambda h, b: h.unflatten(-1, (2, -1)),
        lambda h, b: h.expand(b, 8),
        lambda h, b: h.view(b, -1, 4).reshape(b, 8),
        lambda h, b: h.view(b, b, 4),  # the size of another axis
        lambda h, b: h.view(b, comm.size("tp"), 4),  # the size of the axis, and not of what is on a rank of it
    ],
)
def test_a_literal_for_a_sharded_dim_is_an_assumption(mode: SpmdTypeMode, call: Any) -> None:
    for times in (1, 2):
        h = declared(S(0), 2, 8, tp=S(1))
        call(h, h.shape[0])
        assert len(known(mode)) == 1 and list(mode.assumed.values()) == [times]
        assert 'sharded over tp: write the whole size // comm.size("tp")' in known(mode)[0]


def test_a_literal_of_a_piece_is_an_assumption(mode: SpmdTypeMode) -> None:
    qkv = declared(R, 12, 4, tp=S(0, 3))
    qkv.split(4)
    assert "split: that 4 is the local size of dim 0" in known(mode)[0]
    mode.assumed.clear()
    qkv.split(12 // 3 * comm.size("tp") // comm.size("tp"))
    assert len(known(mode)) == 1  # plain: the exponents cancel
    mode.assumed.clear()
    qkv.split(8 // comm.size("tp"))
    qkv.split([8 // comm.size("tp")] * 3)
    qkv.split(qkv.shape[0] // 3)
    qkv.narrow(0, 0, qkv.shape[0] // 3)
    qkv.chunk(3)
    assert known(mode) == []
    for index in (slice(4), slice(4, 8), slice(12), (None, slice(4), ..., 0)):
        qkv[index]
        assert len(known(mode)) == 1 and "__getitem__: that " in known(mode)[0], index
        mode.assumed.clear()
    half = qkv.shape[0] // 3
    assert [exponents_of(piece.shape[0]) for piece in (qkv[:half], qkv[half : 2 * half])] == [{"tp": -1}] * 2
    assert qkv[..., :2].shape == (12, 2) and qkv[None, ..., 1].shape == (1, 12) and known(mode) == []
    qkv.narrow(0, 0, 4)
    assert "narrow: that 4 is the local size" in known(mode)[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda h: h.view(h.shape[0], -1, 4),
        lambda h: h.view(*h.shape[:-1], 4 // comm.size("tp"), 4),
        lambda h: h.view(-1, h.shape[-1]),
        lambda h: h.view(h.shape),
        lambda h: h.reshape(h.size(0), h.size(1)),
        lambda h: h.unflatten(-1, (-1, 4)),
        lambda h: h.unflatten(-1, (4 // comm.size("tp"), 4)),
        lambda h: h.expand(3, -1, -1),
        lambda h: h.expand(3, *h.shape),
        lambda h: h.flatten(),
        lambda h: h.view(-1),
        lambda h: h.view(h.numel()),
        lambda h: h.new_zeros(2, 8) + h,
    ],
)
def test_sizes_that_are_known_to_be_local_are_not(mode: SpmdTypeMode, call: Any) -> None:
    h = declared(S(0), 2, 8, tp=S(1))
    call(h)
    assert known(mode) == []


def test_literals_of_dims_that_are_not_sharded_are_not(mode: SpmdTypeMode) -> None:
    declared(R, 2, 8).view(2, 2, 4)
    declared(S(0), 2, 8).view(-1, 2, 4)
    declared(V, 2, 8).view(4, 4)
    assert known(mode) == []


# --- modules that users write


class Attention(nn.Module):
    """Heads by a number that was worked out when the module was made."""

    def __init__(self, divide: bool) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(16, 8)
        self.qkv = ColumnParallelLinear(8, 24, bias=False, stride=3, gather_output=False)
        self.heads = 4 // comm.size("tp") if divide else 2

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        b, s, _ = h.shape
        q, k, v = (piece.view(b, s, self.heads, 2).transpose(1, 2) for piece in self.qkv(h).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).sum()


@pytest.mark.parametrize(("divide", "assumptions"), [(True, 0), (False, 1)])
def test_heads_of_a_module(divide: bool, assumptions: int) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)

    def step(model: nn.Module, _: Any, ids: Tensor) -> None:
        model(ids)

    report = spmd.check(lambda: Attention(divide), ids, {"tp": 2}, step=step)
    assert report.ok, report
    literal = [text for text in report.assumed if "is the local size of dim 2, which is sharded over tp" in text]
    assert len(literal) == assumptions, report.assumed
