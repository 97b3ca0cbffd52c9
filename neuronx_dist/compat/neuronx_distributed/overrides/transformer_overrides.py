"""NxD's rotary embeddings, for queries and keys in either order of dims."""

from __future__ import annotations

import torch

__all__ = ["apply_rotary_pos_emb", "rotate_half"]


def rotate_half(x: torch.Tensor, flash_attn: bool, transpose: bool) -> torch.Tensor:
    """Returns `(-second half, first half)` of head_dim, which is dim 2 with both flags, else the last dim."""
    dim = -2 if flash_attn and transpose else -1
    first, second = x.chunk(2, dim=dim)
    return torch.cat((-second, first), dim=dim)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by their positions (RoFormer, Su et al., 2021).

    Args:
        q, k: `[batch, heads, sequence, head_dim]`, or with both flags `[batch, heads, head_dim, sequence]`.
        cos, sin: `[batch, sequence, head_dim]`; with `position_ids`, `[batch, sequence]`: `[positions, head_dim]`.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if flash_attn and transpose_nki_inputs:
        cos, sin = cos.transpose(2, 3), sin.transpose(2, 3)
    return tuple(  # type: ignore[return-value]
        x * cos + rotate_half(x, flash_attn, transpose_nki_inputs) * sin for x in (q, k)
    )
