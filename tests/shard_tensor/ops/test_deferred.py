"""`one_exchange()`: consecutive windows exchange halos once, with the values and gradients of one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, distribute_tensor, one_exchange, report
from neuronx_dist.shard_tensor.ops.deferred import Deferred
from neuronx_dist.shard_tensor.tensor import local_of
from tests.shard_tensor.support.cases import MESHES, Case, assert_close, on_ranks, run_case, verbs

IMAGE, WEIGHTS = (2, 2, 16, 5), [(3, 2, 3, 3), (3,), (2, 3, 3, 3)]


REFLECTING, REPLICATING = (
    nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode, bias=False) for mode in ("reflect", "replicate")
)


def composed(function: Any) -> Any:
    def call(*operands: torch.Tensor) -> Any:
        with one_exchange():
            return function(*operands)

    return call


def two(x: Any, w: Any, b: Any, v: Any) -> Any:
    return F.conv2d(F.gelu(F.conv2d(x, w, b, padding=1)) * 0.5, v, padding=1, stride=2)


def skipping(x: Any, w: Any, b: Any, v: Any) -> Any:
    h = F.silu(F.conv2d(x, w, b, padding="same"))
    return F.conv2d(h, v, padding=2, dilation=2) + h[:, :2]


def normalised(x: Any, w: Any, b: Any, v: Any) -> Any:
    return F.conv2d(F.group_norm(F.conv2d(x, w, b, padding=1), 1), v, padding=1).relu()


def pooled(x: Any, w: Any) -> Any:
    y = F.avg_pool2d(F.tanh(F.max_pool2d(x, 3, 2, 1)), 2)
    return F.conv2d(F.pad(y, (1, 1, 2, 2), mode="circular"), w)


def padded(x: Any, w: Any) -> Any:
    return REFLECTING._conv_forward(REPLICATING._conv_forward(x, w, None), w, None)


def with_positions(x: Any, w: Any) -> Any:
    y, _ = F.max_pool2d(F.conv2d(x, w), 2, return_indices=True)
    return F.avg_pool2d(y, 3, 2, 1, count_include_pad=False)


CASES = [
    Case("two", composed(two), [IMAGE, *WEIGHTS]),
    Case("with a skip connection", composed(skipping), [IMAGE, *WEIGHTS]),
    Case("a reduction between", composed(normalised), [IMAGE, *WEIGHTS]),
    Case("plain weights", composed(two), [IMAGE, *WEIGHTS], plain=(1, 2, 3)),
    Case("pooling and padding", composed(pooled), [IMAGE, (2, 2, 3, 1)]),
    Case("padding modes", composed(padded), [IMAGE, (2, 2, 3, 3)]),
    Case("positions of maxima, divisors that differ", composed(with_positions), [IMAGE, (2, 2, 3, 3)]),
    Case("two heads", composed(lambda x, w, v: (F.conv1d(F.conv1d(x, w), v, padding=2), F.conv1d(x, w).tanh())),
         [(2, 2, 16), (2, 2, 3), (2, 2, 4)]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, mesh: tuple[int, ...]) -> None:
    assert run_case(case, mesh, most=8) > 0


SPLITS = [None, (11, 5), (2, 9, 5), (1, 12, 0, 3), (0, 16)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_two_convolutions_exchange_once_each_way(split: tuple[int, ...] | None) -> None:
    def operands() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in (IMAGE, *WEIGHTS)]

    plain = operands()
    expected = two(*plain)
    (expected**2).sum().backward()

    def rank(mesh: Any) -> Any:
        x, *weights = operands()
        x = distribute_tensor(x, mesh, [Shard(2)], sizes=[split], src=None)
        weights = [distribute_tensor(w, mesh, [Replicate()], src=None) for w in weights]
        with comm.record() as forward, report() as r, one_exchange():
            y = two(x, *weights)
            assert isinstance(y, Deferred) and not r.calls
        assert type(y) is ShardTensor and y.requires_grad and not y.is_leaf
        assert_close(y.full_tensor().detach(), expected.detach(), "value")
        loss = (y**2).sum()
        with comm.record() as backward:
            loss.backward()
        for given, whole in zip((x, *weights), plain):
            assert_close(given.grad.full_tensor(), whole.grad, "gradient")
        return forward, backward, r

    for forward, backward, r in on_ranks(len(split or (8, 8)), rank):
        once = [] if split == (0, 16) else ["exchange"]
        assert verbs(forward) == once
        assert sorted(verbs(backward)) == ["all_reduce"] * 2 + once
        assert len(r.notes) == 1


def test_the_report_says_what_is_saved_and_what_is_computed_twice() -> None:
    def rank(mesh: Any) -> Any:
        x = distribute_tensor(torch.ones(1, 2, 16, 8), mesh, [Shard(2)], src=None)
        w, v = torch.ones(6, 2, 3, 3), torch.ones(2, 6, 3, 3)
        with report() as once, one_exchange():
            F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
        with report() as apart:
            F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
        return once, apart

    row = 8 * 4
    for once, apart in on_ranks(2, rank):
        assert (once.collectives, once.bytes) == (1, 2 * 2 * row)  # two rows of two channels
        assert (apart.collectives, apart.bytes) == (2, 2 * row + 6 * row)
        assert once.notes == [
            (
                "one_exchange",
                "conv2d, conv2d after 1 exchange of 128 bytes, apart 2 of 256: saves 128 bytes, computes 2 positions "
                "of dim 2 twice",
            )
        ]


def parts(mesh: Any, n: int = 16) -> tuple[Any, Any, Any]:
    """An image in shards of 11 and 5 rows, and two plain weights; float64 leaves."""
    g = torch.Generator().manual_seed(0)
    x, w, v = (
        torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in (IMAGE, (2, 2, 3, 3), (2, 2, 3, 3))
    )
    return distribute_tensor(x, mesh, [Shard(2)], sizes=[(11, 5)], src=None), w, v


class Doubled(torch.autograd.Function):
    """Of a user: it does not know ShardTensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_foreign_autograd_function_of_a_deferred_tensor_keeps_the_graph() -> None:
    def rank(mesh: Any) -> None:
        grads = []
        for function in (Doubled.apply, lambda x: x * 2):
            x, w, v = parts(mesh)
            with one_exchange():
                y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
                z = function(y)
            (z.square().sum() + y.sum()).backward()
            grads.append([x.grad.full_tensor(), w.grad, v.grad])
        for mine, expected in zip(*grads, strict=True):
            assert_close(mine, expected, "gradient")

    on_ranks(2, rank)


def test_a_foreign_autograd_function_after_the_block_computes_nothing_again() -> None:
    def rank(mesh: Any) -> None:
        x, w, v = parts(mesh)
        with one_exchange():
            y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
        z = Doubled.apply(y)
        with comm.record() as calls:
            z.sum().backward()
        assert sorted(verbs(calls)) == ["all_reduce"] * 3 + ["exchange"]  # of the sum and both weights

    on_ranks(2, rank)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    def rank(mesh: Any) -> None:
        grads = []
        for context in (one_exchange, nullcontext):
            x, w, v = parts(mesh)

            def block(x: Any, w: Any = w, v: Any = v) -> Any:
                return F.conv2d(F.conv2d(x, w, padding=1).tanh(), v, padding=1)

            with context():
                y = checkpoint(block, x, use_reentrant=reentrant)
            y.square().sum().backward()
            grads.append([x.grad.full_tensor(), w.grad, v.grad])
        for mine, expected in zip(*grads, strict=True):
            assert_close(mine, expected, "gradient")

    on_ranks(2, rank)


def test_double_backward() -> None:
    def rank(mesh: Any) -> None:
        results = []
        for context in (one_exchange, nullcontext):
            x, w, v = parts(mesh)
            with context():
                y = F.conv2d(F.conv2d(x, w, padding=1).tanh(), v, padding=1)
            (grad,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
            grad.square().sum().backward()
            results.append([x.grad.full_tensor(), w.grad, v.grad])
        for mine, expected in zip(*results, strict=True):
            assert_close(mine, expected, "gradient of a gradient")

    on_ranks(2, rank)


def test_without_gradients_and_at_its_borders() -> None:
    """No graph is kept under no_grad; what was begun outside of the block, or without gradients, is not continued."""

    def rank(mesh: Any) -> None:
        x, w, v = parts(mesh)
        with comm.record() as calls, one_exchange(), torch.no_grad():
            y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
            local_of(y)
        assert verbs(calls) == ["exchange"] and not y.requires_grad
        with comm.record() as calls, one_exchange():
            with torch.no_grad():
                h = F.conv2d(x, w, padding=1)
            y = F.conv2d(h, v, padding=1)
        assert verbs(calls) == ["exchange"] * 2 and not h.requires_grad and y.requires_grad
        y.sum().backward()
        assert w.grad is None and v.grad is not None
        with comm.record() as calls:
            F.conv2d(x, w, padding=1)
        assert verbs(calls) == ["exchange"]
        with one_exchange(), torch.autocast("cpu", torch.bfloat16):
            z = F.conv2d(x.float(), w.float(), padding=1)
            assert type(z) is ShardTensor and z.dtype is torch.bfloat16
        with one_exchange():
            z = F.conv2d(x.float(), w.float(), padding=1)
            with torch.autocast("cpu", torch.bfloat16):
                assert local_of(z).dtype is torch.float32
        with one_exchange(), torch.inference_mode():
            assert type(F.conv2d(x.detach(), w, padding=1)) is ShardTensor

    on_ranks(2, rank)


def test_what_an_error_leaves_is_not_computed() -> None:
    def rank(mesh: Any) -> None:
        x, w, _ = parts(mesh)
        with comm.record() as calls, pytest.raises(KeyError), one_exchange():
            F.conv2d(x, w, padding=1)
            raise KeyError
        assert not calls

    on_ranks(2, rank)


def test_a_convolution_that_does_not_fit_is_refused_where_it_is_called() -> None:
    def rank(mesh: Any) -> None:
        x, w, _ = parts(mesh)
        with one_exchange():
            with pytest.raises(RuntimeError, match="expected input"):
                F.conv2d(x, torch.ones(2, 3, 3, 3, dtype=torch.float64))
            with pytest.raises(ValueError, match="a window of 31 .* does not fit into 16 inputs"):
                F.conv2d(F.conv2d(x, w, padding=1), w, dilation=15)

    on_ranks(2, rank)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_inputs_that_are_modified_before_the_result_is_computed_are_refused(which: str) -> None:
    def rank(mesh: Any) -> None:
        x, w, _ = parts(mesh)
        with (
            pytest.raises(RuntimeError, match="one_exchange: conv2d: an input or a weight was modified in place"),
            one_exchange(),
        ):
            y = F.conv2d(x, w, padding=1)
            with torch.no_grad():
                (x if which == "input" else w).mul_(2)
            y.sum()

    on_ranks(2, rank)


def test_the_type_checker_follows() -> None:
    def rank() -> None:
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode():
            x = distribute_tensor(torch.randn(IMAGE).requires_grad_(), mesh, [Shard(2)], src=None)
            w, v = (torch.ones(2, 2, 3, 3, requires_grad=True) for _ in range(2))
            for weight in (w, v):
                spmd.assert_type(weight, {"dp": spmd.I})
            with comm.record() as calls, one_exchange():
                y = F.conv2d(F.conv2d(x, w, padding=1).relu(), v, padding=1)
            assert verbs(calls) == ["exchange"]
            assert str(spmd.get_local_type(y.to_local())["dp"]) == "S(2)"
            y.sum().backward()
            assert str(spmd.get_local_type(w.grad)["dp"]) == "I"

    threads.run(Mesh(2), rank)
