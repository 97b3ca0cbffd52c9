"""Functions composed of other functions, each of which computes and communicates by its handler."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from ..tensor import ShardTensor
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


@sharded(F.embedding_bag)
def _embedding_bag(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Adds rows of bags that offsets cut out of sharded positions; each rank adds the rows of its positions."""

    def call(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: Any = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        is_sum = mode in ("sum", "mean") and not (max_norm or scale_grad_by_freq or sparse)
        is_cut = any(isinstance(x, ShardTensor) and x._spec.sharded for x in (input, per_sample_weights))
        if not (is_sum and is_cut) or input.dim() != 1 or offsets is None or isinstance(offsets, ShardTensor):
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        count = len(offsets) - include_last_offset
        at = torch.arange(len(input), device=offsets.device, dtype=offsets.dtype)
        bags = torch.searchsorted(offsets[:count].contiguous(), at, right=True) - 1
        counted = torch.ones_like(input) if padding_idx is None else input != padding_idx % weight.shape[0]
        scale = counted.to(weight.dtype) if per_sample_weights is None else counted * per_sample_weights
        rows = F.embedding(input, weight) * scale.unsqueeze(-1)
        sums = torch.index_add(rows.new_zeros((count, weight.shape[1])), 0, bags, rows)
        if mode == "sum":
            return sums
        sizes = torch.index_add(scale.new_zeros(count), 0, bags, counted.to(weight.dtype))
        return sums / sizes.clamp_min(1).unsqueeze(-1)

    return call(*args, **kwargs)


@composed(F.multi_margin_loss, checked=True)
def _multi_margin_loss(
    input: Any,
    target: Any,
    p: int = 1,
    margin: float = 1.0,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    reduction = reduction_name(reduction, size_average, reduce)
    x, at = (input.reshape(1, -1), target.reshape(1)) if input.dim() < 2 else (input, target)
    missing = F.relu(margin - x.gather(1, at.unsqueeze(1)) + x)
    missing = missing if p == 1 else missing * missing
    missing = missing if weight is None else missing * weight[at].unsqueeze(1)
    others = torch.arange(x.shape[1], device=at.device) != at.unsqueeze(1)
    losses = torch.where(others, missing, 0.0).sum(1) / x.shape[1]
    losses = losses.reshape(target.shape) if input.dim() < 2 else losses
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


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


@composed(_T.resize_, _T.resize_as_, torch.resize_as_)
def _resize(input: Any, *sizes: Any, memory_format: Any = None) -> Any:
    """Returns a tensor that has the size already, as buffers that are reused mostly have."""
    size = getattr(sizes[0], "shape", sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)
    if tuple(size) != tuple(input.shape):
        raise NotImplementedError(
            f"resize_: a ShardTensor of shape {tuple(input.shape)} cannot become {tuple(size)} in place: use "
            "x.reshape(), or a new tensor"
        )
    return input


@composed(torch.fill)
def _fill(input: Any, value: Any) -> Any:
    return torch.where(torch.ones_like(input, dtype=torch.bool), value, input).to(input.dtype)


@composed(torch.cross, _T.cross, checked=True)
def _cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Returns the products along a dim; by default it is the first one of size 3 of the whole tensors."""
    return torch.linalg.cross(input, other, dim=list(input.shape).index(3) if dim is None else dim)


@sharded(torch.linalg.cross)
def _linalg_cross(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, other: Any, *, dim: int = -1) -> Any:
        if input.shape != other.shape:  # a dim of size 1 may be sharded, and the other one not
            input, other = torch.broadcast_tensors(input, other)
        return FUNCTIONS[UNHANDLED](func, types, (input, other), {"dim": dim})

    return call(*args, **kwargs)


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
        free_dims = [d for d in first if d not in left] + [a.dim() + d for d in range(b.dim()) if d not in right]
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        terms = ["".join(letters[name] for name in names) for names in (first, second, free_dims)]
        return torch.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", a, b)

    return call(*args, **kwargs)
