"""Functions composed of other functions, each of which computes and communicates by its handler."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from .losses import as_autocast, reduction_name

__all__: list[str] = []

_T = torch.Tensor
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _body(function: Any) -> Callable[..., Any]:
    """Computes a function of `torch.nn.functional` by its Python code, run on ShardTensors."""
    namespace = function.__globals__ | {name: lambda *_: False for name in _ASKS}
    body = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_BODIES = {
    function: _body(function)
    for function in (
        F.gaussian_nll_loss,
        F.multilabel_soft_margin_loss,
        F.normalize,
        F.triplet_margin_with_distance_loss,
    )
}


@sharded(*_BODIES)
def _by_body(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return _BODIES[func](*args, **kwargs)


@sharded(F.triplet_margin_loss, torch.triplet_margin_loss)
def _triplet_margin_loss(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        anchor: Any,
        positive: Any,
        negative: Any,
        margin: float = 1.0,
        p: float = 2,
        eps: float = 1e-6,
        swap: bool = False,
        *last: Any,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str | int = "mean",
    ) -> Any:
        return F.triplet_margin_with_distance_loss(
            *map(as_autocast, (anchor, positive, negative)),
            distance_function=lambda x, y: F.pairwise_distance(x, y, p, eps),
            margin=margin,
            swap=swap,
            reduction=reduction_name(last[0] if last else reduction, size_average, reduce),
        )

    return call(*args, **kwargs)


@sharded(F.cosine_embedding_loss, torch.cosine_embedding_loss)
def _cosine_embedding_loss(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input1: Any,
        input2: Any,
        target: Any,
        margin: float = 0.0,
        *last: Any,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str | int = "mean",
    ) -> Any:
        reduction = reduction_name(last[0] if last else reduction, size_average, reduce)
        input1, input2 = as_autocast(input1), as_autocast(input2)
        products = torch.stack((input1 * input2, input1 * input1, input2 * input2)).sum(-1)
        cosine = products[0] / ((products[1] + 1e-12) * (products[2] + 1e-12)).sqrt()
        unlike = torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)
        losses = torch.where(target == 1, 1 - cosine, 0.0) + unlike
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()

    return call(*args, **kwargs)


@sharded(F.ctc_loss)
def _ctc_loss(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *options: Any, **named: Any) -> Any:
        lengths = [
            x if isinstance(x, torch.Tensor) else torch.tensor(x, device=log_probs.device)
            for x in (input_lengths, target_lengths)
        ]  # each rank takes its samples' lengths
        return FUNCTIONS[UNHANDLED](func, types, (log_probs, targets, *lengths, *options), named)

    return call(*args, **kwargs)


@sharded(F.glu)
def _glu(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, dim: int = -1) -> Any:
        if input.shape[dim] % 2:
            raise RuntimeError(f"glu: dim {dim} has {input.shape[dim]} elements, and must have an even number")
        values, gates = input.chunk(2, dim)
        return values * gates.sigmoid()

    return call(*args, **kwargs)


@sharded(F.rrelu, torch.rrelu)
def _rrelu(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Any:
        if training:  # numbers are drawn for negative elements alone: which ones they are is the whole's to say
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        return F.leaky_relu(input, (lower + upper) / 2, inplace)

    return call(*args, **kwargs)


@composed(torch.fill)
def _fill(input: Any, value: Any) -> Any:
    return torch.where(torch.ones_like(input, dtype=torch.bool), value, input).to(input.dtype)


@composed(torch.cross, _T.cross, checked=True)
def _cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Returns the products along a dim; by default it is the first one of size 3 of the whole tensors."""
    return torch.linalg.cross(input, other, dim=list(input.shape).index(3) if dim is None else dim)


@sharded(torch.tensordot)
def _tensordot(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
        if isinstance(dims, torch.Tensor):
            dims = dims.tolist()
        left, right = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
        left = [left] if isinstance(left, int) else [dim % a.dim() for dim in left]
        right = [right] if isinstance(right, int) else [dim % b.dim() for dim in right]
        if out is not None:
            raise ValueError("tensordot: out= is not supported; use out.copy_(torch.tensordot(..))")
        first = list(range(a.dim()))
        second = [first[left[right.index(d)]] if d in right else a.dim() + d for d in range(b.dim())]
        kept = [d for d in first if d not in left] + [a.dim() + d for d in range(b.dim()) if d not in right]
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        terms = ["".join(letters[name] for name in names) for names in (first, second, kept)]
        return torch.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", a, b)

    return call(*args, **kwargs)
