"""`scaled_dot_product_attention` by the plan of `attention_plan.py`: with torch's function, or by blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...attention import Keys, attention
from ...spmd import I
from ..attention_method import forced_method, note_choice, token_order
from ..attention_plan import AttentionCall, AttentionPlan, plan_attention
from ..draws import drawn_between
from ..handlers import sharded
from ..labels import one_mesh
from ..moves.exchange import linked
from ..moves.redistribute import redistributed, run
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, local_of, wrap
from ..typed import shards, unseen

__all__: list[str] = []


@sharded(F.scaled_dot_product_attention)
def scaled_dot_product_attention(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if is_causal and attn_mask is not None:
            raise ValueError("scaled_dot_product_attention: is_causal=True and attn_mask are both set: pass only one")
        operands = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        specs = _specs(operands)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        how = AttentionCall(
            is_causal, enable_gqa, dropout_p > 0.0, grad, query.element_size(), forced_method(), token_order()
        )
        plan: AttentionPlan = plan_attention(*specs[:3], specs[3] if attn_mask is not None else None, how)
        if plan.choice is not None:
            note_choice(plan.choice)
        locals_ = [run(local_of(x) if isinstance(x, ShardTensor) else x, todo) for x, todo in zip(operands, plan.moved)]
        if plan.heads is not None:
            chosen = torch.tensor(plan.heads, dtype=torch.int64, device=locals_[1].device)
            locals_[1:3] = [x.index_select(-3, chosen) for x in locals_[1:3]]
        if plan.keys is None:
            shape = plan.spec.local_shape
            if not shape.numel() or not locals_[1].numel():
                out = linked(locals_[0].new_zeros(shape), *locals_)
            else:
                out = func(
                    *locals_[:3],
                    *locals_[3:],
                    is_causal=is_causal,
                    scale=scale,
                    **({"enable_gqa": True} if enable_gqa else {}),
                )
        else:
            out = _blocks(plan, plan.keys, locals_, dropout_p, query.shape[-1] ** -0.5 if scale is None else scale)
        out = shards(out, {plan.spec.mesh.communicator(m): dim for m, dim in plan.spec.sharded})
        return wrap(redistributed(out, plan.spec, plan.result), plan.result)

    return call(*args, **kwargs)


def _specs(operands: list[torch.Tensor]) -> list[ShardTensorSpec]:
    mesh = one_mesh(operands, "scaled_dot_product_attention")
    specs = []
    for x in operands:
        specs.append(x._spec if isinstance(x, ShardTensor) else make_spec(mesh, None, x.shape))
    return specs


def _blocks(
    plan: AttentionPlan, keys: Keys, operands: list[torch.Tensor], dropout_p: float, scale: float
) -> torch.Tensor:
    """Computes attention by blocks, of operands of any number of dims."""
    shape = plan.spec.local_shape
    batch = shape[:-2]
    q, k, v = operands[:3]
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (k, v)]
    if heads[0] != heads[1]:
        heads = [*batch[-1:], *batch[-1:]]
    q = _with_heads(q, batch)
    k, v = (_with_heads(x, (*batch[:-1], count) if batch else ()) for x, count in zip((k, v), heads))
    mask = None
    if len(operands) > 3:
        columns = plan.noise[-1][1] - plan.noise[-1][0]
        mask = operands[3].expand(*operands[3].shape[:-2], shape[-2], columns)
        mask = _with_heads(mask, batch if mask.dim() > 4 else mask.shape[:-2])
    noise = None
    if dropout_p > 0.0:
        noise = _with_heads(_noise(plan, dropout_p, q), batch)
    axis = None if plan.mesh_dim is None else plan.spec.mesh.communicator(plan.mesh_dim)

    def run() -> torch.Tensor:
        return attention(q, k, v, keys, axis, mask=mask, noise=noise, scale=scale).reshape(shape)

    whole = axis is not None and plan.mesh_dim not in dict(plan.spec.sharded)
    return unseen(run, q, axis, I) if axis is not None and keys.merged and whole else run()


def _with_heads(x: torch.Tensor, batch: Any) -> torch.Tensor:
    """Returns a tensor whose dims before the last two broadcast to `batch` as `[b, heads, .., ..]`."""
    x = x.expand(*batch, *x.shape[-2:])
    if x.dim() <= 4:
        return x[(None,) * (4 - x.dim())]
    return x.reshape(-1, *x.shape[-3:])


def _noise(plan: AttentionPlan, dropout_p: float, q: torch.Tensor) -> torch.Tensor:
    """Returns the noise of this rank's weights: drawn as a byte an element, of all weights or of these (`draws.py`)."""
    if dropout_p == 1.0:  # torch draws nothing
        return q.new_zeros([stop - start for start, stop in plan.noise])
    blank = partial(torch.empty, dtype=torch.uint8, device=q.device)
    mask = drawn_between(lambda shape: blank(shape).bernoulli_(1 - dropout_p), plan.weights, plan.noise)
    return mask.to(q.dtype).div_(1 - dropout_p)
