"""A mixture of experts as three functions, whose shapes depend on no value: what a recording has in place of a loop.

    rows, offsets = to_experts(tokens, index, experts)        # the rows of expert 0, of expert 1, ...
    rows = expert_product(rows, matrices, offsets, bias)      # a matrix for each expert
    tokens = to_tokens(rows, weights, index, experts)         # the weighted sum of each token's rows

`parallelize` divides them over the experts: `parallelize/composites.py` has their forms for a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..rules import Spec, rule
from ..torch_internals.fake_tensors import FakeTensor

__all__ = ["expert_product", "experts_of_transformers", "has_values", "to_experts", "to_tokens"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _one_call(body: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one call for recorders and checkers."""

    @functools.wraps(body)
    def function(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(function, tensors, *args, **kwargs)
        return body(*args, **kwargs)

    return function


def has_values(x: Tensor) -> bool:
    """Returns whether sizes may depend on values: not while a program is recorded or checked."""
    return not (x.is_meta or isinstance(x, FakeTensor))


@_one_call
def to_experts(tokens: Tensor, index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns a row for each choice of an expert, in order of experts.

    Args:
        tokens: `[tokens, h]`.
        index: the k experts of each token, `[tokens, k]`.

    Returns:
        Rows `[tokens * k, h]`, and the end of each expert's rows, `[experts]`.
    """
    numbers, choices = torch.sort(index.reshape(-1), stable=True)
    counts = numbers.new_zeros(experts).scatter_add(0, numbers, torch.ones_like(numbers))
    return tokens.index_select(0, choices // index.shape[1]), counts.cumsum(0, dtype=torch.int32)


@_one_call
def expert_product(rows: Tensor, matrices: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the product of each expert's rows with its matrix: `[rows, in], [experts, in, out] -> [rows, out]`.

    By torch's grouped kernel where it takes the operands (no float64, rows of 16 bytes), else expert by expert, in the
    dtype of the matrices, under autocast too, which does not know the kernel.

    Args:
        offsets: the end of each expert's rows; the last one is the number of rows.
        bias: `[experts, out]`, added to the rows of each expert.
    """
    device = rows.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # which knows no meta device
        with torch.autocast(device, enabled=False):
            return expert_product(rows, matrices, offsets, bias)
    rows = rows.to(matrices.dtype)
    aligned = all(size * rows.element_size() % 16 == 0 for size in matrices.shape[1:])
    kernel = getattr(F, "grouped_mm", None)
    if not has_values(rows):
        out = rows @ matrices[0]
    elif kernel is not None and aligned and len(rows) and rows.dtype in _KERNEL_DTYPES:
        out = kernel(rows.contiguous(), matrices, offs=offsets)
    else:
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist()
        out = torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices.unbind(), strict=True)])
    if bias is None:
        return out
    numbers = torch.arange(len(rows), device=rows.device, dtype=offsets.dtype)
    return out + bias.index_select(0, torch.searchsorted(offsets, numbers, right=True))


@_one_call
def to_tokens(rows: Tensor, weights: Tensor, index: Tensor, experts: int) -> Tensor:
    """Returns the sum of each token's rows, weighted by `[tokens, k]`: `[tokens, h]`, in the dtype of the rows."""
    chosen = torch.zeros_like(rows).index_copy(0, torch.argsort(index.reshape(-1), stable=True), rows)
    return (chosen.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


# --- what the functions do to dims

_SORTED = "rows are sorted by expert"
_TOKENS, _TOP_K, _WIDTH, _EXPERTS = 0, 1, 2, 3  # labels


@rule(to_experts)
def _to_experts_spec(tokens: Tensor, index: Tensor, experts: int) -> Spec:
    sizes = {_TOKENS: index.shape[0], _TOP_K: index.shape[1], _WIDTH: tokens.shape[1], _EXPERTS: experts}
    outs = (((_TOKENS, _TOP_K), (_WIDTH,)), ((_EXPERTS,),))
    ins = (((_TOKENS,), (_WIDTH,)), ((_TOKENS,), (_TOP_K,)))
    return Spec(ins, outs, sizes, {}, dict.fromkeys((_TOKENS, _TOP_K, _EXPERTS), _SORTED))


@rule(expert_product, linear=((0, 3), (1, 3)))
def _expert_product_spec(rows: Tensor, matrices: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Spec:
    sizes = dict(enumerate((rows.shape[0], *matrices.shape)))
    ins = [((0,), (2,)), ((1,), (2,), (3,)), ((1,),), ((1,), (3,))]
    whole = "each expert has rows of its own"
    return Spec(tuple(ins[: 3 if bias is None else 4]), (((0,), (3,)),), sizes, {2: "sum"}, {0: whole, 1: whole})


@rule(to_tokens, linear=((0,), (1,)))
def _to_tokens_spec(rows: Tensor, weights: Tensor, index: Tensor, experts: int) -> Spec:
    sizes = {_TOKENS: weights.shape[0], _TOP_K: weights.shape[1], _WIDTH: rows.shape[1]}
    choices = ((_TOKENS,), (_TOP_K,))
    ins = (((_TOKENS, _TOP_K), (_WIDTH,)), choices, choices)
    return Spec(ins, (((_TOKENS,), (_WIDTH,)),), sizes, {_TOP_K: "sum"}, dict.fromkeys((_TOKENS, _TOP_K), _SORTED))


def experts_of_transformers(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes Hugging Face's experts by these functions: an implementation for its `ExpertsInterface`."""

    def product(rows: Tensor, name: str) -> Tensor:
        matrices, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        return expert_product(rows, matrices if module.is_transposed else matrices.transpose(-2, -1), offsets, bias)

    rows, offsets = to_experts(hidden_states, top_k_index, module.num_experts)
    if module.has_gate:
        rows = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(product(rows, "up_proj"))
    rows = product(rows, "down_proj")
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    return to_tokens(rows, top_k_weights, top_k_index, module.num_experts).to(hidden_states.dtype)
