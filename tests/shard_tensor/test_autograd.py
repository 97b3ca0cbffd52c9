"""Gradients: where they lie, hooks, second derivatives, checkpoints, foreign autograd functions, copies."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Partial, Replicate, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.sharding import Doubled, Foreign
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def leaf(x, mesh, placements=None, sizes=None):
    return distribute_tensor(x.clone().requires_grad_(), mesh, placements, sizes=sizes, src=None)


def test_a_loss_that_is_a_sum_may_be_called_backward_on():
    def loss(mesh):
        x = leaf(whole(16), mesh, [Shard(0)], [(11, 5)])
        y = torch.dot(x, x)
        assert y.placements == (Partial(),)
        with comm.record() as calls:
            y.backward()
        assert_close(x.grad.full_tensor(), 2 * whole(16), "gradient of a dot product")
        return verbs(calls)

    assert on_ranks(2, loss) == [["all_reduce"]] * 2


def test_mse_is_not_multiplied_by_the_number_of_ranks():
    """torch's DTensor gives twice the gradient on two ranks, silently."""

    def loss(mesh):
        x = leaf(whole(7, 3), mesh, [Shard(0)])
        (x - 1).square().mean().backward()
        assert_close(x.grad.full_tensor(), 2 * (whole(7, 3) - 1) / 21, "gradient of a mean square")

    on_ranks(2, loss)


def test_gradients_of_weights_are_reduced_once():
    def loss(mesh):
        x, w = leaf(whole(16, 4), mesh, [Shard(0)]), whole(4, 4).requires_grad_()
        with comm.record() as calls:
            F.linear(x, w).sum().backward()
        assert_close(w.grad, whole(16, 4).sum(0).expand(4, 4), "gradient of a plain weight")
        return verbs(calls)

    assert on_ranks(2, loss) == [["all_reduce"] * 2] * 2  # the loss, and the weight's gradient


def test_the_other_ways_to_ask_for_gradients():
    def ask(mesh):
        x, w = leaf(whole(16, 4), mesh, [Shard(0)], [(11, 5)]), leaf(whole(4), mesh)
        y = (x * w).tanh()
        expected_x, expected_w = whole(16, 4).requires_grad_(), whole(4).requires_grad_()
        expected = torch.autograd.grad((expected_x * expected_w).tanh().sum(), [expected_x, expected_w])
        grads = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        for actual, wanted, operand in zip(grads, expected, (x, w), strict=True):
            assert actual.placements == operand.placements
            assert_close(actual.full_tensor(), wanted, "autograd.grad")
        torch.autograd.backward(y, torch.ones(16, 4, dtype=torch.float64), retain_graph=True)
        assert_close(x.grad.full_tensor(), expected[0], "autograd.backward")
        x.grad = None
        y.backward(torch.ones_like(y), inputs=[x])
        assert_close(x.grad.full_tensor(), expected[0], "backward(inputs=)")

    on_ranks(2, ask)


def test_second_derivatives():
    def twice(mesh):
        x = leaf(whole(16, 4), mesh, [Shard(0)], [(11, 5)])
        w = leaf(whole(4, 4), mesh)
        (first,) = torch.autograd.grad((F.linear(x, w).tanh()).sum(), x, create_graph=True)
        first.square().sum().backward()
        y, v = whole(16, 4).requires_grad_(), whole(4, 4).requires_grad_()
        (other,) = torch.autograd.grad(F.linear(y, v).tanh().sum(), y, create_graph=True)
        other.square().sum().backward()
        assert_close(x.grad.full_tensor(), y.grad, "second derivative by the input")
        assert_close(w.grad.full_tensor(), v.grad, "second derivative by the weight")

    on_ranks(2, twice)


def test_hooks_and_retained_gradients():
    def hooked(mesh):
        x = leaf(whole(16), mesh, [Shard(0)], [(11, 5)])
        y = x * 2
        seen = []
        y.register_hook(lambda grad: seen.append(grad.placements) or grad * 3)
        y.retain_grad()
        x.register_post_accumulate_grad_hook(lambda own: seen.append(own.grad.placements))
        y.sum().backward()
        assert seen == [(Shard(0),)] * 2
        assert_close(y.grad.full_tensor(), torch.full((16,), 3.0, dtype=torch.float64), "a retained gradient")
        assert_close(x.grad.full_tensor(), torch.full((16,), 6.0, dtype=torch.float64), "behind a hook")

    on_ranks(2, hooked)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    def step(mesh):
        x, w = leaf(whole(16, 4), mesh, [Shard(0)], [(11, 5)]), leaf(whole(4, 4), mesh)
        checkpoint(lambda x: F.linear(x, w).tanh(), x, use_reentrant=reentrant).sum().backward()
        y, v = whole(16, 4).requires_grad_(), whole(4, 4).requires_grad_()
        F.linear(y, v).tanh().sum().backward()
        assert_close(x.grad.full_tensor(), y.grad, "by the input")
        assert_close(w.grad.full_tensor(), v.grad, "by the weight")

    on_ranks(2, step)


class Passing(torch.autograd.Function):
    """An autograd function like FSDP's: returns its inputs."""

    seen: list = []

    @staticmethod
    def forward(ctx, *xs):
        return xs

    @staticmethod
    def backward(ctx, *grads):
        Passing.seen.append([type(grad) for grad in grads])
        return grads


@pytest.mark.parametrize("function", [Passing, Doubled])
def test_foreign_autograd_functions(function):
    def through(mesh):
        Passing.seen.clear()
        x = leaf(whole(16), mesh, [Shard(0)], [(11, 5)])
        y = function.apply(x.tanh())
        y = y[0] if isinstance(y, tuple) else y
        assert isinstance(y, ShardTensor) and y.requires_grad
        (y * y).sum().backward()
        other = whole(16).requires_grad_()
        scale = 2 if function is Doubled else 1
        (other.tanh() * scale).square().sum().backward()
        assert_close(x.grad.full_tensor(), other.grad, "through a foreign function")

    on_ranks(2, through)
    assert all(each == [ShardTensor] for each in Passing.seen)


def test_to_local_and_its_gradients():
    def local(mesh):
        x = leaf(whole(16), mesh, [Shard(0)], [(11, 5)])
        (x.to_local() * 3).sum().backward()
        assert_close(x.grad.full_tensor(), torch.full((16,), 3.0, dtype=torch.float64), "of a shard")
        w = leaf(whole(4), mesh)
        (w.to_local(grad_placements=[Partial()]) * (mesh.get_rank() + 1)).sum().backward()
        assert_close(w.grad.full_tensor(), torch.full((4,), 3.0, dtype=torch.float64), "summed over the ranks")
        with pytest.raises(ValueError, match=r"has Replicate\(\) on mesh dim 0, .* Shard\(dim=0\): redistribute\(\)"):
            x.to_local(grad_placements=[Replicate()])
        (x.full_tensor(grad_placements=[Partial()]) * (mesh.get_rank() + 1)).sum().backward()
        assert_close(x.grad.full_tensor(), torch.full((16,), 3.0 + 3.0, dtype=torch.float64), "of the whole")

    on_ranks(2, local)


WRITES = {  # into rows that from_local made of a leaf; the gradient of the leaf
    "mul_": (lambda x: x.mul_(3.0), 3.0),
    "add_": (lambda x: x.add_(x.detach()), 1.0),
    "fill_": (lambda x: x.fill_(2.0), 0.0),
    "zero_": (lambda x: x.zero_(), 0.0),
    "copy_": (lambda x: x.copy_(x * 5), 5.0),
    "x[..] = y": (lambda x: x.__setitem__((slice(None), slice(None)), 2.0), 0.0),
}


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()], [Shard(0), Shard(0)]])
@pytest.mark.parametrize("write", WRITES)
def test_what_from_local_makes_of_a_leaf_is_written_in_place(write, placements):
    """Compares with torch's DTensor: a leaf stays a leaf, shares memory, and gets the written tensor's gradient."""
    write_, factor = WRITES[write]

    def rank(mesh):
        local = whole(3, 4).requires_grad_()
        x = ShardTensor.from_local(local, mesh, placements)
        write_(x)
        (x * x.detach()).full_tensor().sum().backward()
        assert torch.equal(local.detach(), x.to_local().detach()) and local.is_leaf
        assert torch.equal(local.detach(), whole(3, 4) * max(factor, 2 * (factor == 1))) or factor == 0
        assert_close(local.grad, factor * local.detach(), write)

    on_ranks(2 ** len(placements), rank, (2,) * len(placements))


def test_a_leaf_with_views_is_not_written_in_place():
    """A view would not know the new graph."""

    def rank(mesh):
        x = ShardTensor.from_local(whole(3, 4).requires_grad_(), mesh, [Shard(0)])
        view = x[:, :2]
        for written in (x, view):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                written.mul_(3)

    on_ranks(2, rank)


def test_a_tensor_travels_in_another_dtype():
    def function(mesh):
        x = leaf(whole(16), mesh, [Shard(0)], [(11, 5)])
        with comm.record() as wide:
            x.detach().redistribute()
        with comm.record() as calls:
            y = x.redistribute(forward_dtype=torch.float32, backward_dtype=torch.float32)
            (y * y).sum().backward()
        assert y.dtype == torch.float32 and y.placements == (Replicate(),)
        assert [2 * call.bytes for call in calls] == [call.bytes for call in wide]  # of the gradient a part is here
        assert x.grad.dtype == torch.float64
        assert_close(x.grad.full_tensor(), 2 * whole(16).float().double(), "in float32", 1e-6)
        with pytest.raises(ValueError, match="backward_dtype=torch.float16, and the result is torch.float64"):
            x.redistribute(backward_dtype=torch.float16)

    on_ranks(2, function)


def test_from_local_takes_dtensors_arguments():
    def function(mesh):
        local = torch.ones(2 - mesh.get_rank(), 4)
        x = ShardTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1))
        assert x.shape == (3, 4) and x._spec.sizes == ((2, 1),)
        with pytest.raises(ValueError, match=r"run_check=True\) of torch's DTensor broadcasts"):
            ShardTensor.from_local(local, mesh, [Replicate()], run_check=True)

    on_ranks(2, function)


# --- parameters


def test_parameters_and_optimizers():
    def train(mesh):
        plain = nn.Linear(4, 4, dtype=torch.float64)
        with torch.no_grad():
            plain.weight.copy_(whole(4, 4)), plain.bias.copy_(whole(4))
        twin = copy.deepcopy(plain)
        for name, placements in (("weight", [Shard(0)]), ("bias", [Shard(0)])):
            x = distribute_tensor(getattr(plain, name).detach(), mesh, placements, sizes=[(1, 3)], src=None)
            setattr(plain, name, nn.Parameter(x))
        assert isinstance(plain.weight, nn.Parameter) and isinstance(plain.weight, ShardTensor)
        for make in (
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, 0.1),
            lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        ):
            optimizers = [make(plain.parameters()), make(twin.parameters())]
            for _ in range(3):
                for model, optimizer in zip((plain, twin), optimizers):
                    optimizer.zero_grad()
                    model(whole(5, 4)).square().mean().backward()
                    optimizer.step()
            for name, param in plain.named_parameters():
                assert_close(param.full_tensor().detach(), twin.get_parameter(name).detach(), name)

    on_ranks(2, train)


def test_copies():
    def copied(mesh):
        x = nn.Parameter(distribute_tensor(whole(16, 2), mesh, [Shard(0)], sizes=[(11, 5)], src=None))
        y = copy.deepcopy(x)
        assert isinstance(y, nn.Parameter) and y._spec is x._spec and y.requires_grad and y.is_leaf
        assert y.to_local().data_ptr() != x.to_local().data_ptr()
        with pytest.raises(RuntimeError, match="only leaf"):
            copy.deepcopy(x * 2)
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        z = torch.load(file, weights_only=False)["x"]
        assert z._spec is x._spec and torch.equal(z.full_tensor(), x.full_tensor()) and isinstance(z, nn.Parameter)
        half = x.to(torch.float32)
        assert half.dtype == half.to_local().dtype == torch.float32 and half.placements == x.placements
        x.data = x.data * 2
        assert_close(x.full_tensor().detach(), whole(16, 2) * 2, "data")
        assert "Shard(dim=0)" in repr(x)
        assert x.detach().requires_grad is False and x.detach().is_leaf
        module = nn.Module()
        module.x = x
        module.float()
        assert module.x.dtype == module.x.to_local().dtype == torch.float32
        with torch.no_grad():
            x.zero_()
        assert x.full_tensor().abs().sum() == 0

    on_ranks(2, copied)


def written_in_place(mesh):
    whole = torch.linspace(1, 2, 5, dtype=torch.float64)
    for write, factor in [
        (lambda y: y.mul_(3), 6.0),
        (lambda y: y.mul_(3).add_(1).mul_(2), 12.0),
        (lambda y: torch.nn.functional.relu(y, inplace=True), 2.0),
    ]:
        x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
        y = x * 2
        write(y)
        Foreign.apply(y).sum().backward()
        assert_close(x.grad.full_tensor(), torch.full_like(whole, factor), "gradient through a foreign function")
    x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
    y = x * 2
    y[0:1] = 5
    Foreign.apply(y).sum().backward()
    assert_close(x.grad.full_tensor(), torch.tensor([0.0, 2, 2, 2, 2], dtype=torch.float64), "of what is left")
    x.grad = None
    y = torch.zeros_like(x.detach())
    y[1:4:2] = x[:2] * 3
    Foreign.apply(y).sum().backward()
    assert_close(x.grad.full_tensor(), torch.tensor([3.0, 3, 0, 0, 0], dtype=torch.float64), "of a value")
    x.grad = None
    y = torch.zeros_like(x.detach())
    y.add_(x * 2)
    Foreign.apply(y).sum().backward()
    assert_close(x.grad.full_tensor(), torch.full_like(whole, 2), "of a tensor that had no graph")


def test_foreign_functions_see_what_was_written_in_place():
    on_ranks(2, written_in_place)


def local_in_place(mesh):
    whole = torch.linspace(1, 2, 5, dtype=torch.float64)
    x = distribute_tensor(whole.clone(), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
    x.to_local().mul_(2)
    assert_close(x.full_tensor(), whole * 2, "without a graph it is the tensor's own memory")
    y = x.requires_grad_() * 2
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.to_local().mul_(2)
    y.to_local().sum().backward()
    assert_close(x.grad.full_tensor(), torch.full_like(whole, 2), "gradient")
    summands = whole * (mesh.get_rank() + 1)
    z = ShardTensor.from_local(summands, mesh, [Partial()], sharding_shapes="chunk")
    local = z.to_local()
    comm.all_reduce(local, mesh.communicator(), out=local)
    assert_close(z.full_tensor(), whole * 3, "a sum, once")
    with pytest.raises(ValueError, match=r"in place on .*Partial.*redistribute"):
        z.exp_()


def test_local_tensors_in_place():
    on_ranks(2, local_in_place)


def together(mesh):
    """One all-reduce for weight and bias, to the byte; second derivatives as in one process."""
    whole = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    weight, bias = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3), torch.ones(2, dtype=torch.float64)

    def program(x, w, b):
        y = F.linear(x, w, b).tanh()
        grads = torch.autograd.grad(y.square().sum(), (w, b), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
    w, b = (distribute_tensor(each.clone().requires_grad_(), mesh, src=None) for each in (weight, bias))
    y = F.linear(x, w, b)
    with comm.record() as calls:
        y.backward(torch.ones_like(y.detach()))
    assert [(call.verb, call.bytes) for call in calls] == [("all_reduce", (6 + 2) * 8)]
    assert_close(w.grad.to_local(), whole.sum(0).expand(2, 3), "gradient of the weight")
    assert_close(b.grad.to_local(), torch.full_like(bias, 5), "gradient of the bias")
    x.grad = w.grad = b.grad = None
    program(x, w, b).backward()
    plain = [each.clone().requires_grad_() for each in (whole, weight, bias)]
    program(*plain).backward()
    for ours, each in zip((x, w, b), plain, strict=True):
        assert_close(ours.grad.full_tensor(), each.grad, "gradient of a gradient")
    b.requires_grad_(False)
    with comm.record() as calls:
        F.linear(x, w, b).sum().backward()
    assert [call.bytes for call in calls if call.verb == "all_reduce"][-1] == 6 * 8


def test_gradients_of_weight_and_bias_share_an_all_reduce():
    on_ranks(2, together)
