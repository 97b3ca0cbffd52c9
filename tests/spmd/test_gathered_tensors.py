"""Detection of gathered tensors in autograd graphs: through which functions, over which ranks, how far back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import R, S, V
from neuronx_dist.spmd.gathered_tensors import _ELEMENTWISE, is_gathered

MESH = Mesh(4, tp=2)
MASK = torch.ones(3, 8, dtype=torch.bool)
BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Add": lambda x: x + 1,
    "Alias": torch.ops.aten.alias,
    "Clamp": lambda x: x.clamp(0, 1),
    "ClampMax": lambda x: x.clamp_max(1),
    "ClampMin": lambda x: x.clamp_min(0),
    "Clone": lambda x: x.clone(),
    "Div": lambda x: x / 2,
    "Expand": lambda x: x.expand(2, 3, 8),
    "MaskedFill": lambda x: x.masked_fill(MASK, 0),
    "Mul": lambda x: x * 2,
    "Neg": lambda x: -x,
    "Permute": lambda x: x.unsqueeze(0).permute(1, 0, 2),
    "ReshapeAlias": lambda x: torch.ops.aten._reshape_alias(x, [3, 1, 8], [8, 8, 1]),
    "Slice": lambda x: x[1:],
    "Squeeze": lambda x: x[:1].squeeze(0),
    "Sub": lambda x: x - 1,
    "Tanh": torch.tanh,
    "ToCopy": lambda x: x.double(),
    "Transpose": lambda x: x.unsqueeze(0).transpose(0, 1),
    "UnsafeView": lambda x: torch.ops.aten._unsafe_view(x, [3, 1, 8]),
    "Unsqueeze": lambda x: x.unsqueeze(0),
    "View": lambda x: x.view(1, 3, 8),
    "Where": lambda x: torch.where(MASK, x, 0.0),
}
NOT = {
    "a product of matrices": lambda x: x @ torch.eye(8),
    "exp": torch.exp,
    "softmax": lambda x: x.softmax(-1),
    "a part of the last dim": lambda x: x[:, :4],
    "another last dim": lambda x: x.t(),
    "detached": lambda x: x.detach(),
    "a sum": lambda x: x.sum(),
    "a sum to the same shape": lambda x: x.cumsum(-1),
}


def gathered(src=None, axis: str = "tp", **options) -> torch.Tensor:
    x = torch.ones(3, 4, requires_grad=True)
    return spmd.all_gather(x, axis, src=S(1) if src is None else src, dst=R, **options)


def test_the_table_is_tried_out() -> None:
    assert {*BETWEEN} == _ELEMENTWISE


@pytest.mark.parametrize("name", BETWEEN)
def test_through_functions_of_each_element_and_views(name: str) -> None:
    with comm.as_rank(MESH, 0):
        x = gathered()
        assert x.shape == (3, 8) and is_gathered(x, comm.communicator("tp"))
        y = BETWEEN[name](x)
        assert y.grad_fn.name().partition("Backward")[0] == name
        assert is_gathered(y, comm.communicator("tp"))


@pytest.mark.parametrize("name", NOT)
def test_not_through_others(name: str) -> None:
    with comm.as_rank(MESH, 0):
        assert not is_gathered(NOT[name](gathered()), comm.communicator("tp"))


def test_over_these_ranks_and_along_the_last_dim() -> None:
    with comm.as_rank(MESH, 0):
        tp, dp, plain = comm.communicator("tp"), comm.communicator("dp"), torch.ones(3, 4, requires_grad=True)
        assert not is_gathered(gathered(), dp) and is_gathered(gathered(axis="dp"), dp)
        assert not is_gathered(gathered(S(0)), tp) and is_gathered(gathered(S(-1)), tp)
        assert is_gathered(gathered(V, gather_dim=2), tp) and not is_gathered(gathered(V), tp)
        assert not is_gathered(plain, tp) and not is_gathered(spmd.all_reduce(plain * 1, "tp", dst=R), tp)
        assert is_gathered(torch.zeros(3, 8, requires_grad=True) + gathered(), tp)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_without_a_graph_through_views(requires_grad: bool) -> None:
    with comm.as_rank(MESH, 0), torch.set_grad_enabled(not requires_grad):
        tp, dp = comm.communicator("tp"), comm.communicator("dp")
        x = torch.ones(3, 4, requires_grad=requires_grad)
        y = spmd.all_gather(x, tp, src=S(1), dst=R)
        assert y.grad_fn is None and is_gathered(y, tp) and is_gathered(y[1:].unsqueeze(0), tp)
        assert not is_gathered(y, dp) and not is_gathered(y[:, :4], tp) and not is_gathered(y * 1, tp)
        assert not is_gathered(spmd.all_gather(x, tp, src=S(0), dst=R), tp) and not is_gathered(x, tp)


def test_as_far_back_as_64_nodes() -> None:
    with comm.as_rank(MESH, 0):
        for count, found in ((63, True), (64, False)):
            x = gathered()
            for _ in range(count):
                x = x + 1
            assert is_gathered(x, comm.communicator("tp")) == found
