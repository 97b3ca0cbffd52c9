"""Custom autograd functions: an output that is equal on all ranks is I or R, as the backward is right for."""

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, SpmdTypeError, get_local_type, typecheck


class Function(torch.autograd.Function):
    """The identity, or the sum over ranks, forward; and backward the other."""

    @staticmethod
    def forward(ctx, x, sums, sums_backward):
        ctx.sums_backward = sums_backward
        return comm.all_reduce(x, "tp") if sums else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (comm.all_reduce(grad, "tp") if ctx.sums_backward else grad), None, None


@pytest.fixture
def mode():
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), typecheck() as mode:
        yield mode


def typed(tp):
    with spmd.no_typecheck():
        x = torch.randn(4, requires_grad=True)
    return spmd.assert_type(x, {"tp": tp})


@pytest.mark.parametrize(
    "given, sums, sums_backward, expected",
    [(I, False, True, R), (I, False, False, I), (R, False, False, R), (P, True, False, I), (P, True, True, R)],
    ids=["f", "identity of I", "identity of R", "g", "sum both ways"],
)
def test_the_flavour_is_that_of_the_backward(mode, given, sums, sums_backward, expected):
    x = typed(given)
    for _ in range(2):  # the second is looked up
        y = Function.apply(x, sums, sums_backward)
        assert get_local_type(y)["tp"] is expected
    loss = y.square().sum()
    (spmd.convert(loss, "tp", src=R, dst=P) if expected is R else loss).backward()


def test_an_identity_of_r_that_sums_backward_is_wrong_either_way(mode):
    y = Function.apply(typed(R), False, True)
    with pytest.raises(SpmdTypeError, match=r"Function\.backward"):
        spmd.convert(y.sum(), "tp", src=R, dst=P).backward()


def test_the_trial_leaves_no_trace(mode):
    before = mode.collectives
    Function.apply(typed(I), False, True)
    assert mode.collectives == before and not comm.current().backend.events
