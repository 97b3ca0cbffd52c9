"""Forms of functions that results and backward passes of compiled and exported programs name.

Native norms, which return their statistics too, backward functions, copying forms of views, and slices as operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...torch_internals import low_level
from ...torch_internals.tensors import pytree
from ..handlers import FUNCTIONS, composed, sharded
from .select import dim_of

__all__: list[str] = []

_T = torch.Tensor
_aten = torch.ops.aten


def _both(operator: Any) -> tuple[Any, Any]:
    """Returns an operator as eager code and as exported programs name it."""
    return operator, operator.default


# --- norms and their statistics, which have gradients for groups alone


def _statistics(x: Any, dims: list[int], eps: float, keepdim: bool = False) -> tuple[Any, Any]:
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return mean, (variance + eps).rsqrt()


@composed(torch.native_layer_norm)
def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = range(input.dim() - len(normalized_shape), input.dim())
    y = F.layer_norm(input, normalized_shape, weight, bias, eps)
    return y, *_statistics(input.detach(), list(dims), eps, True)


@composed(torch.native_group_norm)
def native_group_norm(input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Any:
    y = F.group_norm(input, group, weight, bias, eps)
    return y, *_statistics(input.reshape(N, group, C // group * HxW), [2], eps)


def _native_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> Any:
    y = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [0, *range(2, input.dim())]
    return y, *(_statistics(input.detach(), dims, eps) if training else (y.new_empty(0), y.new_empty(0)))


composed(torch.native_batch_norm, low_level.native_batch_norm_legit)(_native_batch_norm)


@composed(*_both(low_level.batch_norm_with_update))
def batch_norm_with_update(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    results = _native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results, input.new_empty(0, dtype=torch.uint8)


# --- softmax without NaN; backward passes


@composed(*_both(low_level.safe_softmax))
def safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Returns the softmax, 0 where all of a row is -inf."""
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(nothing, 0.0, torch.softmax(torch.where(nothing, 0.0, x), dim, dtype=dtype))


@composed(*_both(low_level.softmax_backward_data))
def softmax_backward(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    return (output * (grad - (grad * output).sum(dim, keepdim=True))).to(input_dtype)


@composed(*_both(_aten.native_dropout_backward))
def dropout_backward(grad_output: Any, mask: Any, scale: float) -> Any:
    return grad_output * (mask.to(grad_output.dtype) * scale)


# --- masked positions


@composed(low_level.unsafe_masked_index)
def masked_index(x: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Returns `x[indices]` where the mask is True; positions may be out of bounds elsewhere."""
    return torch.where(mask, x[tuple(_clamped(x, indices))], fill)


@composed(low_level.unsafe_masked_index_put_accumulate)
def masked_index_put(x: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    return torch.index_put(x, _clamped(x, indices), torch.where(mask, values, 0), accumulate=True)


def _clamped(x: Any, indices: Sequence[Any]) -> list[Any]:
    return [
        slice(None) if index is None else index.clamp(-size, size - 1) if size else index
        for index, size in zip(indices, x.shape)
    ]


# --- joined, sliced and copied


@composed(low_level.chunk_cat)
def chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> Any:
    """Returns the chunks of all tensors side by side, as FSDP's reduce-scatter takes them."""
    dim = dim_of(tensors[0], dim)
    rows = []
    for x in tensors:
        x = F.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, -x.shape[dim] % num_chunks))
        rows.append(x.reshape(*x.shape[:dim], num_chunks, prod(x.shape[dim:]) // num_chunks))
    return torch.cat(rows, dim + 1)


@composed(_aten.slice, _aten.slice.Tensor)
def sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return x[(slice(None),) * dim_of(x, dim) + (slice(start, end, step),)]


_VIEWS: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(torch, f"{name}_copy"): getattr(torch, name)
    for name in "diagonal permute select split split_with_sizes squeeze t transpose unbind unsqueeze".split()
} | {getattr(torch, f"{name}_copy"): getattr(_T, name) for name in ("expand", "unfold", "view")}


@sharded(*_VIEWS)
def copied(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    view = _VIEWS[func]
    return pytree.tree_map(torch.clone, FUNCTIONS[view](view, types, args, kwargs))
