"""The autograd functions of the linear layers: column- and row-parallel, each with its collectives.

Names (b tokens, in/out features, t ranks; `[b, in]` stands for any leading dims):

    column   Y[b, out/t] = X[b, in] · W[out/t, in]ᵀ       X is R on tp, W and Y are sharded on out
             dX[b, in]   = dY[b, out/t] · W               partial on tp: all-reduced, while dW is computed
             dW          = dYᵀ · X
    row      Y[b, out]   = X[b, in/t] · W[out, in/t]ᵀ     partial on tp: all-reduced
             dX[b, in/t] = dY[b, out] · W,   dW = dYᵀ · X  no communication

With sequence parallelism X (column) and Y (row) are sharded on the sequence: the all-reduces become an all-gather
forward and a reduce-scatter backward (column), and the other way round (row); only the shard of X is saved for
backward, which gathers it again. Source: Megatron-LM (arXiv:1909.08053, arXiv:2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function

from .. import comm, spmd
from ..comm import Communicator
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming
from ..spmd import I, P, R, S
from ..spmd.local_holders import holds_local
from ..spmd.random import checkpoint
from ..spmd.watching import active
from ..torch_internals.tensors import is_view, without_base

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "ZerosStay",
    "call",
    "cast_if_autocast_enabled",
    "linear_alone",
]


def call(function: Any, *args: Any) -> Any:
    """Calls one of these functions; under transforms of `torch.func` the operators of its composition.

    Tensors that hold a local tensor have a handler for this function.
    """
    if holds_local(*args):
        return handle_torch_function(call, args, function, *args)
    return function.composition(*args) if transforming() else function.apply(*args)


def cast_if_autocast_enabled(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Under autocast, the floating-point tensors in its dtype; otherwise the tensors themselves."""
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which knows no meta device
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
    )


class ColumnLinear(torch.autograd.Function):
    """n linear layers on one input, with one input-gradient collective.

    The collective is started before the weight gradients are computed, and awaited after them.

    The weight of an output that nothing reads has no gradient; in compiled code, for which torch calls backward with
    zeros, a gradient of zeros, by which weight decay and momentum move it.
    """

    splits_backward = True  # for pipeline/run/halves.py: only requested gradients are computed

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> Any:
        x, *params = cast_if_autocast_enabled(x, *weights_and_biases)  # type: ignore[assignment]
        weights, biases = params[:count], params[count:] or [None] * count
        ctx.save_for_backward(x, *weights)
        ctx.communicator, ctx.sequence_dim, ctx.reduce_dtype = communicator, sequence_dim, reduce_dtype
        if not is_dynamo_compiling():  # which passes zeros in any case
            ctx.set_materialize_grads(False)
        full = x if sequence_dim is None else comm.all_gather(x, communicator, dim=sequence_dim)
        outs = (F.linear(full, weight, bias) for weight, bias in zip(weights, biases))  # type: ignore[arg-type]
        return tuple(outs) if is_dynamo_compiling() else tuple(map(_writable, outs))

    @staticmethod
    def composition(
        x: torch.Tensor,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> Any:
        """Composes this function of operators, for `torch.func`; the type checker compares both forms."""
        linears = partial(ColumnLinear._linears, communicator, sequence_dim, reduce_dtype, count)
        if sequence_dim is None or transforming():  # which know no checkpoints
            return linears(x, *weights_and_biases)
        return checkpoint(linears, x, *weights_and_biases)  # what was gathered is not saved

    @staticmethod
    def _linears(
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
        count: int,
        x: torch.Tensor,
        *params: torch.Tensor,
    ) -> Any:
        if sequence_dim is None:
            full = spmd.convert(x, communicator, src=I, dst=R, reduce_dtype=reduce_dtype)
        else:
            full = spmd.all_gather(x, communicator, src=S(sequence_dim), dst=R, reduce_dtype=reduce_dtype)
        biases = params[count:] or [None] * count
        return tuple(F.linear(full, weight, bias) for weight, bias in zip(params, biases))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        communicator, dim = ctx.communicator, ctx.sequence_dim
        count = len(weights)
        arrived = [i for i, grad in enumerate(grads) if grad is not None]
        if not arrived:
            return (None,) * len(ctx.needs_input_grad)
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        flat: list[Any] = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]  # [tokens, out/t]
        if torch.is_grad_enabled() and not is_dynamo_compiling():  # create_graph=True
            outs = ColumnLinear._linears(communicator, dim, ctx.reduce_dtype, count, x, *weights)
            grad_x, *grad_params = _by_operators(outs, (x, *weights), grads, (need_x, *need))
            grad_params += _bias_grads(flat, need[count:])
            return (grad_x, None, None, None, None, *grad_params)
        gathering = None
        if dim is not None and any(need[i] for i in arrived):
            gathering = comm.all_gather(x, communicator, dim=dim, async_op=True)
        reducing = None
        if need_x:
            grad_x = flat[arrived[0]].mm(weights[arrived[0]])
            for i in arrived[1:]:
                grad_x.addmm_(flat[i], weights[i])
            grad_x = grad_x.view(*grads[arrived[0]].shape[:-1], grad_x.shape[-1])
            if dim is None:
                reducing = comm.all_reduce(
                    grad_x, communicator, reduce_dtype=ctx.reduce_dtype, out=grad_x, async_op=True
                )
            else:
                reducing = comm.reduce_scatter(
                    grad_x, communicator, dim=dim, reduce_dtype=ctx.reduce_dtype, async_op=True
                )
        if gathering is not None:
            x = gathering.wait()
        grad_params = _parameter_grads(x, flat, need)
        return (reducing.wait() if reducing is not None else None, None, None, None, None, *grad_params)


def _writable(out: torch.Tensor) -> torch.Tensor:
    """Returns an output that may be written in place, which torch forbids for a function's views (`F.linear`'s)."""
    if in_one_program(out) or not is_view(out):
        return out
    return out.clone() if active() is not None else without_base(out)


def linear_alone(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, communicator: Communicator
) -> torch.Tensor:
    """`F.linear`, on a group of one.

    On XLA autograd would save the transposed weight, which becomes a copy at each end of a program: in a pipeline, one
    copy for each microbatch in flight.
    """
    if in_one_program(x):
        biases = [] if bias is None else [bias]
        out: torch.Tensor = call(ColumnLinear, x, communicator, None, None, 1, weight, *biases)[0]
        return out
    return F.linear(x, weight, bias)


class RowLinear(torch.autograd.Function):
    """A linear layer whose output is a partial sum.

    The reduction is done in the output's memory, unless it is in a wider dtype; then the bias is added to the sum.
    """

    splits_backward = True  # the second half uses the input that the first half gathered

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        x, weight, bias = cast_if_autocast_enabled(x, weight, bias)  # type: ignore[assignment]
        ctx.save_for_backward(x, weight)
        ctx.communicator, ctx.sequence_dim, ctx.reduce_dtype = communicator, sequence_dim, reduce_dtype
        out = F.linear(x, weight)
        if sequence_dim is None:
            out = comm.all_reduce(out, communicator, reduce_dtype=reduce_dtype, out=out)
        else:
            out = comm.reduce_scatter(out, communicator, dim=sequence_dim, reduce_dtype=reduce_dtype)
        if bias is None:
            return out
        # torch 2.11 compiles a function that returns the result of a write in place to one with zero gradients.
        return out + bias if is_dynamo_compiling() else out.add_(bias)

    @staticmethod
    def composition(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communicator: Communicator,
        sequence_dim: int | None,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """Composes this function of operators, for `torch.func`; the type checker compares both forms."""
        out = F.linear(x, weight)
        if sequence_dim is None:
            out = spmd.all_reduce(out, communicator, src=P, dst=I, reduce_dtype=reduce_dtype)
        else:
            out = spmd.reduce_scatter(out, communicator, src=P, dst=S(sequence_dim), reduce_dtype=reduce_dtype)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if need[2] else None
        if torch.is_grad_enabled() and not is_dynamo_compiling():  # create_graph=True
            out = RowLinear.composition(x, weight, None, ctx.communicator, ctx.sequence_dim, ctx.reduce_dtype)
            return (*_by_operators([out], (x, weight), [grad], need), grad_bias, None, None, None)
        if ctx.sequence_dim is not None:
            first_half = getattr(ctx, "gathered", None)
            grad = comm.all_gather(grad, ctx.communicator, dim=ctx.sequence_dim) if first_half is None else first_half
            if getattr(ctx, "in_halves", False):
                ctx.gathered = grad if first_half is None else None
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = flat.mm(weight).view(*grad.shape[:-1], weight.shape[1]) if need[0] else None
        (grad_weight,) = _parameter_grads(x, (flat,), (need[1],))
        return grad_x, grad_weight, grad_bias, None, None, None


class ZerosStay(torch.autograd.Function):
    """A weight `[out, in]` whose columns are zero where `mask` `[in]` is False, and get no gradient there."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return weight.view_as(weight)

    @staticmethod
    def composition(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Composes this function of operators, with a copy of the weight."""
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * mask, None


def _by_operators(
    outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[Any], need: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients of a composition, which can be differentiated again: those of `forward` know no collectives."""
    wanted = [x for x, is_needed in zip(inputs, need) if is_needed]
    if not all(x.requires_grad for x in wanted):  # casts, whose graph is not the inputs'
        raise RuntimeError("create_graph=True: parallel linear layers have no second derivatives under autocast")
    outs, grads = zip(*[(out, grad) for out, grad in zip(outs, grads) if grad is not None])
    found = iter(torch.autograd.grad(outs, wanted, grads, create_graph=True, allow_unused=True) if wanted else ())
    return [next(found) if is_needed else None for _, is_needed in zip(inputs, need)]


def _parameter_grads(
    x: torch.Tensor, flat: Sequence[torch.Tensor | None], need: Sequence[bool]
) -> list[torch.Tensor | None]:
    """dW = dYᵀ · X and db = Σ dY, where they are needed; `flat` holds each layer's dY as `[tokens, out/t]`, or None."""
    flat_x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # also of no features
    weight_grads = [g.t().mm(flat_x) if g is not None and wanted else None for g, wanted in zip(flat, need)]
    return weight_grads + _bias_grads(flat, need[len(flat) :])


def _bias_grads(flat: Sequence[torch.Tensor | None], need: Sequence[bool]) -> list[torch.Tensor | None]:
    return [g.sum(0) if g is not None and wanted else None for g, wanted in zip(flat, need)]
