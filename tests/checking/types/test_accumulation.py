"""Gradients that may stand in place of one of some type, and gradients that add up."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.handlers.accumulation import adds_up, fits
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.tensor_type import TensorType
from neuronx_dist.spmd.types import ZERO, scaled

MEAN = P("avg")
TYPES = (R, I, V, P, MEAN, S(0), S(1), S(0, 2), scaled(S(0), 1))
# expected -> the actual types that fit, ZERO apart, which fits everywhere
FITTING = {
    R: {R, I},
    I: {R, I},
    V: {R, I, V, P, S(0), S(1), S(0, 2)} - {P},
    P: {P, V},
    MEAN: {R, MEAN},
    S(0): {R, I, V, S(0)},
    S(1): {R, I, V, S(1)},
    S(0, 2): {R, I, V, S(0, 2)},
    scaled(S(0), 1): {scaled(S(0), 1)},
}


@pytest.mark.parametrize("expected", TYPES, ids=str)
def test_what_fits(expected):
    assert {actual for actual in TYPES if fits(actual, expected)} == FITTING[expected]
    assert fits(ZERO, expected)


def test_what_adds_up():
    def of(tp=None, dp=None):
        return TensorType.of({axis: kind for axis, kind in (("tp", tp), ("dp", dp)) if kind is not None})

    for before, added in (
        (P, P),
        (S(0), S(0)),
        (ZERO, P),
        (ZERO, S(1)),
        (R, MEAN),
        (R, R),
        (scaled(R, 1), scaled(P, 2)),
    ):
        assert adds_up(of(before), of(added)) and adds_up(of(before, P), of(added, P))
        assert not adds_up(of(before, P), of(added, I)) and not adds_up(of(before), of(added, P))
    for before, added in ((P, S(0)), (R, P), (I, MEAN), (S(0), S(1)), (MEAN, R), (P, ZERO), (R, scaled(P, 2))):
        assert not adds_up(of(before), of(added))
    assert adds_up(of(), of()) and not adds_up(of(P), of())


@pytest.mark.parametrize("tp, reported", [(R, "the loss is R"), (V, "the loss is V"), (I, ""), (P, "")])
def test_a_loss_is_looked_at_on_every_axis(tp, reported):
    """Also behind pp, where each stage has its own."""
    x = torch.ones(2, 2, requires_grad=True)
    with comm.as_rank(Mesh(8, tp=2, pp=2), 0, CheckBackend()), spmd.SpmdTypeMode():
        spmd.assert_type(x, {"pp": V, "dp": P, "tp": tp})
        if reported:
            with pytest.raises(SpmdTypeError, match=f"on tp {reported}"):
                x.sum().backward()
        else:
            x.sum().backward()
        x.detach().sum()  # what receives no gradient may be anything


class Through(torch.autograd.Function):
    """A function whose backward is another function than its forward's."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None


RETURNED = {
    "summed twice": (
        R,
        P,
        lambda grad: comm.all_reduce(grad, "tp"),
        "it is added up here, and again where the input is made",
        ["drop the reduction over tp in ", 'spmd.convert(x, "tp", src=spmd.R, dst=spmd.I'],
    ),
    "not summed": (
        I,
        I,
        lambda grad: spmd.convert(grad, "tp", src=I, dst=P, expert_mode=True),
        "each rank returns its part of it, and the parts are not added up",
        ['comm.all_reduce(grad_x, "tp") in ', 'spmd.convert(x, "tp", src=spmd.I, dst=spmd.R'],
    ),
    "another shard": (
        S(0),
        S(0),
        lambda grad: spmd.all_to_all(grad, "tp", src=S(0), dst=S(1)).reshape(2, 2),
        "",
        ["", ""],
    ),
}


@pytest.mark.parametrize("what", RETURNED)
def test_what_a_backward_returns_is_the_gradient_of_what_it_was_given(what):
    kind, seed, back, words, repairs = RETURNED[what]
    x, gradient = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), spmd.SpmdTypeMode():
        spmd.assert_type(x, {"tp": kind})
        spmd.assert_type(gradient, {"tp": seed})
        with pytest.raises(SpmdTypeError, match=words) as caught:
            Through.apply(x, back).backward(gradient)
    assert len(caught.value.repairs) == len(repairs), caught.value.repairs
    assert all(part in repair for part, repair in zip(repairs, caught.value.repairs)), caught.value.repairs


def test_a_backward_returns_parts_for_what_is_r_on_every_axis():
    """The dual of R is P, also if no axis is named."""
    data = torch.ones(2, 2)
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), spmd.SpmdTypeMode():
        spmd.assert_type(data, {"tp": S(0)})
        for declared in ({}, {"tp": R}):
            for back, fitting in ((lambda grad: grad, True), (lambda grad: comm.all_reduce(grad, "tp"), False)):
                x = spmd.assert_type(torch.ones(2, requires_grad=True), declared)
                loss = (Through.apply(x, back) * data).sum()
                if fitting:
                    loss.backward()
                else:
                    with pytest.raises(SpmdTypeError, match="it is added up here, and again where"):
                        loss.backward()


@pytest.mark.parametrize(
    "loss, seed, fitting", [(P, I, True), (P, R, True), (I, P, False), (S(0), S(0), True), (P, V, False)]
)
def test_a_gradient_that_is_given_is_of_the_dual_type(loss, seed, fitting):
    x, gradient = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), spmd.SpmdTypeMode():
        spmd.assert_type(x, {"tp": loss})
        spmd.assert_type(gradient, {"tp": seed})
        if fitting:
            (x * 1).backward(gradient)
        else:
            with pytest.raises(SpmdTypeError, match="the gradient passed to backward must be"):
                (x * 1).backward(gradient)


@pytest.mark.parametrize("mesh, seed, fitting", [("tp", P, True), ("tp", R, False), ("tp", I, False), ("pp", R, True)])
def test_the_gradient_of_a_loss_that_is_r_on_every_axis_is_p(mesh, seed, fitting):
    """A loss made inside of the check names no axis; what it may be given is as where it is declared R."""
    gradients = torch.ones(2), torch.ones(2)
    with comm.as_rank(Mesh(2, **{mesh: 2}), 0, CheckBackend()), spmd.SpmdTypeMode():
        x = torch.ones(2, requires_grad=True)
        declared = spmd.assert_type(torch.ones(2, requires_grad=True), {mesh: R})
        for loss, gradient in zip((x * 1, declared * 1), gradients):
            spmd.assert_type(gradient, {mesh: seed})
            if fitting:
                loss.backward(gradient)
            else:
                with pytest.raises(
                    SpmdTypeError, match=f"on tp the gradient passed to backward must be P, but is {seed}"
                ):
                    loss.backward(gradient)


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_a_loss_that_is_r_may_be_given_a_gradient_that_is_r_where_ranks_have_other_data(axis):
    """A loss that is R is a mean already, as by `backward()` alone: gradients are not to be averaged again."""
    with comm.as_rank(Mesh(2, **({} if axis == "dp" else {axis: 2})), 0, CheckBackend()), spmd.SpmdTypeMode() as mode:
        scales = []
        for gradient in (None, torch.ones(())):
            torch.ones(2, requires_grad=True).sum().backward(gradient)
            scales.append(dict(mode.gradient_scales))
        assert scales[0] == scales[1] == {axis: 1}
