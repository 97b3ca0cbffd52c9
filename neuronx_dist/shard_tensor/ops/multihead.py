"""`nn.MultiheadAttention` by its parts: linear, `scaled_dot_product_attention`, linear.

Torch's own code merges batch and heads into one dim, in which shards of the batch would be interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import sharded

__all__: list[str] = []

_INFINITY = float("inf")


@sharded(F.multi_head_attention_forward)
def multi_head_attention_forward(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return _forward(*args, **kwargs)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes `F.multi_head_attention_forward` for `[rows, batch, e]`, or `[rows, e]`.

    Raises:
        NotImplementedError: keys are added (`add_bias_kv`, `add_zero_attn`) or replaced (`static_k`, `static_v`).
        ValueError: `is_causal` without a mask.
    """
    if add_zero_attn or any(x is not None for x in (bias_k, bias_v, static_k, static_v)):
        raise NotImplementedError(
            "MultiheadAttention on ShardTensors does not support add_bias_kv, add_zero_attn, static_k and static_v: "
            "remove them, or call it on full_tensor()"
        )
    if is_causal and attn_mask is None:
        raise ValueError("MultiheadAttention: is_causal=True describes attn_mask, which is None: pass both")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )  # each [batch, heads, rows, e]
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_causal else _mask(attn_mask, key_padding_mask, q)
    dropout_p = dropout_p if training else 0.0
    used = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        used = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p)
        out = used @ v
        used = used.mean(1) if average_attn_weights else used
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if batched:
        return out, used
    return out.squeeze(1), None if used is None else used.squeeze(0)


def _mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """Returns the sum of both masks, to be added to scores; True in a boolean mask hides."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        if mask.dim() == 3:
            mask = mask.unflatten(0, tuple(q.shape[:2]))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -_INFINITY)
