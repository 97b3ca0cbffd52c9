"""Softmax and its relatives over any dim, and running sums, products and logsumexps.

Over a sharded dim `sharded_functions/softmax.py` computes softmax. A running sum needs the totals of the ranks before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ... import spmd
from ...comm import Communicator
from ...sharded_functions.softmax import log_softmax, softmax
from ...spmd import I, R, S, V
from ..handlers import sharded
from ..moves.one_dim import gather_each
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, wrap
from ..typed import on_own_shard
from .reduce import operand

__all__: list[str] = []

_T = torch.Tensor


def _group(spec: ShardTensorSpec, dim: int) -> Communicator | None:
    """The ranks among which a tensor dim is sharded."""
    m = spec.mesh_dim_of.get(dim)
    return None if m is None else spec.mesh.communicator(m)


def _dim(dim: int | None, ndim: int, name: str) -> int:
    """A dim from the front; None as torch decides."""
    if dim is None:
        dim = 0 if ndim in (0, 1, 3) else 1
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"{name}: dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % max(ndim, 1)


@sharded(
    *(F.softmax, torch.softmax, _T.softmax, torch.special.softmax, F.softmin),
    *(F.log_softmax, torch.log_softmax, _T.log_softmax, torch.special.log_softmax),
)
def _softmax(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    logarithm = "log" in func.__name__

    def call(
        input: ShardTensor,
        dim: int | None = None,
        _stacklevel: Any = None,
        dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        if isinstance(_stacklevel, torch.dtype):  # torch.softmax(input, dim, dtype)
            dtype = _stacklevel
        x, spec = operand(input)
        dim = _dim(dim, x.dim(), func.__name__)
        x = -x if func is F.softmin else x
        group = _group(spec, dim)
        if group is None:
            return wrap((torch.log_softmax if logarithm else torch.softmax)(x, dim, dtype), spec)
        return wrap((log_softmax if logarithm else softmax)(x, dim, dtype, axis=group), spec)

    return call(*args, **kwargs)


@sharded(F.gumbel_softmax)
def _gumbel_softmax(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """The random numbers are those of one process; of equal largest values the first one counts."""

    def call(logits: ShardTensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
        noise = -torch.empty_like(logits).exponential_().log()
        soft = ((logits + noise) / tau).softmax(dim)
        if not hard:
            return soft
        with torch.no_grad():
            ends = torch.full_like(soft, soft.shape[dim])
            positions = torch.where(soft == soft.amax(dim, keepdim=True), torch.ones_like(soft).cumsum(dim) - 1, ends)
            one_hot = (positions == positions.amin(dim, keepdim=True)).to(soft.dtype)
        return one_hot - soft.detach() + soft

    return call(*args, **kwargs)


# --- running sums


def _of_ranks_before(total: torch.Tensor, group: Communicator, nothing: float) -> torch.Tensor:
    """The ranks' totals, stacked, with `nothing` in place of those of this rank and of the ranks behind."""
    totals = spmd.convert(gather_each(total, group), group, src=I, dst=R)
    before = (torch.arange(group.size, device=total.device) < group.rank).view(-1, *[1] * total.dim())
    return torch.where(before, totals, torch.full_like(totals, nothing))


class _Running(NamedTuple):
    """`within` a shard, its `total`, and how the totals of the ranks before are `merged` and `added`."""

    within: Callable[..., torch.Tensor]
    total: Callable[..., torch.Tensor]
    nothing: float
    merged: Callable[..., torch.Tensor]
    added: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
        shard_total = on_own_shard(lambda x: self.total(x, dim, keepdim=True), {group: V})(x)
        before = _of_ranks_before(shard_total, group, self.nothing)

        def behind_them(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            within = self.within(x, dim)
            return self.added(within, self.merged(before, 0).to(within.dtype))

        return on_own_shard(behind_them, {group: S(dim)})(x, before)


_SUM = _Running(torch.cumsum, torch.sum, 0.0, torch.sum, torch.add)
_PRODUCT = _Running(torch.cumprod, torch.prod, 1.0, torch.prod, torch.mul)
_LOGSUMEXP = _Running(torch.logcumsumexp, torch.logsumexp, -float("inf"), torch.logsumexp, torch.logaddexp)
_RUNNING: dict[Any, _Running] = {
    torch.cumsum: _SUM,
    _T.cumsum: _SUM,
    torch.cumprod: _PRODUCT,
    _T.cumprod: _PRODUCT,
    torch.logcumsumexp: _LOGSUMEXP,
    _T.logcumsumexp: _LOGSUMEXP,
}


@sharded(*_RUNNING)
def _running(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: int, *, dtype: torch.dtype | None = None) -> ShardTensor:
        x, spec = operand(input)
        dim = _dim(dim, x.dim(), func.__name__)
        if not x.is_floating_point() and not x.is_complex():
            dtype = dtype or torch.int64
        x = x if dtype is None else x.to(dtype)
        group = _group(spec, dim)
        return wrap(func(x, dim) if group is None else _RUNNING[func](x, dim, group), spec)

    return call(*args, **kwargs)
