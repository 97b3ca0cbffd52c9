"""Softmax and its relatives over any dim, and running sums, products and logsumexps.

Over a sharded dim the ranks' (maximum, sum of exponentials) travel in one gather, and the gradient of their merged
logarithm in one all-reduce. A running sum needs the totals of the ranks before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ... import spmd
from ...comm import Communicator
from ...spmd import I, R
from ..handlers import sharded
from ..moves import gather
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, wrap
from .reduce import operand

__all__ = ["log_softmax_of"]

_T = torch.Tensor


def _group(spec: ShardTensorSpec, dim: int) -> Communicator | None:
    """The ranks among which a tensor dim is sharded."""
    m = spec.mesh_dim_of.get(dim)
    return None if m is None else spec.mesh.communicator(m)


def _of_all_ranks(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """What each rank has, stacked."""
    return gather(x.unsqueeze(0), group, 0, (1,) * group.size)


def _dim(dim: int | None, ndim: int, name: str) -> int:
    """A dim from the front; None as torch decides."""
    if dim is None:
        dim = 0 if ndim in (0, 1, 3) else 1
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"{name}: dim {dim} is none of a tensor of {ndim} dims")
    return dim % max(ndim, 1)


def log_softmax_of(x: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    """The log-softmax over a dim of which `x` is this rank's shard."""
    with torch.no_grad():
        largest = x.amax(dim, keepdim=True) if x.shape[dim] else x.sum(dim, keepdim=True) - float("inf")
        shift = torch.where(largest == -float("inf"), torch.zeros_like(largest), largest)
    both = _of_all_ranks(torch.stack((largest, (x - shift).exp().sum(dim, keepdim=True))), group)
    each = both[:, 0].detach()
    top = each.amax(0)
    logarithm = (both[:, 1] * (each - top).exp()).sum(0).log() + top
    return x - spmd.convert(logarithm, group, src=I, dst=R)


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
        x = x if dtype is None else x.to(dtype)
        x = -x if func is F.softmin else x
        group = _group(spec, dim)
        if group is None:
            return wrap(torch.log_softmax(x, dim) if logarithm else torch.softmax(x, dim), spec)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = log_softmax_of(wide, dim, group)
        return wrap((y if logarithm else y.exp()).to(x.dtype), spec)

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
            places = torch.where(soft == soft.amax(dim, keepdim=True), torch.ones_like(soft).cumsum(dim) - 1, ends)
            one_hot = (places == places.amin(dim, keepdim=True)).to(soft.dtype)
        return one_hot - soft.detach() + soft

    return call(*args, **kwargs)


# --- running sums


def _totals(own: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Those of all ranks, of which each uses others."""
    return spmd.convert(_of_all_ranks(own, group), group, src=I, dst=R)


def _before(totals: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Which ranks' totals come before this rank's, as a mask of the stack."""
    return (torch.arange(group.size, device=totals.device) < group.rank).view(-1, *[1] * (totals.dim() - 1))


def _running_sum(x: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    totals = _totals(x.sum(dim, keepdim=True), group)
    return x.cumsum(dim) + torch.where(_before(totals, group), totals, torch.zeros_like(totals)).sum(0)


def _running_product(x: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    totals = _totals(x.prod(dim, keepdim=True), group)
    return x.cumprod(dim) * torch.where(_before(totals, group), totals, torch.ones_like(totals)).prod(0)


def _running_logsumexp(x: torch.Tensor, dim: int, group: Communicator) -> torch.Tensor:
    totals = _totals(x.logsumexp(dim, keepdim=True), group)
    before = torch.where(_before(totals, group), totals, torch.full_like(totals, -float("inf"))).logsumexp(0)
    return torch.logaddexp(x.logcumsumexp(dim), before)


_RUNNING: dict[Any, Callable[[torch.Tensor, int, Communicator], torch.Tensor]] = {
    torch.cumsum: _running_sum,
    _T.cumsum: _running_sum,
    torch.cumprod: _running_product,
    _T.cumprod: _running_product,
    torch.logcumsumexp: _running_logsumexp,
    _T.logcumsumexp: _running_logsumexp,
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
