"""NxD's ring attention over context-parallel ranks, computed by `neuronx_dist.attention`."""

from __future__ import annotations

from typing import Any

import torch

from .... import comm
from ....attention.ring import Keys, attention

__all__ = ["nki_ring_attn_func"]


def nki_ring_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_id: int | None = None,
    src_tgt_pairs: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Any = None,
) -> torch.Tensor:
    """Computes attention to the keys of all context-parallel ranks; returns `[batch, heads, sequence / cp, head_dim]`.

    Each rank has a contiguous part of the sequence, of any length that is equal on all ranks, in the order of ranks.

    Args:
        q, k, v: `[batch, heads, sequence / cp, head_dim]`; q may have a multiple of the heads of k and v.
        softmax_scale: None: 1 / sqrt(head_dim).
        rank_id, src_tgt_pairs, mixed_precision, seed: settings of Neuron's kernel, without effect.

    Raises:
        NotImplementedError: `dropout_p` is not 0.
    """
    if dropout_p:
        raise NotImplementedError(f"nki_ring_attn_func: dropout_p={dropout_p} is not possible over a ring; pass 0")
    size, rank, length = comm.size("cp"), comm.rank("cp"), q.shape[2]
    runs = tuple(((start, start + length),) for start in range(0, size * length, length))
    keys = Keys((length,) * size, queries=runs[rank] if causal else None, positions=runs if causal else None)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    return attention(q, k, v, keys, "cp" if size > 1 else None, scale=scale)
