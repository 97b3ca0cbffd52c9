"""NxD's flash attention, computed by torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["nki_flash_attn_func"]


def nki_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Any = None,
    hardware_type: Any = None,
    transpose_nki_inputs: bool = True,
) -> torch.Tensor:
    """Computes attention of any sequence length; returns `[batch, heads, sequence, head_dim]`.

    Args:
        q, k, v: `[batch, heads, head_dim, sequence]` with `transpose_nki_inputs`, else
            `[batch, heads, sequence, head_dim]`; q may have a multiple of the heads of k and v.
        dropout_p: drawn from torch's generator.
        softmax_scale: None: 1 / sqrt(head_dim).
        lnc, mixed_precision, seed, hardware_type: settings of Neuron's kernel, without effect.
    """
    if transpose_nki_inputs:
        q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
    )
