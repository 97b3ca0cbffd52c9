"""Gradients that hooks of modules, of nodes and of several tensors change."""

from __future__ import annotations

import torch

from neuronx_dist import comm, spmd
from tests.checking.programs.hook_programs import (
    AFTER,
    TENSOR,
    loss,
    plain,
    reduced_after,
    reduced_gradient,
    with_hooks,
)
from tests.checking.programs.whole_steps import TP, Sharded, program


@program(with_hooks(reduced_after, AFTER))
def module_hook_halves(model, optimizer, x):
    model.down.register_full_backward_hook(lambda module, given, grads: (given[0] * 0.5,))
    model.down.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2.0,))
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="hook")
def module_hook_reduces(model, optimizer, x):
    model.down.register_full_backward_hook(lambda module, given, grads: (comm.all_reduce(given[0], "dp"),))
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="hook")
def module_pre_hook_reduces(model, optimizer, x):
    model.down.register_full_backward_pre_hook(lambda module, grads: (comm.all_reduce(grads[0], "dp"),))
    plain(model, optimizer, x)


@program(Sharded, TP, refused="hook")
def module_hook_masks_by_rank(model, optimizer, x):
    def masked(module, given, grads):
        return (given[0] * (torch.arange(given[0].shape[1]) % 2 == comm.rank("tp")),)

    class Head(torch.nn.Module):
        def forward(self, y):
            return y.square().sum()

    head = Head()
    head.register_full_backward_hook(masked)
    head(model(x)).backward()
    optimizer.step()


@program(Sharded, TP, refused="all_reduce")
def forward_hook_reduces_again(model, optimizer, x):
    model.down.register_forward_hook(lambda module, given, result: spmd.all_reduce(result, "tp", dst=spmd.I))
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="hook")
def node_hook_reduces(model, optimizer, x):
    hidden = model.up(x)
    hidden.grad_fn.register_prehook(lambda grads: (comm.all_reduce(grads[0], "dp"),))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER))
def node_prehook_halves(model, optimizer, x):
    hidden = model.up(x)
    hidden.grad_fn.register_prehook(lambda grads: (grads[0] * 0.5,))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER), assumed="hook")
def node_hook_changes_what_it_gives(model, optimizer, x):
    """Changes the results of a node, which have no tensor to which they belong."""
    squares = torch.tanh(model.down(torch.tanh(model.up(x)))).square()
    squares.grad_fn.register_hook(lambda given, grads: (given[0] * (1 + comm.rank("dp")),))
    squares.sum().backward()
    optimizer.step()


@program()
def reduced_when_several_are_there(model, optimizer, x):
    params = [model.up.weight, model.up.bias]
    totals = {}

    def reduce_all(grads):
        for param, grad in zip(params, grads):
            totals[param] = comm.all_reduce(grad, "dp")

    torch.autograd.graph.register_multi_grad_hook(params, reduce_all)
    for param in model.down.parameters():
        param.register_post_accumulate_grad_hook(reduced_after)
    loss(model, x).backward()
    for param, total in totals.items():
        param.grad = total
    optimizer.step()


@program(refused="all_reduce")
def reduced_twice_when_several_are_there(model, optimizer, x):
    params = [model.up.weight, model.up.bias]

    def reduce_all(grads):
        for param, grad in zip(params, grads):
            param.total = comm.all_reduce(comm.all_reduce(grad, "dp"), "dp")

    torch.autograd.graph.register_multi_grad_hook(params, reduce_all)
    for param in model.down.parameters():
        param.register_post_accumulate_grad_hook(reduced_after)
    loss(model, x).backward()
    for param in params:
        param.grad = param.total
    optimizer.step()


@program(with_hooks(reduced_after, AFTER), assumed="saved")
def saved_tensors_scaled(model, optimizer, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * (1 + comm.rank("dp"))):
        total = loss(model, x)
    total.backward()
    optimizer.step()


@program(with_hooks(reduced_gradient, TENSOR), refused="when backward added to it")
def ddp_hooks_removed_between(model, optimizer, x):
    loss(model, x).backward()
    for param in model.parameters():
        param._backward_hooks.clear()
    loss(model, x * 2).backward()
    optimizer.step()


@program()
def ddp_by_tensor_hooks_removed_after(model, optimizer, x):
    handles = [param.register_hook(reduced_gradient) for param in model.parameters()]
    loss(model, x).backward()
    for handle in handles:
        handle.remove()
    optimizer.step()


@program(with_hooks(reduced_gradient, TENSOR))
def gradients_by_grad(model, optimizer, x):
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss(model, x), params)):
        param.grad = grad
    optimizer.step()


def stepping_in_hooks(model, reduce):
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    own = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

    def step(param):
        if reduce:
            reduced_after(param)
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)


@program()
def optimizer_in_backward(model, optimizer, x):
    stepping_in_hooks(model, True)
    for _ in range(2):
        loss(model, x).backward()


@program(refused="the gradient of")
def optimizer_in_backward_not_reduced(model, optimizer, x):
    stepping_in_hooks(model, False)
    loss(model, x).backward()


@program(refused="a partial sum times")
def scaled_once_by_rank(model, optimizer, x):
    """The hook removes itself."""

    def hook(grad):
        handle.remove()
        return grad * (1 + comm.rank("dp"))

    handle = model.up.weight.register_hook(hook)
    loss(model, x).backward()
    for param in model.parameters():
        reduced_after(param)
    optimizer.step()


@program(with_hooks(reduced_after, AFTER), refused="hook")
def gradient_changed_in_place(model, optimizer, x):
    def hook(grad):
        grad.copy_(comm.all_gather(grad, "dp")[: len(grad)])

    hidden = model.up(x)
    hidden.register_hook(hook)
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER))
def gradient_halved_in_place(model, optimizer, x):
    def hook(grad):
        grad.mul_(0.5)

    hidden = model.up(x)
    hidden.register_hook(hook)
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER), refused="a partial sum times|dp")
def accumulator_prehook_scales_by_rank(model, optimizer, x):
    weight = model.up.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] * (1 + comm.rank("dp")),))
    plain(model, optimizer, x)


@program(refused="hook")
def gradient_edge_hook_reduces(model, optimizer, x):
    hidden = model.up(x)
    edge = torch.autograd.graph.get_gradient_edge(hidden)
    edge.node.register_prehook(lambda grads: (comm.all_gather(grads[0], "dp")[: len(grads[0])],))
    model.down(torch.tanh(hidden)).square().sum().backward()
    for param in model.parameters():
        reduced_after(param)
    optimizer.step()


@program(with_hooks(reduced_after, AFTER), assumed="hook")
def activation_gradient_scaled_by_rank(model, optimizer, x):
    hidden = model.up(x)
    hidden.register_hook(lambda grad: grad * (1 + comm.rank("dp")))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER))
def activation_gradient_replaced_by_a_constant(model, optimizer, x):
    hidden = model.up(x)
    hidden.register_hook(lambda grad: torch.ones_like(grad) + torch.zeros_like(grad))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


class ByHand(Sharded):
    """The gradient that goes back from the column-parallel product is summed in a hook."""

    def forward(self, x):
        y = x * self.scale if hasattr(self, "scale") else x
        if y.requires_grad:
            y.register_hook(lambda grad: comm.all_reduce(grad, "tp"))
        hidden = torch.tanh(torch.nn.functional.linear(y, self.up.weight))
        return spmd.all_reduce(torch.nn.functional.linear(hidden, self.down.weight), "tp", dst=spmd.I)


class Scaled(ByHand):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))


class ScaledInParameterHook(Scaled):
    """The parameter's own gradient is summed."""

    def forward(self, x):
        hidden = torch.tanh(torch.nn.functional.linear(x * self.scale, self.up.weight))
        return spmd.all_reduce(torch.nn.functional.linear(hidden, self.down.weight), "tp", dst=spmd.I)


@program(Scaled, TP)
def summed_by_a_hook_of_an_activation(model, optimizer, x):
    plain(model, optimizer, x)


@program(with_hooks(lambda grad: grad * 1.0, TENSOR, ScaledInParameterHook), TP, refused="cannot be combined")
def not_summed_by_a_hook(model, optimizer, x):
    plain(model, optimizer, x)


@program(Scaled, TP, refused="hook|equal on all ranks")
def summed_by_two_hooks(model, optimizer, x):
    y = x * model.scale
    for _ in range(2):
        y.register_hook(lambda grad: comm.all_reduce(grad, "tp"))
    hidden = torch.tanh(torch.nn.functional.linear(y, model.up.weight))
    out = spmd.all_reduce(torch.nn.functional.linear(hidden, model.down.weight), "tp", dst=spmd.I)
    out.square().sum().backward()
    optimizer.step()


def summed_over_tp(model_class):
    def make():
        model = model_class()
        model.scale.register_hook(lambda grad: comm.all_reduce(grad, "tp"))
        return model

    return make


@program(summed_over_tp(ScaledInParameterHook), TP)
def summed_by_a_hook_of_a_parameter(model, optimizer, x):
    plain(model, optimizer, x)


@program(summed_over_tp(Scaled), TP, refused="equal on all ranks|hook|I and R|cannot be combined")
def summed_by_hooks_of_both(model, optimizer, x):
    plain(model, optimizer, x)
