"""Means rewritten as a sum and a division: on shards the typing rules forbid means, and allow sums and divisions.

The mean of the shards' means is not the global mean where shards count different numbers of positions: a cross entropy
leaves out ignored labels. The sum of the shards' sums is the global sum, and the sum of their counts the global count.
Element counts written here are global: a strategy that shards a dim does not change them.

    mean over all elements      sum / number of elements; for 16-bit inputs in float32, as torch computes it
    cross entropy, nll          sum / (target != ignore_index).sum()
    other losses                sum / number of elements (kl_div's "batchmean": / number of rows)

Embeddings with `sparse=True` get dense gradients, of equal values: sums over ranks, ZeRO and clipping take no others.

The elements of a 16-bit loss are computed in 16 bits, as in torch; their sum and the division in float32.

Not rewritten: means over some dims (on shards they are P("avg"), which an all-reduce averages), losses with class
weights (the denominator has them too), and calls with torch's old arguments `size_average` and `reduce`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ..rules.containers import substituted
from ..torch_internals.tensors import pytree, tensor_to
from .builder import Builder, without_dead_calls
from .program import Call, Program, Value, argument_name

__all__ = ["decomposed"]


def decomposed(program: Program) -> Program:
    """Returns the program with means as sums, equal up to rounding; the calls of `program` are reused and changed."""
    arguments = pytree.tree_unflatten(program.arguments, program.structure)
    values = [*program.leaves, *(value for call in program.calls for value in call.results)]
    builder = Builder(values, reserved=map(argument_name, arguments))
    instead: dict[Value, Value] = {}

    def current(value: Value) -> Value:
        return instead.get(value, value)

    for call in program.calls:
        call.args, call.kwargs = substituted((call.args, call.kwargs), Value, current)
        rewrite = _REWRITES.get(call.function)
        result = rewrite(builder, call) if rewrite is not None else None
        if result is None:
            builder.calls.append(call)
        else:
            instead[call.results[0]] = result
    outputs = [current(leaf) if isinstance(leaf, Value) else leaf for leaf in program.outputs]
    return replace(program, calls=without_dead_calls(builder.calls, outputs), outputs=outputs)


def _mean(builder: Builder, call: Call) -> Value | None:
    options = _arguments(call, "input dim keepdim dtype")
    x, result = options["input"], call.results[0]
    if math.prod(result.shape) != 1 or "out" in call.kwargs:
        return None
    dim, keepdim = options.get("dim"), options.get("keepdim", False)
    named = {"dim": dim, "keepdim": keepdim} if dim is not None or keepdim else {}
    total = builder.compute(call, torch.sum, x, **named, dtype=_wide(result.dtype))
    return _as(builder, call, builder.compute(call, torch.div, total, math.prod(x.shape)), result)


def _cross_entropy(builder: Builder, call: Call) -> Value | None:
    options = _loss_arguments(call)
    target = options["target"]
    if options["reduction"] != "mean" or options["weight"] is not None or not isinstance(target, Value):
        return None
    if target.dtype.is_floating_point:  # probabilities of the classes, dim 1: the mean over all else
        classes = options["input"].shape[min(1, len(options["input"].shape) - 1)]
        return _over(builder, call, options, math.prod(target.shape) // classes)
    counted = builder.compute(call, torch.ne, target, options["ignore_index"])
    return _over(builder, call, options, builder.compute(call, torch.sum, counted))


def _loss(builder: Builder, call: Call) -> Value | None:
    options = _loss_arguments(call)
    reduction = options["reduction"]
    weighted = options.get("weight") is not None and call.function not in _WEIGHTED_ELEMENTS
    if reduction not in ("mean", "batchmean") or weighted:
        return None
    if reduction == "batchmean":
        return _over(builder, call, options, options["input"].shape[0])
    shapes = [value.shape for name, value in options.items() if name in _OPERANDS and isinstance(value, Value)]
    return _over(builder, call, options, math.prod(torch.broadcast_shapes(*shapes)))


def _dense_gradient(builder: Builder, call: Call) -> None:
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    if bound.arguments.get("sparse"):
        bound.arguments["sparse"] = False
        call.args, call.kwargs = bound.args, bound.kwargs


def _over(builder: Builder, call: Call, options: dict[str, Any], count: Value | int) -> Value:
    named = {name: value for name, value in options.items() if _is_given(call, name, value)}
    operands = [named.pop(name) for name in _OPERANDS if name in named]
    result = call.results[0]
    wide = _wide(result.dtype)
    if wide == result.dtype:
        total = builder.compute(call, call.function, *operands, **{**named, "reduction": "sum"})
    else:  # a sum in 16 bits overflows, or loses small addends
        losses = builder.compute(call, call.function, *operands, **{**named, "reduction": "none"})
        total = builder.compute(call, torch.sum, losses, dtype=wide)
    return _as(builder, call, builder.compute(call, torch.div, total, count), result)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate in for a result of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_OPERANDS = ("input", "input1", "input2", "target")
_WEIGHTED_ELEMENTS = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits}
_REWRITES: dict[Callable[..., Any], Callable[[Builder, Call], Value | None]] = {
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _cross_entropy,
    F.embedding: _dense_gradient,
    F.embedding_bag: _dense_gradient,
    **dict.fromkeys(
        [
            F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
            F.hinge_embedding_loss, F.margin_ranking_loss,
        ],
        _loss,
    ),
}  # fmt: skip


def _arguments(call: Call, names: str) -> dict[str, Any]:
    renamed = {"self": "input", "axis": "dim"}
    return {**dict(zip(names.split(), call.args)), **{renamed.get(k, k): v for k, v in call.kwargs.items()}}


def _loss_arguments(call: Call) -> dict[str, Any]:
    """Returns all arguments by name, defaults included; `reduction` is None for calls with torch's old arguments."""
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    options = dict(bound.arguments)
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        options["reduction"] = None
    options.pop("reduce", None)
    return options


def _is_given(call: Call, name: str, value: Any) -> bool:
    return value is not inspect.signature(call.function).parameters[name].default


def _as(builder: Builder, call: Call, value: Value, like: Value) -> Value:
    return value if value.dtype == like.dtype else builder.compute(call, tensor_to, value, like.dtype)
