"""Diagonals of tensors: each rank takes the positions of its shard, so that nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import FUNCTIONS, UNHANDLED, composed, sharded
from ..labels import inside, one_mesh, planned
from ..moves.intervals import bounds_of
from ..placements import Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, local_of, wrap, wrap_view
from ..typed import on_own_shard, shards_of
from .pointwise import aligned
from .reduce import operand
from .select import dim_of

__all__: list[str] = []

_T = torch.Tensor


@planned
def _plan(spec: ShardTensorSpec, offset: int, dim1: int, dim2: int) -> Any:
    """Returns the offset of the diagonal on this rank's shard, and the layout of the diagonal.

    The result is None if both dims are sharded: the diagonal crosses the shards of some ranks only.
    """
    along = [m for dim, m in spec.mesh_dim_of.items() if dim in (dim1, dim2)]
    if len(along) > 1:
        return None
    other_dims = [d for d in range(len(spec.shape)) if d not in (dim1, dim2)]
    length = max(0, min(spec.shape[dim1] + min(offset, 0), spec.shape[dim2] - max(offset, 0)))
    placements, sizes = list(spec.placements), list(spec.sizes)
    local_offset = offset
    for m, dim in spec.sharded:
        if dim in other_dims:
            placements[m] = Shard(other_dims.index(dim))
            continue
        placements[m] = Shard(len(other_dims))
        first = max(-offset, 0) if dim == dim1 else max(offset, 0)  # position of the diagonal's first element
        ends = [min(max(bound - first, 0), length) for bound in bounds_of(spec.sizes[m] or ())]
        sizes[m] = tuple(high - low for low, high in zip(ends, ends[1:]))
        local_offset += spec.offsets[dim] if dim == dim1 else -spec.offsets[dim]
    return local_offset, make_spec(spec.mesh, placements, (*(spec.shape[d] for d in other_dims), length), sizes)


@sharded(torch.diagonal, _T.diagonal, torch.linalg.diagonal)
def diagonal(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    is_linalg = func is torch.linalg.diagonal

    def call(x: Any, offset: int = 0, dim1: int = -2 if is_linalg else 0, dim2: int = -1 if is_linalg else 1) -> Any:
        dim1, dim2 = dim_of(x, dim1), dim_of(x, dim2)
        plan = _plan(x._spec, offset, dim1, dim2)
        if plan is None:
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        local_offset, spec = plan
        return wrap_view(on_own_shard(torch.diagonal, shards_of(spec))(local_of(x), local_offset, dim1, dim2), spec, x)

    return call(*args, **{"x" if name in ("input", "A", "self") else name: value for name, value in kwargs.items()})


@sharded(torch.diagonal_scatter, _T.diagonal_scatter)
def diagonal_scatter(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        if not isinstance(input, ShardTensor):
            input = wrap(input, make_spec(one_mesh((input, src), "diagonal_scatter"), None, input.shape))
        dim1, dim2 = dim_of(input, dim1), dim_of(input, dim2)
        if isinstance(src, ShardTensor):
            rows = _rows(input._spec, src._spec, offset, dim1, dim2)
            input = input.redistribute(placements=rows.placements, sizes=rows.sizes)
        local, spec = operand(input)
        plan = _plan(spec, offset, dim1, dim2)
        if plan is None:
            return FUNCTIONS[UNHANDLED](func, types, args, kwargs)
        local_offset, part_spec = plan
        part = wrap(torch.diagonal(local.detach(), local_offset, dim1, dim2), part_spec)
        (_, values), _ = inside(aligned, (part, src), result=part_spec)
        write = on_own_shard(torch.diagonal_scatter, shards_of(spec))
        return wrap(write(local, values, local_offset, dim1, dim2), spec)

    return call(*args, **kwargs)


@planned
def _rows(spec: ShardTensorSpec, diagonal: ShardTensorSpec, offset: int, dim1: int, dim2: int) -> ShardTensorSpec:
    """Returns a layout of matrices whose rows are sharded as their diagonal is, where the matrices are on all ranks."""
    placements, sizes = list(spec.placements), list(spec.sizes)
    m = diagonal.mesh_dim_of.get(len(diagonal.shape) - 1)
    if m is not None and isinstance(spec.placements[m], Replicate) and not {dim1, dim2} & spec.mesh_dim_of.keys():
        rows = list(diagonal.sizes[m] or ())
        rows[0] += max(-offset, 0)
        rows[-1] += spec.shape[dim1] - sum(rows)
        placements[m], sizes[m] = Shard(dim1), tuple(rows)
    return make_spec(spec.mesh, placements, spec.shape, sizes)


@composed(torch.diag_embed, _T.diag_embed)
def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Returns matrices with these diagonals, whose rows are sharded as the diagonals are."""
    rows = F.pad(input, (-offset, 0) if offset < 0 else (0, offset))
    at = torch.arange(rows.shape[-1], device=input.device)
    matrices = torch.where(at - at[:, None] == offset, rows.unsqueeze(-1), torch.zeros_like(rows[..., :1, None]))
    return torch.movedim(matrices, (-2, -1), (dim1, dim2))


@composed(torch.diag, _T.diag)
def diag(input: Any, diagonal: int = 0) -> Any:
    return torch.diag_embed(input, diagonal) if input.dim() == 1 else torch.diagonal(input, diagonal).clone()


@composed(torch.diagflat, _T.diagflat)
def diagflat(input: Any, offset: int = 0) -> Any:
    return torch.diag_embed(input.reshape(-1), offset)


@composed(torch.trace, _T.trace)
def trace(input: Any) -> Any:
    return torch.diagonal(input).sum()


@composed(torch.block_diag)
def block_diag(*tensors: Any) -> Any:
    rows = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    width, before, padded = sum(x.shape[1] for x in rows), 0, []
    for x in rows:
        padded.append(F.pad(x, (before, width - before - x.shape[1])))
        before += x.shape[1]
    return torch.cat(padded)
