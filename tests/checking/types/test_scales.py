"""Scales: sums and means over the ranks, and what divides by the size of an axis."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.types import scaled

DP = Mesh(2)
N = 2


def typed(*shape, dp, requires_grad=False):
    return spmd.assert_type(torch.randn(shape, requires_grad=requires_grad), {"dp": dp})


def dp_type(x):
    return spmd.get_local_type(x).get("dp", R)


@pytest.fixture
def mode():
    with comm.as_rank(DP, 0):
        given = dict(
            x=typed(4, 8, dp=S(0)), y=typed(4, 8, dp=S(0)), w=typed(8, dp=R), p=typed(4, dp=P), m=typed(4, dp=P("avg"))
        )
        with spmd.SpmdTypeMode(DP) as mode:
            mode.given = given
            yield mode


def test_types_at_a_scale():
    assert P("avg") is scaled(P, 1) and scaled(P("avg"), -1) is P and P("sum") is P
    assert str(scaled(R, 1)) == "N*R" and str(scaled(S(1), -2)) == "S(1)/N^2" and str(P("avg")) == 'P("avg")'
    assert spmd.dual(P("avg")) is scaled(R, -1) and spmd.dual(scaled(S(0), 1)) == scaled(S(0), -1)
    with pytest.raises(ValueError, match='P\\("sum"\\), P\\("avg"\\) and P\\("max"\\)'):
        P("mean")


RESULTS = {
    "a sum": (lambda x, **_: x.sum(), P),
    "a mean": (lambda x, **_: x.mean(), P("avg")),
    "a mean over the other dim": (lambda x, **_: x.mean(1), S(0)),
    "a mean loss": (lambda x, y, **_: F.mse_loss(x, y), P("avg")),
    "a sum over the local size": (lambda x, **_: x.sum() / x.shape[0], P("avg")),
    "a sum over len": (lambda x, **_: x.sum() / len(x), P("avg")),
    "a sum over numel": (lambda x, **_: x.sum() / x.numel(), P("avg")),
    "a sum over the global size": (lambda x, **_: x.sum() / (x.shape[0] * comm.size("dp")), P),
    "a mean over the ranks": (lambda m, **_: m / comm.size("dp"), P),
    "a sum times the ranks": (lambda p, **_: p * comm.size("dp"), P("avg")),
    "the sum of means": (lambda m, **_: comm.all_reduce(m, "dp"), scaled(R, 1)),
    "the mean of means": (lambda m, **_: comm.all_reduce(m, "dp") / comm.size("dp"), R),
    "the mean by the operator": (lambda m, **_: spmd.all_reduce(m, "dp", src=P("avg"), dst=I), I),
    "a mean plus what all have": (lambda m, w, **_: m + w[:4], P("avg")),
    "a mean plus a constant": (lambda m, **_: m + 0.5, P("avg")),
    "a sum plus a share": (lambda p, w, **_: p + w[:4] / comm.size("dp"), P),
    "a bias as a share": (lambda x, w, **_: F.linear(x.t(), x.t(), w / comm.size("dp")), P),
    "shares, added up": (lambda w, **_: comm.all_reduce(w / comm.size("dp"), "dp"), R),
    "a norm of a sum of means": (lambda m, **_: comm.all_reduce(m, "dp").norm(), scaled(R, 1)),
    "a comparison with 0": (lambda m, **_: comm.all_reduce(m, "dp") > 0, R),
    "finite": (lambda m, **_: torch.isfinite(m), V),
}


@pytest.mark.parametrize("what", RESULTS)
def test_the_scale_of_a_result(mode, what):
    function, expected = RESULTS[what]
    assert dp_type(function(**mode.given)) == expected


REFUSED = {
    "a mean plus a sum": (lambda m, p, **_: m + p, "differ by a power of N"),
    "what all have plus a sum of means": (lambda m, w, **_: comm.all_reduce(m, "dp") + w[:4], "differ by a power of N"),
    "a sum plus what all have": (lambda p, w, **_: p + w[:4], "once for each rank"),
    "a product with a sum of means plus what all have": (
        lambda m, w, **_: torch.addmm(w[:4], comm.all_reduce(m, "dp").view(4, 1), w[:4].view(1, 4)),
        "differ by a power of N",
    ),
    "the logarithm of a sum of means": (lambda m, **_: comm.all_reduce(m, "dp").log(), "divide first"),
    "a sum taken for a mean": (lambda p, **_: spmd.all_reduce(p, "dp", src=P("avg"), dst=R), 'not P\\("avg"\\)'),
    "weighted means": (
        lambda x, **_: F.cross_entropy(x, torch.zeros(4, dtype=torch.long), weight=torch.ones(8)),
        "the weights of this rank's own targets",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_together(mode, what):
    function, words = REFUSED[what]
    if what == "weighted means":
        labels = spmd.trust(torch.zeros(4, dtype=torch.long), "dp", V)
        spmd.assert_type(labels, {"dp": S(0)})
        with pytest.raises(SpmdTypeError, match=words):
            F.cross_entropy(mode.given["x"], labels, weight=torch.ones(8))
        return
    with pytest.raises(SpmdTypeError, match=words):
        function(**mode.given)


def test_the_mean_by_an_operator_has_its_value_and_its_gradient():
    def main():
        x = torch.tensor([1.0, 2.0], dtype=torch.float64).mul(comm.rank("dp") + 1).requires_grad_()
        y = spmd.all_reduce(x, "dp", src=P("avg"), dst=R)
        y.backward(torch.tensor([1.0, 3.0], dtype=torch.float64) + comm.rank("dp"))
        piece = spmd.reduce_scatter(x.detach(), "dp", src=P("avg"), dst=S(0))
        return y.detach().tolist(), x.grad.tolist(), piece.tolist()

    for rank, (y, grad, piece) in enumerate(threads.run(DP, main)):
        assert y == [1.5, 3.0] and grad == [1.5, 3.5] and piece == [[1.5], [3.0]][rank]


def test_a_mean_of_integers_is_refused_at_run_time():
    with comm.as_rank(DP, 0), pytest.raises(SpmdTypeError, match="a mean is no integer"):
        spmd.all_reduce(torch.ones(2, dtype=torch.long), "dp", src=P("avg"), dst=R)


# --- whole steps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return self.net(x)


def summed(model):
    for param in model.parameters():
        param.grad = comm.all_reduce(param.grad, "dp")


def divided_first(model):
    for param in model.parameters():
        param.grad.div_(comm.size("dp"))
        comm.all_reduce(param.grad, "dp", out=param.grad)


MEAN, SUM = (lambda y: y.pow(2).mean()), (lambda y: y.pow(2).sum())
STEPS = {
    "mean, averaged": (MEAN, nxd.reduce_gradients, ""),
    "mean, summed": (MEAN, summed, "too large by the size of dp"),
    "mean, divided and summed": (MEAN, divided_first, ""),
    "sum, averaged": (SUM, nxd.reduce_gradients, "too small by the size of dp"),
    "sum, summed": (SUM, summed, ""),
    "share of a mean, summed": (lambda y: MEAN(y) / comm.size("dp"), summed, ""),
    "mean, not reduced": (MEAN, lambda model: None, "the parts are not added up"),
    "equal mean, averaged": (lambda y: spmd.all_reduce(MEAN(y), "dp", src=P("avg"), dst=R), nxd.reduce_gradients, ""),
    "one mean, averaged": (
        lambda y: spmd.all_reduce(MEAN(y), "dp", src=P("avg"), dst=I),
        nxd.reduce_gradients,
        "too small",
    ),
}


def check(step, **options):
    return spmd.check(Net, {"x": torch.zeros(4, 8)}, {"dp": 2}, step=step, **options)


@pytest.mark.parametrize("what", STEPS)
def test_losses_and_the_reduction_of_their_gradients(what):
    loss, reduce, words = STEPS[what]

    def step(model, optimizer, batch):
        loss(model(batch["x"])).backward()
        reduce(model)
        optimizer.step()

    report = check(step)
    assert report.ok == (not words), str(report)
    if words:
        assert words in report.problems[0].message and "repair:" in report.problems[0].message


def test_zero1_averages_itself():
    def step(loss):
        def run(model, optimizer, batch):
            loss(model(batch["x"])).backward()
            nxd.reduce_gradients(model, average_over_data=False)
            optimizer.step()

        return run

    options = dict(optimizer=lambda params: nxd.NeuronZero1Optimizer(params, torch.optim.AdamW))
    assert check(step(MEAN), **options).ok
    (problem,) = check(step(SUM), **options).problems
    assert "too small by the size of dp" in problem.message and "NeuronZero1Optimizer divides" in problem.message


def test_gradients_of_a_sum_and_of_a_mean_are_not_accumulated():
    def step(model, optimizer, batch):
        MEAN(model(batch["x"])).backward()
        SUM(model(batch["x"])).backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    (problem,) = check(step).problems
    assert "when backward added to it" in problem.message


def test_a_buffer_that_keeps_a_part_of_a_mean():
    def step(reduced):
        def run(model, optimizer, batch):
            y = model(batch["x"])
            mean = y.detach().mean(0)
            model.seen.mul_(0.9).add_(spmd.all_reduce(mean, "dp", src=P("avg"), dst=R) if reduced else mean, alpha=0.1)
            MEAN(y).backward()
            nxd.reduce_gradients(model)
            optimizer.step()

        return run

    assert check(step(True)).ok
    (problem,) = check(step(False)).problems
    assert "buffer seen [4] after the step" in problem.message and 'P("avg")' in problem.message


def test_an_optimizer_that_a_module_holds():
    def model_fn():
        model = Net()
        model.head = torch.optim.SGD(model.net[2].parameters(), lr=0.1)
        return model, torch.optim.SGD(model.net[0].parameters(), lr=0.1)

    def step(reduced):
        def run(model, optimizer, batch):
            MEAN(model(batch["x"])).backward()
            for holder in (optimizer, model.head):
                for param in holder.param_groups[0]["params"] if holder is optimizer or reduced else ():
                    param.grad = comm.all_reduce(param.grad, "dp") / comm.size("dp")
                holder.step()

        return run

    inputs = {"x": torch.zeros(4, 8)}
    assert spmd.check(model_fn, inputs, {"dp": 2}, step=step(True)).ok
    assert "the parts are not added up" in str(spmd.check(model_fn, inputs, {"dp": 2}, step=step(False)))


def test_a_count_from_this_rank_on_is_a_shard():
    def model_fn():
        return nn.Linear(4, 4, bias=False)

    def step(model, optimizer, batch):
        x = model(batch)
        rows = comm.rank("dp") * x.shape[0] + torch.arange(x.shape[0])
        (x * (rows[:, None] >= torch.arange(4)[None])).pow(2).mean().backward()
        nxd.reduce_gradients(model)
        optimizer.step()

    report = spmd.check(model_fn, torch.zeros(4, 4), {"dp": 2}, step=step)
    assert report.ok and not report.assumed, str(report)


def test_pieces_of_a_parameter_by_itself():
    """Slices of a sharded weight beside matching ones of the next; not of what a layer gives."""
    with comm.as_rank(Mesh(2, tp=2), 0):
        up = spmd.assert_type(nn.Parameter(torch.randn(8, 4)), {"tp": S(0)})
        down = spmd.assert_type(nn.Parameter(torch.randn(4, 8)), {"tp": S(1)})
        x = spmd.assert_type(torch.randn(2, 4), {"tp": R})
        with spmd.SpmdTypeMode({"tp": 2}) as mode:
            total = sum(F.linear(F.linear(x, up[i : i + 4]).relu(), down[:, i : i + 4]) for i in (0, 4))
            assert spmd.get_local_type(total) == {"tp": P} and mode.assumed
            with pytest.raises(SpmdTypeError, match="parts of each rank's piece"):
                F.linear(F.linear(x, up[:4]), down[:, 4:])
            with pytest.raises(SpmdTypeError, match="a slice takes a range"):
                F.linear(x, up)[:, :4]
