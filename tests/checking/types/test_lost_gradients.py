"""Plain verbs have no derivative: a gradient that arrives at what one made is refused, and nothing else is."""

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, typecheck


@pytest.fixture
def mode():
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), typecheck() as mode:
        yield mode


def typed(*shape, tp):
    with spmd.no_typecheck():
        x = torch.randn(*shape, requires_grad=True)
    return spmd.assert_type(x, {"tp": tp})


@pytest.mark.parametrize("async_op", [False, True])
def test_a_gradient_that_arrives_at_a_sum_is_lost(mode, async_op):
    x = typed(4, 2, tp=S(1))
    total = comm.all_reduce(x.sum(1), "tp", async_op=async_op)
    total = total.wait() if async_op else total
    with pytest.raises(SpmdTypeError, match="plain verbs have no derivative") as error:
        spmd.all_reduce((x * total[:, None]).sum(), "tp", dst=I).backward()
    assert error.value.repairs[0] == 'spmd.all_reduce(x.sum(1), "tp", src=spmd.P, dst=spmd.R)'
    assert "detach()" in error.value.repairs[1] and error.value.axis == "tp"


def test_the_typed_operator_gives_it_back(mode):
    x = typed(4, 2, tp=S(1))
    total = spmd.all_reduce(x.sum(1), "tp", src=P, dst=R)
    spmd.all_reduce((x * total[:, None]).sum(), "tp", dst=I).backward()


def test_a_sum_that_is_only_looked_at_is_none(mode):
    x = typed(4, 2, tp=S(1))
    loss = x.sum()
    shown = comm.all_reduce(loss, "tp")
    shown /= 2
    spmd.all_reduce(loss, "tp", dst=I).backward()
    assert not mode.assumed


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_to_all"])
def test_other_verbs(mode, verb):
    x = typed(4, 4, tp=P if verb == "reduce_scatter" else S(0))
    options = dict(split_dim=1, concat_dim=0) if verb == "all_to_all" else dict(dim=0)
    y = getattr(comm, verb)(x, "tp", **options)
    y = y if verb == "all_gather" else spmd.all_gather(y, "tp", dst=R)
    loss = spmd.convert(y.sum(), "tp", src=R, dst=P)
    with pytest.raises(SpmdTypeError, match=rf"comm\.{verb}"):
        loss.backward()


@pytest.mark.parametrize("cut", ["detach", "no_grad"])
def test_what_stops_the_gradient_in_words_is_right(mode, cut):
    x = typed(4, 2, tp=S(1))
    with torch.set_grad_enabled(cut == "detach"):
        total = comm.all_reduce((x.detach() if cut == "detach" else x).sum(1), "tp")
    spmd.all_reduce((x * total[:, None]).sum(), "tp", dst=I).backward()
    assert x.grad is not None


def test_a_maximum_is_assumed_to_be_a_constant(mode):
    x = typed(4, 2, tp=S(1))
    top = comm.all_reduce(x.amax(1), "tp", op="max")
    spmd.all_reduce((x - top[:, None]).exp().sum(), "tp", dst=I).backward()
    assert any("no gradient flows through the max" in text for text, _ in mode.assumed)
