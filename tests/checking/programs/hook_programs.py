"""Gradients that hooks change: rightly and wrongly."""

from __future__ import annotations

import torch

from neuronx_dist import comm
from tests.checking.programs.whole_steps import TP, Net, Sharded, program


def loss(model, x):
    return model(x).square().sum()


# --- data parallelism by hooks ----------------------------------------------------------------------------------------


def reduced_after(param):
    param.grad = comm.all_reduce(param.grad, "dp")


def reduced_in_place(param):
    comm.all_reduce(param.grad, "dp", out=param.grad)


def reduced_gradient(grad):
    return comm.all_reduce(grad, "dp")


def with_hooks(hook, method, build=Net):
    def make():
        model = build()
        for param in model.parameters():
            getattr(param, method)(hook)
        return model

    return make


AFTER, TENSOR = "register_post_accumulate_grad_hook", "register_hook"


def plain(model, optimizer, x):
    loss(model, x).backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER))
def ddp_after(model, optimizer, x):
    plain(model, optimizer, x)


@program(with_hooks(reduced_in_place, AFTER))
def ddp_after_in_place(model, optimizer, x):
    plain(model, optimizer, x)


@program(with_hooks(reduced_gradient, TENSOR))
def ddp_by_tensor_hooks(model, optimizer, x):
    plain(model, optimizer, x)


@program()
def ddp_registered_in_the_step(model, optimizer, x):
    handles = [param.register_post_accumulate_grad_hook(reduced_after) for param in model.parameters()]
    plain(model, optimizer, x)
    for handle in handles:
        handle.remove()


@program()
def ddp_overlapped(model, optimizer, x):
    pending = []

    def start(param):
        pending.append((param, comm.all_reduce(param.grad, "dp", async_op=True)))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(start)
    loss(model, x).backward()
    for param, handle in pending:
        param.grad = handle.wait()
    optimizer.step()


@program()
def ddp_by_accumulators(model, optimizer, x):
    """Sums gradients as Apex and Megatron did: by hooks on the nodes that accumulate."""
    kept = []
    for param in model.parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        kept.append(node)
        node.register_hook(lambda *_, param=param: reduced_in_place(param))
    plain(model, optimizer, x)


@program(with_hooks(lambda param: None, AFTER), refused="the gradient of up.weight")
def ddp_forgotten(model, optimizer, x):
    plain(model, optimizer, x)


@program(refused="the gradient of up.weight")
def ddp_of_biases_only(model, optimizer, x):
    for param in model.parameters():
        if param.dim() == 1:
            param.register_post_accumulate_grad_hook(reduced_after)
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="is the same on all ranks of dp already")
def ddp_twice(model, optimizer, x):
    loss(model, x).backward()
    for param in model.parameters():
        reduced_after(param)
    optimizer.step()


@program(with_hooks(reduced_gradient, TENSOR), refused="is the same on all ranks of dp already")
def ddp_in_both_hooks(model, optimizer, x):
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduced_after)
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="when backward added to it")
def ddp_after_each_microbatch(model, optimizer, x):
    for part in (x, x * 2):
        loss(model, part).backward()
    optimizer.step()


@program(refused="when backward added to it")
def ddp_reduces_the_last_microbatch_only(model, optimizer, x):
    parts = [x, x * 2]
    last = []
    for param in model.parameters():
        param.register_hook(lambda grad: comm.all_reduce(grad, "dp") if last else None)
    for number, part in enumerate(parts):
        if number == len(parts) - 1:
            last.append(True)
        loss(model, part).backward()
    optimizer.step()


@program(with_hooks(reduced_gradient, TENSOR))
def ddp_by_tensor_hooks_each_microbatch(model, optimizer, x):
    for part in (x, x * 2):
        loss(model, part).backward()
    optimizer.step()


# --- gradients changed in hooks ---------------------------------------------------------------------------------------


@program(with_hooks(reduced_after, AFTER))
def scaled_in_a_hook(model, optimizer, x):
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.75)
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="a partial sum times")
def scaled_by_rank(model, optimizer, x):
    model.up.weight.register_hook(lambda grad: grad * (1 + comm.rank("dp")))
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="is not linear")
def clamped_before_the_sum(model, optimizer, x):
    model.up.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    plain(model, optimizer, x)


def clamped_after_the_sum_hook(param):
    reduced_after(param)
    param.grad.clamp_(-0.1, 0.1)


@program(with_hooks(clamped_after_the_sum_hook, AFTER))
def clamped_after_the_sum(model, optimizer, x):
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="norm")
def clipped_by_a_local_norm(model, optimizer, x):
    model.up.weight.register_hook(lambda grad: grad / grad.norm().clamp(min=1.0))
    plain(model, optimizer, x)


@program(with_hooks(reduced_after, AFTER), refused="hook")
def activation_gradient_reduced(model, optimizer, x):
    """The gradient of what each dp rank has of its own data is no sum over dp."""
    hidden = model.up(x)
    hidden.register_hook(lambda grad: comm.all_reduce(grad, "dp"))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(with_hooks(reduced_after, AFTER))
def activation_gradient_clamped(model, optimizer, x):
    hidden = model.up(x)
    hidden.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    model.down(torch.tanh(hidden)).square().sum().backward()
    optimizer.step()


@program(Sharded, TP, refused="hook")
def partial_where_replicated_is_due(model, optimizer, x):
    """The gradient of y is equal on all ranks: a mask of this rank makes it a piece."""

    def masked(grad):
        mask = torch.arange(grad.shape[1]) % comm.size("tp") == comm.rank("tp")
        return grad * mask

    y = model(x)
    y.register_hook(masked)
    y.square().sum().backward()
    optimizer.step()


@program(Sharded, TP)
def scaled_where_replicated(model, optimizer, x):
    y = model(x)
    y.register_hook(lambda grad: grad * 0.5)
    y.square().sum().backward()
    optimizer.step()


@program(Sharded, TP, refused="sum_of_shards|its pieces along dim")
def shard_gradient_reduced(model, optimizer, x):
    model.up.weight.register_hook(lambda grad: comm.all_reduce(grad, "tp"))
    plain(model, optimizer, x)


@program(Sharded, TP, refused="norm")
def shard_clipped_by_its_norm(model, optimizer, x):
    def clip(param):
        param.grad.div_(param.grad.norm())

    model.up.weight.register_post_accumulate_grad_hook(clip)
    plain(model, optimizer, x)


@program(Sharded, TP)
def shard_clipped_by_the_norm(model, optimizer, x):
    def clip(param):
        squares = param.grad.square().sum()
        param.grad.div_(comm.all_reduce(squares, "tp").sqrt())

    model.up.weight.register_post_accumulate_grad_hook(clip)
    plain(model, optimizer, x)


@program(refused="rank 1")
def branching_by_rank(model, optimizer, x):
    def hook(grad):
        grad = comm.all_reduce(grad, "dp")
        if comm.rank("dp") == 1:
            grad = grad * 2
        return grad

    for param in model.parameters():
        param.register_hook(hook)
    plain(model, optimizer, x)
