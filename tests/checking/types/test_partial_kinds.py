"""Maxima, norms and positions of shards: what they may go through, and that nothing else takes them for the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.checking.types.typed_tensors import checked, typed


@pytest.fixture
def mode():
    with checked() as mode:
        yield mode


def tp(x: torch.Tensor) -> object:
    return spmd.get_local_type(x).get("tp", R)


def test_a_maximum_of_maxima_is_one(mode):
    parts = [typed(4, 8, tp=S(0)).abs().max() for _ in range(2)]
    assert tp(torch.stack(parts).max()) is P("max")
    assert tp(torch.maximum(torch.zeros(()), parts[0])) is P("max")
    assert tp(torch.cat([parts[0].view(1), typed(3)])) is P("max")
    assert tp(parts[0].sqrt()) is P("max")
    for refused in (lambda: parts[0] + 1, lambda: parts[0].square(), lambda: parts[0] / 2, lambda: parts[0].sum()):
        with pytest.raises(SpmdTypeError, match="partial maximum"):
            refused()


def test_positions_beside_a_maximum_are_of_no_use(mode):
    values, positions = typed(4, 8, tp=S(1)).max(1)
    assert tp(values) is P("max")
    with pytest.raises(SpmdTypeError, match="positions in each rank's shard"):
        positions + 1
    with pytest.raises(SpmdTypeError, match="is reduced by max"):
        comm.all_reduce(positions, "tp", op="max")


def test_squares_of_norms_are_summands(mode):
    x = typed(4, 8, tp=S(0))
    norm = x.norm()
    assert str(tp(norm)) == 'P("norm")'
    assert tp(norm**2) is tp(norm.square()) is tp(norm.pow(2)) is P
    assert str(tp(torch.stack([norm, torch.linalg.vector_norm(x)]).norm())) == 'P("norm")'
    refused = (
        lambda: norm**3,
        lambda: norm + 1,
        lambda: norm * 2,
        lambda: norm.sqrt(),
        lambda: x / norm,
        lambda: torch.stack([norm, typed(1).sum()]),
        lambda: torch.stack([norm, norm]).norm(float("inf")),
        lambda: torch.stack([norm, norm]).norm(1),
        lambda: torch.linalg.norm(x, 2),
        lambda: x.norm(3),
        lambda: x.norm("nuc"),
    )
    for call in refused:
        with pytest.raises(SpmdTypeError):
            call()
    with pytest.raises(SpmdTypeError, match="is reduced by sum"):
        comm.all_reduce(norm, "tp")
    with pytest.raises(SpmdTypeError):
        spmd.all_reduce(norm, "tp", src=P, dst=I)


def test_no_loss_is_a_partial_maximum_or_norm(mode):
    for reduce in (torch.amax, torch.norm):
        loss = reduce(typed(4, 8, grad=True, tp=S(0)))
        with pytest.raises(SpmdTypeError, match="backward"):
            loss.backward()


def test_ones_like_a_shard_are_counted_in_part(mode):
    assert tp(torch.ones_like(typed(4, 8, tp=S(0))).sum()) is P
    assert tp(torch.ones(4).sum()) is not P


def test_own_rows_among_pieces_have_no_type(mode):
    shard, others = typed(4, 8, grad=True, tp=S(0)), typed(4, 8, tp=V)
    with pytest.raises(SpmdTypeError, match="this rank's rows among rows"):
        torch.cat([shard, others])
    assert tp(torch.cat([shard.detach(), others])) is V
    buffer = typed(8, 8, tp=R)
    with pytest.raises(SpmdTypeError):
        buffer[:4].copy_(shard)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return comm.all_reduce(x, "tp")

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, "tp") * comm.size("tp")


applied = Twice.apply  # bound before any check


@pytest.mark.skipif(
    not hasattr(torch.autograd.Function.apply, "__func__"), reason="of a torch whose apply is in C, as that of 2.15"
)
def test_a_function_that_was_bound_before_is_checked():
    class Model(nn.Module):
        def __init__(self, apply):
            super().__init__()
            self.apply_function = apply
            self.weight = nn.Parameter(torch.empty(4, 4))
            spmd.set_spec(self, "weight", spmd.ShardSpec("tp", 1, num_partitions=2, full_shape=(4, 8)))

        def forward(self, x):
            return self.apply_function(x @ self.weight.t()).square().mean()

    messages = []
    for apply in (applied, lambda x: Twice.apply(x)):
        report = spmd.check(lambda apply=apply: Model(apply), torch.empty(2, 4), {"tp": 2}, in_types={"tp": S(1)})
        assert not report.ok
        messages.append(report.problems[0].message.partition(" at ")[0])
    assert messages[0] == messages[1]


class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return comm.all_gather(shard, "dp")

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, "dp") / comm.size("dp")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_leaf_averaged_in_backward_is_used_nowhere_else(elsewhere):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            spmd.set_spec(self, "weight", spmd.ShardSpec("dp", 0, num_partitions=2, full_shape=(8, 4)))

        def forward(self, x):
            loss = (x @ Averaged.apply(self.weight).t()).square().mean()
            if elsewhere:
                loss = loss + (self.weight.square().sum() * comm.size("dp"))
            return loss

    def step(model, optimizer, x):
        model(x).backward()
        optimizer.step()

    report = spmd.check(Model, torch.empty(2, 4), {"dp": 2}, step=step)
    assert report.ok is not elsewhere, str(report)


def test_an_int_of_a_share_forgets_its_scale():
    def step(model, optimizer, x):
        items = comm.all_reduce(x.sum(), "dp") / comm.size("dp")
        (model(x).sum() / int(items)).backward()

    report = spmd.check(lambda: nn.Linear(4, 1), torch.empty(2, 4), {"dp": 2}, step=step)
    assert not report.ok and "write x.item() for int(x)" in str(report)


@pytest.mark.parametrize("bug", ["", "first", "second"])
def test_both_branches_of_a_number_that_is_read_are_judged(bug):
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        mean = comm.all_reduce(loss.detach(), "dp") / comm.size("dp")
        good = mean.item() < 3.0
        if not ((good and bug == "first") or (not good and bug == "second")):
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp") / comm.size("dp")
        optimizer.step()

    report = spmd.check(lambda: nn.Linear(4, 1), torch.empty(2, 4), {"dp": 2}, step=step)
    assert report.ok is not bool(bug), str(report)
    assert any("whatever number is read" in text for text in report.assumed)
