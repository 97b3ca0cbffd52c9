"""Small programs, each of a few collectives, whose HLO is compared with a table."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S
from tests.xla.programs import layers as layer_programs
from tests.xla.programs.operators import CONFORMANCE

F32, BF16 = torch.float32, torch.bfloat16
BACKWARD = ", backward"


def _operator(x: Any, g: Any, row: Any, backward: bool) -> torch.Tensor:
    """The result of a typed operator, or the gradient of its input: the collectives of one of them alone."""
    _, operator, src, dst, options, *_ = row
    leaf = x.detach().requires_grad_()
    result = operator(leaf, "tp", src=src, dst=dst, **options)
    if not backward:
        return result.detach()
    result.backward(g)
    return leaf.grad


def _as(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name that is seen in tracebacks, and so in what is known of a collective."""
    code = function.__code__.replace(co_name=f"[{name}]")
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def name_of(row: Any) -> str:
    """`all_gather(V, R, dim=1)`"""
    more = "".join(f", dim={value}" for key, value in row[4].items() if key.endswith("_dim"))
    return f"{row[1].__name__}({row[2]}, {row[3]}{more})"


def every_operator(x: list[torch.Tensor], g: list[torch.Tensor]) -> Any:
    """Every row of the conformance table, forward and backward, which runs in this thread: its traceback is ours."""
    with torch.autograd.set_multithreading_enabled(False):
        return [
            _as(name_of(row) + suffix, _operator)(one, grad, row, bool(suffix))
            for row, one, grad in zip(CONFORMANCE, x, g)
            for suffix in ("", BACKWARD)
        ]


def every(table: str, x: torch.Tensor) -> Any:
    """All programs of a table as one."""
    return [_as(name, function)(x) for name, function in TABLES[table].items()]


def one(table: str, name: str, x: torch.Tensor) -> Any:
    return TABLES[table][name](x)


# Of x, f32 [4, 6].
VERBS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: comm.all_reduce(x, "tp"),
    "all_reduce, max over dp": lambda x: comm.all_reduce(x, "dp", op="max"),
    "all_reduce, min over dp and tp": lambda x: comm.all_reduce(x, ("dp", "tp"), op="min"),
    "all_reduce, into itself": lambda x: comm.all_reduce(y := x * 2, "tp", out=y),
    "all_reduce, asynchronous": lambda x: comm.all_reduce(x, "tp", async_op=True).wait(),
    "all_reduce of a scalar": lambda x: comm.all_reduce(x.sum(), "world"),
    "all_reduce of a column": lambda x: comm.all_reduce(x[:, 1], "tp"),
    "all_reduce of integers": lambda x: comm.all_reduce(x.long(), "tp"),
    "all_gather": lambda x: comm.all_gather(x, "tp"),
    "all_gather, dim 1, transposed": lambda x: comm.all_gather(x.t()[1:], "tp", dim=1),
    "all_gather of flags": lambda x: comm.all_gather(x > 0, "tp"),
    "reduce_scatter": lambda x: comm.reduce_scatter(x, "tp"),
    "reduce_scatter, max along dim 1": lambda x: comm.reduce_scatter(x, "tp", dim=1, op="max"),
    "reduce_scatter of a column": lambda x: comm.reduce_scatter(x[:, 1], "tp"),
    "all_to_all": lambda x: comm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    "permute": lambda x: comm.permute(x, "world", [(0, 3), (3, 1)]),
    "broadcast": lambda x: comm.broadcast(x, "tp", src=1),
    "broadcast of a flag": lambda x: comm.broadcast(x[0, 0] > 0, "dp"),
}

LISTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: comm.all_reduce([x, x[:, 1], x.sum()], "tp"),
    "all_reduce, into themselves": lambda x: comm.all_reduce(y := [x * 2, x[0] * 2], "tp", op="max", out=y),
    "all_reduce, two dtypes": lambda x: comm.all_reduce([x, x.to(BF16), x[0]], "tp"),
    "all_reduce, two dtypes in f32": lambda x: comm.all_reduce([x, x.to(BF16), x[0]], "tp", reduce_dtype=F32),
    "all_reduce of one": lambda x: comm.all_reduce([x], "tp"),
    "all_gather": lambda x: comm.all_gather([x, x[1:, :5].t()], "dp", dim=1),
    "all_gather of flags": lambda x: comm.all_gather([x > 0, x[0] > 0], "tp"),
    "reduce_scatter": lambda x: comm.reduce_scatter([x, x[:2, 1]], "tp"),
    "reduce_scatter, bf16 in f32": lambda x: comm.reduce_scatter([x.to(BF16)], "tp", dim=1, reduce_dtype=F32),
}


def _grown(operator: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> Any:
    """Result and gradient."""
    leaf = x.to(BF16).requires_grad_()
    result = operator(leaf, "tp", **options)
    result.square().sum().backward()
    return result.detach(), leaf.grad


def _layers(x: torch.Tensor, **options: Any) -> Any:
    return layer_programs.pair({"dtype": BF16, **options}, x.to(BF16).requires_grad_())


def _gradients(x: torch.Tensor, reduce: Callable[[nn.Module, list[nn.Parameter]], Any]) -> Any:
    """Returns the reduced bf16 gradients, of rows that do not divide by the ranks."""
    params = [nn.Parameter(x[:rows].to(BF16)) for rows in (3, 2, 1)]
    for number, param in enumerate(params, 1):
        param.grad = param.detach() * number
    return reduce(nn.ParameterList(params), params)


def _zero1(params: list[nn.Parameter], **options: Any) -> Any:
    nxd.NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1, **options).step()
    return [param.detach() for param in params]


def _reduced(module: nn.Module, params: list[nn.Parameter], **options: Any) -> Any:
    nxd.reduce_gradients(module, **options)
    return [param.grad for param in params]


HALF: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce as it is": lambda x: comm.all_reduce(x.to(BF16), "tp"),
    "all_reduce": lambda x: comm.all_reduce(x.to(BF16), "tp", reduce_dtype=F32),
    "all_reduce, max": lambda x: comm.all_reduce(x.to(BF16), "tp", op="max", reduce_dtype=F32),
    "reduce_scatter": lambda x: comm.reduce_scatter(x.to(BF16), "tp", reduce_dtype=F32),
    "all_reduce(P, R)": lambda x: _grown(spmd.all_reduce, x, src=P, dst=R, reduce_dtype=F32),
    "all_gather(S(0), R)": lambda x: _grown(spmd.all_gather, x, src=S(0), dst=R, reduce_dtype=F32),
    "reduce_scatter(P, S(1))": lambda x: _grown(spmd.reduce_scatter, x, src=P, dst=S(1), reduce_dtype=F32),
    "convert(I, R)": lambda x: _grown(spmd.convert, x, src=I, dst=R, reduce_dtype=F32),
    "column, row": lambda x: _layers(x.new_ones(4, 16)),
    "column, row, sequence parallel": lambda x: _layers(x.new_ones(4, 16), sequence_parallel_enabled=True),
    "embedding": lambda x: layer_programs.embedding({"dtype": BF16}, x.long()),
    "cross entropy": lambda x: layer_programs.cross_entropy({}, x.to(BF16).requires_grad_(), x[:, 0].long()),
    "gradients": lambda x: _gradients(x, _reduced),
    "gradients in f32": lambda x: _gradients(x, lambda m, p: _reduced(m, p, reduce_dtype=F32)),
    "ZeRO-1": lambda x: _gradients(x, lambda m, p: _zero1(p)),
    "ZeRO-1, higher precision": lambda x: _gradients(x, lambda m, p: _zero1(p, higher_cc_precision=True)),
}

TABLES = {"verbs": VERBS, "lists": LISTS, "bf16": HALF}


def every_list(x: torch.Tensor, poison: torch.Tensor) -> dict[str, Any]:
    """Lists of tensors: uneven, strided, of two dtypes, scalars and nothing among them; after inf and NaN."""
    half, count = x[:4, :3].to(BF16), (x[0] * 4).long()
    held = [x * 2, x[1] * 2]
    comm.all_reduce(held, "tp", out=held)
    aside = [torch.empty(x.shape[0], 2 * x.shape[1], device=x.device), torch.empty(3, 2, device=x.device)]
    comm.all_gather([x, x[:3, :1]], "dp", dim=1, out=aside)
    return {
        "bad": [torch.isfinite(y) for y in comm.all_reduce([poison, x], "tp")],
        "bad, gathered": [torch.isfinite(y) for y in comm.all_gather([poison, x], "tp")],
        "sums": comm.all_reduce([x, x.t()[1:], x.sum(), half, count, x[:0]], ("dp", "tp")),
        "sums in f32": comm.all_reduce([half, x[0], half[0, 0]], "tp", reduce_dtype=F32),
        "highest": comm.all_reduce([x, count, half], "dp", op="max", async_op=True).wait(),
        "in place": held,
        "gathered": comm.all_gather([x, half, count, x > 0, x[:0]], "tp"),
        "gathered aside": aside,
        "scattered": comm.reduce_scatter([x[:4], half, x[:2, :3], x[:0]], "tp", reduce_dtype=F32),
        "scattered along dim 1": comm.reduce_scatter([x[:, :4], count.view(1, -1)[:, :4]], "tp", dim=1),
        "nothing": comm.all_reduce([], "tp"),
    }
