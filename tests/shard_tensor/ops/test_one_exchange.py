"""`one_exchange(x, layers)`: consecutive windows exchange halos once, with the values and gradients of one process."""

from __future__ import annotations

from functools import partial
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
from tests.shard_tensor.sharding import Doubled
from tests.shard_tensor.support.cases import MESHES, Case, assert_close, on_ranks, run_case, verbs

IMAGE, WEIGHTS = (2, 2, 16, 5), [(3, 2, 3, 3), (3,), (2, 3, 3, 3)]


REFLECTING, REPLICATING = (
    nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode, bias=False) for mode in ("reflect", "replicate")
)


def conv(*weights: Any, **options: Any) -> Any:
    """A layer of one convolution."""
    function = {3: F.conv1d, 4: F.conv2d}[weights[0].dim()]
    return lambda x: function(x, *weights, **options)


def two(x: Any, w: Any, b: Any, v: Any) -> Any:
    return one_exchange(x, [conv(w, b, padding=1), nn.GELU("tanh"), lambda h: 0.5 * h, conv(v, padding=1, stride=2)])


def skipping(x: Any, w: Any, b: Any, v: Any) -> Any:
    h = one_exchange(x, [conv(w, b, padding="same"), F.silu])
    return one_exchange(h, [conv(v, padding=2, dilation=2)]) + h[:, :2]


def activated_before(x: Any, w: Any, b: Any, v: Any) -> Any:
    first = lambda h: h.tanh() - 1  # noqa: E731
    return one_exchange(x, [first, conv(w, b, padding=1), F.relu, conv(v, padding=1), torch.sigmoid])


def pooled(x: Any, w: Any) -> Any:
    pad = nn.CircularPad2d((1, 1, 2, 2))
    return one_exchange(x, [nn.MaxPool2d(3, 2, 1), F.tanh, nn.AvgPool2d(2), pad, conv(w)])


def padded_in_place(x: Any, w: Any) -> Any:
    return one_exchange(x, [nn.ConstantPad2d((0, 0, 1, 0), 0.5), nn.ReLU(inplace=True), conv(w)]) + x[..., :1, :1]


def padded(x: Any, w: Any) -> Any:
    def layer(module: Any) -> Any:
        return lambda h: module._conv_forward(h, w, None)

    return one_exchange(x, [layer(REPLICATING), layer(REFLECTING)])


CASES = [
    Case("two", two, [IMAGE, *WEIGHTS]),
    Case("with a skip connection", skipping, [IMAGE, *WEIGHTS]),
    Case("activations first and last", activated_before, [IMAGE, *WEIGHTS]),
    Case("plain weights", two, [IMAGE, *WEIGHTS], plain=(1, 2, 3)),
    Case("pooling and padding", pooled, [IMAGE, (2, 2, 3, 1)]),
    Case("an activation in place behind padding", padded_in_place, [IMAGE, (2, 2, 3, 3)]),
    Case("padding modes", padded, [IMAGE, (2, 2, 3, 3)]),
    Case("without a batch", lambda x, w, v: one_exchange(x, [conv(w), conv(v, padding=2)]),
         [(2, 16), (2, 2, 3), (2, 2, 4)]),
    Case("no window", lambda x: one_exchange(x, [F.relu, torch.exp]), [IMAGE]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.each_value
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
        with comm.record() as forward, report() as r:
            y = two(x, *weights)
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
        with report() as once:
            one_exchange(x, [conv(w, padding=1), conv(v, padding=1)])
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
                "conv2d, conv2d after 1 exchange of 128 bytes, separately 2 of 256: saves 128 bytes, "
                "computes 2 positions of dim 2 twice",
            )
        ]


def parts(mesh: Any, n: int = 16) -> tuple[Any, Any, Any]:
    """An image in shards of 11 and 5 rows, and two plain weights; float64 leaves."""
    g = torch.Generator().manual_seed(0)
    x, w, v = (
        torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in (IMAGE, (2, 2, 3, 3), (2, 2, 3, 3))
    )
    return distribute_tensor(x, mesh, [Shard(2)], sizes=[(11, 5)], src=None), w, v


def image() -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_foreign_autograd_function_of_the_result() -> None:
    def rank(mesh: Any) -> None:
        x, w, v = parts(mesh)
        y = one_exchange(x, [conv(w, padding=1), conv(v, padding=1)])
        z = Doubled.apply(y)
        with comm.record() as calls:
            z.sum().backward()
        assert sorted(verbs(calls)) == ["all_reduce"] * 3 + ["exchange"]  # of the sum and both weights

    on_ranks(2, rank)


def composed_and_apart(x: Any, w: Any, v: Any, apart: bool) -> Any:
    layers = [conv(w, padding=1), torch.tanh, conv(v, padding=1)]
    return layers[2](layers[1](layers[0](x))) if apart else one_exchange(x, layers)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    def rank(mesh: Any) -> None:
        grads = []
        for apart in (False, True):
            x, w, v = parts(mesh)
            y = checkpoint(partial(composed_and_apart, w=w, v=v, apart=apart), x, use_reentrant=reentrant)
            y.square().sum().backward()
            grads.append([x.grad.full_tensor(), w.grad, v.grad])
        for mine, expected in zip(*grads, strict=True):
            assert_close(mine, expected, "gradient")

    on_ranks(2, rank)


def test_double_backward() -> None:
    def rank(mesh: Any) -> None:
        results = []
        for apart in (False, True):
            x, w, v = parts(mesh)
            y = composed_and_apart(x, w, v, apart)
            (grad,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
            grad.square().sum().backward()
            results.append([x.grad.full_tensor(), w.grad, v.grad])
        for mine, expected in zip(*results, strict=True):
            assert_close(mine, expected, "gradient of a gradient")

    on_ranks(2, rank)


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_the_call(mode: Any) -> None:
    def rank(mesh: Any) -> None:
        x, w, v = (part.detach().float() for part in parts(mesh))
        with mode():
            expected = composed_and_apart(x, w, v, True)
            with comm.record() as calls:
                y = composed_and_apart(x, w, v, False)
        assert verbs(calls) == ["exchange"] and y.dtype is expected.dtype and not y.requires_grad
        assert torch.equal(y.to_local(), expected.to_local())

    on_ranks(2, rank)


def test_modules_and_their_hooks() -> None:
    """A module's parametrizations and hooks belong to its call; `nn.Sequential` is a list of layers, and a layer."""

    def rank(mesh: Any) -> None:
        x = distribute_tensor(image(), mesh, [Shard(2)], src=None)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Identity(), nn.Conv2d(3, 2, 3)
        ).double()
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        nn.utils.parametrizations.weight_norm(model[0])
        model[1].register_forward_hook(lambda module, args, result: result * 2)
        expected = model(x)
        for layers in (model, [model]):
            with comm.record() as calls:
                y = one_exchange(x, layers)
            assert verbs(calls) == ["exchange"]
            assert_close(y.full_tensor().detach(), expected.full_tensor().detach(), "value")

    on_ranks(2, rank)


W = torch.ones(2, 2, 3, 3, dtype=torch.float64)


def test_layers_run_in_turn_where_a_layout_is_not_composed() -> None:
    def rank(mesh: Any) -> None:
        whole = image()
        layers = [conv(W, padding=1), F.relu, nn.GroupNorm(1, 2).double(), conv(W, padding=1)]
        x = distribute_tensor(whole, mesh, [Shard(1)], src=None)
        with report() as r:
            y = one_exchange(x, layers)
        assert [text.partition(":")[0] for op, text in r.notes if op == "one_exchange"] == ["the layers run in turn"]
        assert_close(y.full_tensor().detach(), one_exchange(whole, layers).detach(), "value")
        sharded_weight = distribute_tensor(W, mesh, [Shard(0)], src=None)
        with report() as r:
            one_exchange(distribute_tensor(whole, mesh, [Shard(2)], src=None), [conv(sharded_weight, padding=1)])
        assert ("one_exchange", "the layers run in turn: a weight is sharded") in r.notes

    on_ranks(2, rank)


def test_two_sharded_dims_run_in_turn() -> None:
    def rank() -> None:
        mesh = DeviceMesh.from_axes(("dp", "tp"))
        whole = image()
        layers = [conv(W, padding=1), conv(W, padding=1)]
        x = distribute_tensor(whole, mesh, [Shard(2), Shard(3)], src=None)
        assert_close(one_exchange(x, layers).full_tensor(), one_exchange(whole, layers), "value")
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(2)], src=None)
        with comm.record() as calls:
            y = one_exchange(x, layers)
        assert verbs(calls) == ["exchange"]
        assert_close(y.full_tensor(), one_exchange(whole, layers), "value")

    threads.run(Mesh(4, tp=2), rank)


def test_a_convolution_that_does_not_fit_is_refused() -> None:
    def rank(mesh: Any) -> None:
        x, w, _ = parts(mesh)
        with pytest.raises(RuntimeError, match="expected input"):
            one_exchange(x, [conv(torch.ones(2, 3, 3, 3, dtype=torch.float64))])
        with pytest.raises(ValueError, match="a window of 31 .* does not fit into 16 inputs"):
            one_exchange(x, [conv(w, padding=1), conv(w, dilation=15)])

    on_ranks(2, rank)


def test_the_type_checker_follows() -> None:
    def rank() -> None:
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode():
            x = distribute_tensor(torch.randn(IMAGE).requires_grad_(), mesh, [Shard(2)], src=None)
            w, v = (torch.ones(2, 2, 3, 3, requires_grad=True) for _ in range(2))
            for weight in (w, v):
                spmd.assert_type(weight, {"dp": spmd.I})
            with comm.record() as calls:
                y = one_exchange(x, [conv(w, padding=1), lambda h: h.relu(), conv(v, padding=1)])
            assert verbs(calls) == ["exchange"]
            assert str(spmd.get_local_type(y.to_local())["dp"]) == "S(2)"
            y.sum().backward()
            assert str(spmd.get_local_type(w.grad)["dp"]) == "I"

    threads.run(Mesh(2), rank)
