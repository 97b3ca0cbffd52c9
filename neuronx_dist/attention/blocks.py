"""One block of attention: some queries against some keys, and the log-sum-exp of its scores, by which blocks merge.

Shapes: q `[b, heads, rows, e]`, k `[b, kv heads, keys, e]`, v `[b, kv heads, keys, ev]`; `heads` is a multiple of
`kv heads`. mask `[b or 1, heads or 1, rows, keys]`, boolean (True: seen) or added to the scores; then `largest`,
`[b or 1, heads or 1, rows, 1]`, is the largest number of each row of the whole mask. noise, of dropout,
`[b, heads, rows, keys]`: 0 or 1 / (1 - p). out `[b, heads, rows, ev]`. lse `[b, heads, rows]`, which is -inf for rows
that see nothing. It is that of the scores minus `largest`: of a row that finite numbers hide (`torch.finfo.min`) the
log-sum-exp itself would have no digits left for the number of keys, by which blocks are weighted.

torch's fused kernel for CPUs computes a block where it can; elsewhere, on other devices too, its formula is written
out, with the scores of one block in memory. Both backwards take the log-sum-exp and the output of the *whole* row, so
that blocks are differentiated one by one (Dao, arXiv:2307.08691; Liu et al., Ring Attention, arXiv:2310.01889). torch
has such kernels for GPUs, which pad the log-sum-exp and take other arguments: none is used before it has been tested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..torch_internals.operators import cpu_attention, cpu_attention_backward

__all__ = ["Block", "backward", "forward", "merge", "without_infinity"]

_INFINITY = float("inf")


class Block(NamedTuple):
    """The operands of a block; `diagonal`: query i sees keys 0..i only."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    noise: torch.Tensor | None
    diagonal: bool
    scale: float
    largest: torch.Tensor | None = None

    @property
    def empty(self) -> bool:
        return self.q.numel() == 0 or self.k.numel() == 0 or self.v.numel() == 0

    @property
    def fused(self) -> bool:
        """Returns whether torch has a kernel that returns this block's log-sum-exp."""
        if self.noise is not None or self.largest is not None or (self.diagonal and self.mask is not None):
            return False
        same = self.q.dtype == self.k.dtype == self.v.dtype and self.q.shape[-1] == self.v.shape[-1]
        return same and self.q.device.type == "cpu"


def without_infinity(lse: torch.Tensor) -> torch.Tensor:
    """Replaces -inf by 0, so that `exp(score - lse)` is 0 and not NaN in rows that see nothing."""
    return lse.masked_fill(lse == -_INFINITY, 0.0)


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Writes into `out` and `lse` the attention to the keys of both blocks."""
    total = torch.logaddexp(lse, other_lse)
    base = without_infinity(total)
    out.lerp_(other.to(out.dtype), (other_lse - base).exp_().unsqueeze(-1))  # the weights of both add up to 1
    lse.copy_(total)


def forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes output and log-sum-exp of a nonempty block; half precision in float32, but for fused kernels."""
    if not block.fused:
        scores = _scores(block)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(without_infinity(lse).unsqueeze(-1)).exp_()
        return _dropped(weights, block) @ _heads(block.v, block).to(weights.dtype), lse
    additive = _additive(block)
    k, v = _heads(block.k, block), _heads(block.v, block)
    out, lse = cpu_attention(_rows(block.q), k, v, 0.0, block.diagonal, attn_mask=additive, scale=block.scale)
    if additive is not None:
        blind = (additive == -_INFINITY).all(-1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -_INFINITY)
    return out, lse


def backward(
    block: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes the gradients of q, k, v, and of the mask if `mask_gradient`.

    Args:
        grad, out: of the whole rows.
        lse: of the whole rows, `without_infinity`.
    """
    if block.fused:
        k, v = _heads(block.k, block), _heads(block.v, block)
        dq, dk, dv = cpu_attention_backward(
            grad.to(block.q.dtype).contiguous(),
            _rows(block.q),
            k,
            v,
            out.to(block.q.dtype),
            lse,
            0.0,
            block.diagonal,
            attn_mask=_additive(block),
            scale=block.scale,
        )
        return dq, _summed_heads(dk, block.k), _summed_heads(dv, block.v), None
    weights = _scores(block).sub_(lse.unsqueeze(-1)).exp_()
    dtype = weights.dtype
    grad = grad.to(dtype)
    delta = (grad * out.to(dtype)).sum(-1, keepdim=True)
    dv = _dropped(weights, block).transpose(-1, -2) @ grad
    upstream = _dropped(grad @ _heads(block.v, block).to(dtype).transpose(-1, -2), block)
    scores = weights * (upstream - delta)
    dq = scores @ _heads(block.k, block).to(dtype) * block.scale
    dk = scores.transpose(-1, -2) @ block.q.to(dtype) * block.scale
    return dq, _summed_heads(dk, block.k), _summed_heads(dv, block.v), scores if mask_gradient else None


def _scores(block: Block) -> torch.Tensor:
    dtype = torch.promote_types(block.q.dtype, torch.float32)
    scores = (block.q.to(dtype) @ _heads(block.k, block).to(dtype).transpose(-1, -2)).mul_(block.scale)
    if block.mask is not None:
        if block.mask.dtype == torch.bool:
            scores.masked_fill_(~block.mask, -_INFINITY)
        else:
            scores.add_(block.mask)
        if block.largest is not None:
            scores.sub_(block.largest)
    if block.diagonal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -_INFINITY)
    return scores


def _additive(block: Block) -> torch.Tensor | None:
    """Returns the boolean mask in the form that the kernel takes."""
    if block.mask is None:
        return None
    hidden = ~block.mask
    return _rows(torch.zeros_like(hidden, dtype=block.q.dtype).masked_fill_(hidden, -_INFINITY))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` with contiguous rows, as the kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dropped(weights: torch.Tensor, block: Block) -> torch.Tensor:
    return weights if block.noise is None else weights * block.noise


def _heads(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Repeats the heads of keys or values to the number of query heads."""
    groups = block.q.shape[1] // x.shape[1]
    return _rows(x) if groups == 1 else x.repeat_interleave(groups, 1)


def _summed_heads(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    heads = x.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
