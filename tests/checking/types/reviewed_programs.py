"""Short programs for test_reviewed: sizes and ranks as numbers, writes in place, backward, hooks, transforms, seeds.

Each is given x [4, 6] and returns a tensor, or `types_of` several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.random import streams

__all__ = ["BACKWARDS", "NUMBERS", "WRITES"]

Programs = dict[str, Callable[[Tensor], Any]]


def types_of(*tensors: Tensor | None) -> str:
    return "; ".join("none" if x is None else f"{[*x.shape]} {spmd.get_local_type(x)}" for x in tensors)


def positions(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


# --- numbers: sizes of axes, sizes of dims, ranks ---

NUMBERS: Programs = {
    "times a size": lambda x: x * comm.size("tp"),
    "divided by a size": lambda x: x / comm.size("tp"),
    "a size divided by it": lambda x: comm.size("tp") / x,
    "times a share": lambda x: x * (1 / comm.size("tp")),
    "times a local size": lambda x: x * x.shape[0],
    "integers times a local size": lambda x: torch.ones(4, dtype=torch.long) * x.shape[0],
    "in place": lambda x: x.clone().mul_(comm.size("tp")),
    "div by name": lambda x: torch.div(x, other=comm.size("tp")),
    "add with alpha": lambda x: torch.add(x, x, alpha=comm.size("tp")),
    "add of a scaled one with alpha": lambda x: torch.add(x * comm.size("tp"), x, alpha=comm.size("tp")),
    "rsub with alpha": lambda x: torch.rsub(x, x * comm.size("tp"), alpha=comm.size("tp")),
    "addmm with both": lambda x: torch.addmm(x[:, :4], x, x.t(), alpha=comm.size("tp"), beta=comm.size("tp")),
    "addcmul with value": lambda x: torch.addcmul(x * comm.size("tp"), x, torch.ones(6), value=comm.size("tp")),
    "tensor of a size": lambda x: torch.tensor(comm.size("tp")) * x,
    "tensor of sizes": lambda x: torch.tensor([comm.size("tp"), comm.size("tp")]).sum() * x,
    "tensor of different numbers": lambda x: torch.tensor([comm.size("tp"), 1.0]).sum() * x,
    "scalar_tensor": lambda x: torch.scalar_tensor(comm.size("tp")) * x,
    "full": lambda x: torch.full((4, 6), comm.size("tp")) * x,
    "new_full": lambda x: x.new_full((4, 6), comm.size("tp")),
    "full_like": lambda x: torch.full_like(x, fill_value=comm.size("tp")),
    "fill_": lambda x: x.clone().fill_(comm.size("tp")),
    "floor_divide": lambda x: x // comm.size("tp"),
    "a size of both axes": lambda x: x / comm.size(("dp", "tp")),
    "number of elements": lambda x: x.sum() / x.numel(),
    "torch.numel by name": lambda x: x.sum() / torch.numel(input=x),
    "size by name": lambda x: x.sum() / x.size(dim=1),
    "length": lambda x: x.sum() / len(x),
    "view with literals": lambda x: x.view(2, 2, 6),
    "view with local sizes": lambda x: x.view(x.shape[0], 2, 3),
    "view by a list": lambda x: x.view([4, 3, 2]),
    "reshape by name": lambda x: torch.reshape(x, shape=(4, 6, 1)),
    "view with a rest": lambda x: x.view(4, -1),
    "expand": lambda x: x.expand(2, 4, 6),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "unflatten by name": lambda x: torch.unflatten(x, dim=-1, sizes=(2, -1)),
    "split in two": lambda x: x.split(3, 1)[0],
    "split by name": lambda x: torch.split(x, split_size_or_sections=2, dim=0)[1],
    "split into sizes": lambda x: x.split([2, 4], dim=1)[1],
    "narrow": lambda x: x.narrow(0, 0, 2),
    "narrow by name": lambda x: torch.narrow(x, dim=1, start=0, length=6),
    "slice": lambda x: x[:2],
    "slice of two dims": lambda x: x[1:4, 2:],
    "slice behind an ellipsis": lambda x: x[..., 2:5],
    "slice behind a new dim": lambda x: x[None, :, 1:3],
    "slice beside a table": lambda x: x[:2, positions(3)],
    "slice by a share": lambda x: x[: 4 // comm.size("tp")],
    "slice by a share of two dims": lambda x: x[:, : 6 // comm.size("tp")],
    "group_norm": lambda x: F.group_norm(x, 2),
    "group_norm by name": lambda x: F.group_norm(x, num_groups=3),
    "own piece": lambda x: x.narrow(0, comm.rank("tp") * 2, 2),
    "own piece by name": lambda x: torch.narrow(x, dim=1, start=comm.rank("tp") * 3, length=3),
    "own piece, sliced": lambda x: x[comm.rank("tp") * 2 : (comm.rank("tp") + 1) * 2],
    "own columns": lambda x: x[:, comm.rank("tp") * 3 : comm.rank("tp") * 3 + 3],
    "from an own position on": lambda x: x[comm.rank("tp") :][:2],
    "the other's piece": lambda x: x.narrow(0, 2 - comm.rank("tp") * 2, 2),
    "own row": lambda x: x[comm.rank("tp")],
    "own row, selected": lambda x: x.select(0, comm.rank("tp")),
    "every second row": lambda x: x[comm.rank("tp") :: comm.size("tp")],
    "every second column": lambda x: x[:, comm.rank("tp") :: 2],
    "every third row": lambda x: x[comm.rank("tp") :: 3],
    "own chunk": lambda x: x.chunk(comm.size("tp"))[comm.rank("tp")],
    "own chunk of columns": lambda x: x.chunk(2, -1)[comm.rank("tp")],
    "own chunk of four": lambda x: x.chunk(4)[comm.rank("tp")],
    "own split": lambda x: x.split(2)[comm.rank("tp")],
    "own split by name": lambda x: torch.split(x, 3, dim=1)[comm.rank("tp")],
    "own tensor_split": lambda x: torch.tensor_split(x, 2, 1)[comm.rank("tp")],
    "own of unbind": lambda x: x.unbind(1)[comm.rank("tp")],
    "own piece over dp": lambda x: x.narrow(0, comm.rank("dp") * 2, 2),
    "own piece of random numbers": lambda x: (x + torch.rand(4, 6)).narrow(0, comm.rank("dp") * 2, 2),
    "rolled by rank": lambda x: x.roll(comm.rank("tp"), 0),
    "times the rank": lambda x: x * comm.rank("tp"),
    "tensor of the rank": lambda x: x + torch.tensor(comm.rank("tp")),
    "positions of the rank": lambda x: x.sum() + (comm.rank("tp") * 4 + torch.arange(4)),
    "positions of the other": lambda x: x.sum() + (torch.arange(4) + comm.rank("tp") * 3),
    "positions of rows": lambda x: x[torch.arange(4)[:, None], positions(4, 2)],
    "positions of rows, at once": lambda x: x[torch.arange(4), positions(4)],
    "positions of fewer rows": lambda x: x[torch.arange(2), positions(2)],
    "a scale by a branch": lambda x: x if comm.size("tp") > 1 else x * 2,
}

# --- writes in place ---


def _view_written(x: Tensor) -> str:
    y = x.clone()
    rows = y[:2]
    rows.add_(1)
    return types_of(y, rows)


def _view_overwritten(x: Tensor) -> str:
    y = torch.zeros(4, 6)
    y.view(24).copy_(x.reshape(24))
    return types_of(y)


def _part_overwritten(x: Tensor) -> str:
    y = torch.zeros(4, 6)
    half = y[:2]
    half.copy_(x[2:])
    return types_of(y, half)


def _part_of_ones(x: Tensor) -> str:
    y = torch.ones(4, 6)
    y[0].copy_(x[0])
    return types_of(y)


def _zeros_into(x: Tensor) -> str:
    y = x.clone()
    y[0].zero_()
    return types_of(y)


def _constants_into(x: Tensor) -> str:
    y = x.clone()
    y[0].fill_(2.0)
    return types_of(y)


def _equal_into(x: Tensor) -> str:
    y = x.clone()
    y[0].copy_(torch.arange(6.0))
    return types_of(y)


def _written_into_equal(x: Tensor) -> str:
    y = torch.arange(24.0).view(4, 6)
    z = y.view(24)
    y.copy_(x)
    return types_of(z)


def _written_into_varying(x: Tensor) -> str:
    y = spmd.assert_type(torch.rand(4, 6) * comm.rank("tp"), {"tp": V})
    z = y.view(24)
    y.copy_(x)
    return types_of(z)


def _parameter_written(x: Tensor) -> str:
    weight = nn.Parameter(torch.zeros(4, 6))
    with torch.no_grad():
        weight.copy_(x)
    return types_of(weight)


def _parameter_written_through_a_view(x: Tensor) -> str:
    weight = nn.Parameter(torch.zeros(4, 6))
    with torch.no_grad():
        weight.view(24).copy_(x.reshape(24))
    return types_of(weight * 1)


def _activation_written(x: Tensor) -> str:
    y = x * 1
    y.add_(torch.ones(4, 6))
    y.mul_(torch.ones(()))
    return types_of(y)


def _index_written(x: Tensor) -> str:
    y = torch.zeros(4, 6)
    y[:, 1:3] = x[:, 1:3]
    y[0] = 1.0
    return types_of(y)


def _everything_written(x: Tensor) -> str:
    y, z = torch.rand(4, 6), torch.rand(4, 6)
    y[:] = x
    z[..., :] = x
    return types_of(y, z)


def _out(x: Tensor) -> str:
    y = torch.empty(4, 6)
    torch.mul(x, 2, out=y)
    return types_of(y)


def _data_read(x: Tensor) -> Tensor:
    return x.data * 2


def _data_written(x: Tensor) -> Tensor:
    return x.data.add_(1)


def _data_set(x: Tensor) -> str:
    y = torch.zeros(4, 6)
    y.data = x.detach()
    return types_of(y)


def _data_of_a_parameter_set(x: Tensor) -> str:
    weight = nn.Parameter(torch.zeros(4, 6))
    weight.data = x.detach()
    return types_of(weight)


def _behind_its_back(x: Tensor) -> Tensor:
    y = x * 1
    with spmd.no_typecheck():
        y.add_(1)
    return y + 1


WRITES: Programs = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        *(_view_written, _view_overwritten, _part_overwritten, _part_of_ones, _zeros_into, _constants_into),
        *(_equal_into, _written_into_equal, _written_into_varying, _parameter_written),
        *(_parameter_written_through_a_view, _activation_written, _index_written, _everything_written, _out),
        *(_data_read, _data_written, _data_set, _data_of_a_parameter_set, _behind_its_back),
    )
}

# --- backward, hooks, transforms, seeds ---


def _gradient(x: Tensor, *arguments: Any, **options: Any) -> str:
    (x.relu() * 2).backward(*arguments, **options)
    return types_of(x.grad)


def _weight_of(x: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.ones(6, 3))


def _of_a_weight(x: Tensor) -> str:
    weight = _weight_of(x)
    spmd.all_reduce((x @ weight).sum(), "tp", src=P, dst=I).backward()
    return types_of(weight.grad)


def _of_two_losses(x: Tensor) -> str:
    one, two = x.sum(), (x * 2).mean()
    torch.autograd.backward([one, two])
    return types_of(x.grad)


def _twice(x: Tensor) -> str:
    x.sum().backward()
    first = types_of(x.grad)
    x.sum().backward()
    return f"{first}, then {types_of(x.grad)}"


def _reduced_in_between(x: Tensor) -> str:
    x.sum().backward()
    comm.all_reduce(x.grad, "tp", out=x.grad)
    x.sum().backward()
    return types_of(x.grad)


def _grads(x: Tensor) -> str:
    return types_of(*torch.autograd.grad(x.sum(), [x]))


def _grads_by_name(x: Tensor) -> str:
    return types_of(*torch.autograd.grad(outputs=(x * 2,), inputs=x, grad_outputs=(torch.ones(4, 6),)))


def _unused(x: Tensor) -> str:
    other = torch.ones(3, requires_grad=True)
    return types_of(*torch.autograd.grad(x.sum(), [x, other], allow_unused=True))


def _hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], str]:
    def program(x: Tensor) -> str:
        y = x * 1
        y.register_hook(hook)
        x.register_hook(hook)
        y.sum().backward()
        return types_of(x.grad)

    return program


def _after(x: Tensor) -> str:
    seen = []
    x.register_post_accumulate_grad_hook(lambda param: seen.append(types_of(param.grad)))
    x.sum().backward()
    return f"{seen}, {types_of(x.grad)}"


def _node_hook(x: Tensor) -> str:
    y = x * 2
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if grad is None else grad * 2 for grad in inputs))
    y.grad_fn.register_prehook(lambda outputs: outputs)
    y.sum().backward()
    return types_of(x.grad)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: bool = True) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return comm.all_reduce(x, "tp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3] * 1, x[:, 3:] * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([one, two], 1)


def _applied(function: Any, *more: Any) -> Callable[[Tensor], str]:
    def program(x: Tensor) -> str:
        y = function.apply(x, *more)
        y = y[0] if isinstance(y, tuple) else y
        spmd.get_local_type(y)
        y.sum().backward()
        return types_of(y, x.grad)

    return program


def _checkpointed(x: Tensor) -> str:
    y = torch.utils.checkpoint.checkpoint(_Doubled.apply, x, use_reentrant=False)
    y.sum().backward()
    return types_of(y, x.grad)


def _reentrant(x: Tensor) -> str:
    y = torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=True)
    y.sum().backward()
    return types_of(y, x.grad)


def _generator(seed: Any) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


BACKWARDS: Programs = {
    "of a given gradient": lambda x: _gradient(x, torch.ones(4, 6)),
    "of a given gradient, by name": lambda x: _gradient(x, gradient=torch.ones(4, 6)),
    "of a gradient like it": lambda x: _gradient(x, x.detach()),
    "of several, by name": lambda x: torch.autograd.backward(tensors=[x * 1], grad_tensors=[torch.ones(4, 6)]),
    "of a weight": _of_a_weight,
    "of two losses": _of_two_losses,
    "twice": _twice,
    "reduced in between": _reduced_in_between,
    "grad": _grads,
    "grad by name": _grads_by_name,
    "grad of what is not used": _unused,
    "of a mean": lambda x: types_of(*torch.autograd.grad(x.mean(), x)),
    "hook that doubles": _hooked(lambda grad: grad * 2),
    "hook that only looks": _hooked(lambda grad: None),
    "hook that sums": _hooked(lambda grad: comm.all_reduce(grad, "tp")),
    "hook that writes": _hooked(lambda grad: grad.mul_(2) and None if grad.numel() == 0 else grad.mul_(2)),
    "hook that forgets": _hooked(lambda grad: torch.zeros(4, 6)),
    "hook afterwards": _after,
    "hooks of a node": _node_hook,
    "own function": _applied(_Doubled),
    "own function with a flag": _applied(_Doubled, False),
    "own function that sums": _applied(_Summed),
    "own function of two results": _applied(_Parts),
    "checkpoint": _checkpointed,
    "reentrant checkpoint": _reentrant,
    "vmap of a product": lambda x: torch.vmap(lambda row, other: row @ other, in_dims=(0, 0))(x, x),
    "vmap over the last dim": lambda x: torch.vmap(lambda column: column * 2, in_dims=-1, out_dims=-1)(x),
    "vmap to another dim": lambda x: torch.vmap(lambda row: row * 2, out_dims=1)(x),
    "vmap in vmap": lambda x: torch.vmap(torch.vmap(lambda one: one.exp()))(x),
    "vmap with a whole": lambda x: torch.vmap(lambda row, whole: whole @ row, in_dims=(0, None))(x, x),
    "vmap of a constant": lambda x: torch.vmap(lambda row: torch.ones(3))(x),
    "vmap of a collective": lambda x: torch.vmap(lambda row: comm.all_reduce(row, "tp"))(x),
    "vmap of a softmax": lambda x: torch.vmap(lambda row: row.softmax(0))(x),
    "gradients of samples": lambda x: torch.vmap(torch.func.grad(lambda row: (row * row).sum()))(x),
    "gradients of samples for a weight": lambda x: torch.vmap(
        torch.func.grad(lambda weight, row: (row * weight).sum()), in_dims=(None, 0)
    )(torch.ones(6), x),
    "gradient and value": lambda x: types_of(*torch.func.grad_and_value(lambda z: (z * 2).sum())(x)),
    "vjp": lambda x: types_of(torch.func.vjp(torch.sin, x)[1](torch.ones(4, 6))[0]),
    "jacobian": lambda x: torch.func.jacrev(lambda z: z.sum(1))(x),
    "random": lambda x: torch.rand(4, 6) + x,
    "random like it": lambda x: torch.rand_like(x) + x,
    "dropout in training": lambda x: F.dropout(x, 0.5, training=True),
    "no dropout": lambda x: F.dropout(x, 0.5, training=False),
    "generator": lambda x: torch.rand(4, 6, generator=_generator(3)) + x,
    "generator of the rank": lambda x: torch.rand(4, 6, generator=_generator(comm.rank("tp"))) + x,
    "generator of the data rank": lambda x: torch.bernoulli(x, generator=_generator(comm.rank("dp"))),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (4, 6)) + x,
    "normal of a tensor": lambda x: torch.normal(x.detach(), 1.0),
    "random of a shape": lambda x: torch.randn(x.shape) + x,
    "fork": lambda x: _forked(x),
    "normal_": lambda x: torch.empty(4, 6).normal_() + x,
    "trust": lambda x: spmd.trust(x * 1, "tp", S(0)),
    "forget": lambda x: spmd.forget(x * 1, "tp"),
    "unchecked": lambda x: _unchecked(x),
    "local_map": lambda x: spmd.local_map(lambda z: z.softmax(0), out_types={"tp": S(0), "dp": R})(x),
    "local_map of two": lambda x: types_of(
        *spmd.local_map(lambda z: (z.sum(), z * 2), out_types=({"tp": P, "dp": R}, {"tp": V, "dp": R}))(x)
    ),
}


def _forked(x: Tensor) -> Tensor:
    with streams().fork():
        return F.dropout(x, 0.5)


def _unchecked(x: Tensor) -> Tensor:
    with spmd.no_typecheck():
        y = x * 1
    return y + 1
