"""Reductions over any dims. The result of a reduction over a sharded dim is equal on all ranks.

Means divide by global counts; variances merge the ranks' (count, mean, sum of squared differences), never `E[x^2] -
E[x]^2`. A maximum is reduced by a maximum, never by a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from ... import accelerator, comm, spmd
from ...comm import Communicator
from ...sharded_functions import norms
from ...sharded_functions.softmax import log_sum_exp, may_be_one_node, wide
from ...spmd import I, P, V
from ...torch_internals.autograd import apply_without_transforms
from ..handlers import sharded
from ..labels import planned
from ..moves.extremes import extreme
from ..moves.one_dim import gather_each
from ..moves.redistribute import redistributed
from ..placements import Partial, Placement, Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, gradient_spec, local_of, wrap
from ..typed import on_own_shard

__all__: list[str] = []

_T = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)


class Reduced(NamedTuple):
    """Plan of a reduction over some dims of a layout.

    Attributes:
        dims: reduced dims, counted from the front.
        mesh_dims: mesh dims over which partial results are reduced.
        elements: number of elements that make one element of the result.
        spec: layout of the result.
    """

    dims: tuple[int, ...]
    mesh_dims: tuple[int, ...]
    elements: int
    spec: ShardTensorSpec

    @property
    def groups(self) -> tuple[Communicator, ...]:
        """Groups over which partial results are reduced, one after the other."""
        return tuple(group for group, _ in self.spec.mesh.groups_over(self.mesh_dims))


@planned
def reduced(spec: ShardTensorSpec, dim: Any, keepdim: bool, with_sums: bool = False) -> Reduced:
    """Returns the plan of a reduction; `with_sums`: Partial mesh dims are reduced together with sharded ones."""
    ndim = len(spec.shape)
    chosen = range(ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    for d in chosen:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"dim {d} is out of range for a tensor of {ndim} dims")
    dims = tuple(sorted({d % ndim for d in chosen})) if ndim else ()
    placements: list[Placement] = []
    mesh_dims = []
    for m, placement in enumerate(spec.placements):
        if isinstance(placement, Shard) and placement.dim in dims:
            mesh_dims.append(m)
            placement = Replicate()
        elif isinstance(placement, Shard) and not keepdim:
            placement = Shard(placement.dim - sum(d < placement.dim for d in dims))
        elif isinstance(placement, Partial) and with_sums:
            mesh_dims.append(m)
            placement = Replicate()
        placements.append(placement)
    out_shape = [(1 if d in dims else size) for d, size in enumerate(spec.shape) if keepdim or d not in dims]
    result = make_spec(spec.mesh, placements, out_shape, spec.sizes)
    return Reduced(dims, tuple(mesh_dims), prod(spec.shape[d] for d in dims), result)


def operand(x: ShardTensor) -> tuple[torch.Tensor, ShardTensorSpec]:
    """Returns the local tensor and its layout after Partial is reduced."""
    spec = x._spec
    target = gradient_spec(spec)
    return redistributed(local_of(x), spec, target), target


def total(x: torch.Tensor, groups: tuple[Communicator, ...]) -> torch.Tensor:
    """Returns the sum over the ranks of all groups."""
    for group in groups:
        x = spmd.all_reduce(x, group, src=P, dst=I)
    return x


class _SumOfShards(torch.autograd.Function):
    """Sum or mean over dims that are sharded, as one node of the graph, which saves nothing.

    forward(local tensor, plan, keepdim, is_mean); the gradient is the result's, for each element.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Reduced, keepdim: bool, is_mean: bool) -> torch.Tensor:
        ctx.place = x.shape, x.dtype, plan, keepdim, is_mean
        y = torch.sum(x, plan.dims, keepdim, dtype=_inner(x)) if plan.dims else wide(x).clone()
        for group in plan.groups:
            y = comm.all_reduce(y, group, out=y)
        return _narrow(_mean(y, plan) if is_mean else y, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        shape, dtype, plan, keepdim, is_mean = ctx.place
        grad = (_mean(wide(grad), plan) if is_mean else grad).to(dtype)
        if not keepdim:
            for dim in plan.dims:
                grad = grad.unsqueeze(dim)
        return grad.expand(shape), None, None, None


_sum_of_shards: Callable[..., torch.Tensor] = apply_without_transforms(_SumOfShards)


def _inner(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype in which half precision is summed, whose largest number is 65504; None: its own."""
    return torch.float32 if x.dtype in _HALF else None


def _mean(y: torch.Tensor, plan: Reduced) -> torch.Tensor:
    return y / plan.elements if plan.elements else y / torch.zeros_like(y)


def _narrow(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a result of `wide` operands to their dtype; under autocast it stays float32 where torch's sums do."""
    is_wide = dtype not in _HALF or accelerator.autocast_sums_stay_wide(y.device.type)
    return y if is_wide else y.to(dtype)


def _refuse_out(func: Callable[..., Any], out: Any) -> None:
    if out is not None:
        raise ValueError(f"{func.__name__}: out= is not supported; use out.copy_(x.{func.__name__}(...))")


def _only_sums(spec: ShardTensorSpec) -> bool:
    return all(spec.placements[m] == Partial() for m in spec.partial)


@sharded(torch.sum, _T.sum, torch.mean, _T.mean, torch.nansum, _T.nansum)
def sums(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    is_mean = func in (torch.mean, _T.mean)
    sum_ = torch.nansum if func in (torch.nansum, _T.nansum) else torch.sum

    def call(
        input: ShardTensor,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        axis: Any = None,
        out: torch.Tensor | None = None,
    ) -> Any:
        _refuse_out(func, out)
        dim = axis if dim is None else dim
        dim = tuple(dim) if isinstance(dim, list) else dim
        linear = sum_ is torch.sum and _only_sums(input._spec)
        local, spec = (local_of(input), input._spec) if linear else operand(input)
        plan = reduced(spec, dim, keepdim, linear)
        local = local if dtype is None else local.to(dtype)
        if plan.groups and sum_ is torch.sum and may_be_one_node(local):
            return wrap(_sum_of_shards(local, plan, keepdim, is_mean), plan.spec)
        y = sum_(local, plan.dims, keepdim=keepdim, dtype=_inner(local)) if plan.dims else wide(local)
        y = total(y, plan.groups)
        if is_mean:
            if not y.is_floating_point() and not y.is_complex():
                raise RuntimeError(f"mean: a tensor of {y.dtype} has no mean; pass dtype=")
            y = _mean(y, plan)
        return wrap(_narrow(y, local.dtype), plan.spec)

    return call(*args, **kwargs)


@sharded(torch.prod, _T.prod)
def product(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        local, spec = operand(input)
        plan = reduced(spec, dim, keepdim)
        along = () if dim is None else (dim, keepdim)
        y = on_own_shard(lambda x: torch.prod(x, *along, dtype=dtype), dict.fromkeys(plan.groups, V))(local)
        for group in plan.groups:
            y = gather_each(y, group).prod(0)
        return wrap(y, plan.spec)

    return call(*args, **kwargs)


# --- variances


def moments(x: torch.Tensor, spec: ShardTensorSpec, plan: Reduced) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and sum of squared differences over `plan.dims` (of size 1), by one gather for each group."""
    sizes, parts = list(x.shape), []
    for group, mesh_dims in spec.mesh.groups_over(plan.mesh_dims):
        dims = [spec.placements[m].dim for m in mesh_dims]  # type: ignore[attr-defined]
        others = prod(sizes[d] for d in plan.dims if d not in dims)
        shards = itertools.product(*(spec.sizes[m] or () for m in mesh_dims))
        parts.append((group, [others * prod(shard) for shard in shards]))
        for dim in dims:
            sizes[dim] = spec.shape[dim]
    return norms.moments(x, plan.dims, parts)


_VAR = frozenset((torch.var, _T.var, torch.var_mean))
_WITH_MEAN = frozenset((torch.var_mean, torch.std_mean))


@sharded(torch.var, _T.var, torch.std, _T.std, torch.var_mean, torch.std_mean)
def variance(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: ShardTensor,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        axis: Any = None,
    ) -> Any:
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        dim = axis if dim is None else dim
        dim = tuple(dim) if isinstance(dim, list) else dim
        if correction is None:
            correction = 1 if unbiased is None or unbiased else 0
        local, spec = operand(input)
        plan, result = reduced(spec, dim, True), reduced(spec, dim, keepdim).spec
        mean, squares = moments(wide(local), spec, plan)
        y = (
            squares / max(plan.elements - correction, 0)
            if plan.elements > correction
            else squares / torch.zeros_like(squares)
        )
        if func not in _VAR:
            y = y.sqrt()
        spread = wrap(_narrow(y.reshape(result.local_shape), local.dtype), result)
        if func not in _WITH_MEAN:
            return spread
        return spread, wrap(_narrow(mean.reshape(result.local_shape), local.dtype), result)

    return call(*args, **kwargs)


# --- extremes


@sharded(torch.amax, _T.amax, torch.amin, _T.amin)
def amax(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: Any = (), keepdim: bool = False) -> Any:
        dim = tuple(dim) if isinstance(dim, list) else dim
        local, spec = operand(input)
        plan = reduced(spec, dim, keepdim)
        y = extreme(local, plan.dims, plan.groups, "max" if func in (torch.amax, _T.amax) else "min")
        return wrap(y.reshape(plan.spec.local_shape), plan.spec)

    return call(*args, **kwargs)


@sharded(torch.logsumexp, _T.logsumexp, torch.special.logsumexp)
def logsumexp(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: ShardTensor, dim: Any, keepdim: bool = False) -> Any:
        dim = tuple(dim) if isinstance(dim, list) else dim
        local, spec = operand(input)
        plan = reduced(spec, dim, keepdim)
        y = log_sum_exp(wide(local), plan.dims, plan.groups)
        y = y.to(local.dtype) if local.is_floating_point() else y
        return wrap(y.reshape(plan.spec.local_shape), plan.spec)

    return call(*args, **kwargs)


# --- norms


def _norm_of_coordinates(x: torch.Tensor, keepdim: bool) -> torch.Tensor:
    """Returns the norm over a short last dim, [m, .., d] -> [m, ..], in 0.7 of torch's time on a CPU.

    Distances of points, `(x[None] - y[:, None]).norm(dim=-1)`, are nearly all the time of unmodified nearest
    neighbours. A few rows at a time, so that elements that are read once per coordinate stay in the cache.
    """
    y = x.new_empty(x.shape[:-1])
    for rows, out in zip(x.split(8), y.split(8)):
        first, *others = rows.unbind(-1)
        torch.mul(first, first, out=out)
        for coordinate in others:
            out.addcmul_(coordinate, coordinate)
        out.sqrt_()
    return y.unsqueeze(-1) if keepdim else y


def _norm(x: ShardTensor, ord_: Any, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> ShardTensor:
    ord_ = 2 if ord_ is None else ord_
    if isinstance(ord_, str):
        if ord_ != "fro":
            raise NotImplementedError(
                f"norm of order {ord_!r} is not supported: call full_tensor() first, or use a numeric order"
            )
        ord_ = 2
    dim = tuple(dim) if isinstance(dim, list) else dim
    local, spec = operand(x)
    local = local.to(dtype) if dtype is not None else local
    plan = reduced(spec, dim, keepdim)
    if not plan.groups and plan.dims:
        short = ord_ == 2 and plan.dims == (local.dim() - 1,) and 0 < local.shape[-1] <= 4
        if (
            short
            and local.device.type == "cpu"
            and local.dtype in (torch.float32, torch.float64)
            and local.dim() > 2
            and not local.requires_grad
        ):
            return wrap(_norm_of_coordinates(local, keepdim), plan.spec)
        return wrap(torch.linalg.vector_norm(local, ord_, plan.dims, keepdim), plan.spec)
    dtype, local = local.dtype, wide(local)
    size = local.abs()
    if ord_ in (float("inf"), float("-inf")):
        y = extreme(size, plan.dims, plan.groups, "max" if ord_ > 0 else "min")
    elif ord_ == 0:
        y = total(torch.linalg.vector_norm(local, 0, plan.dims, keepdim=True), plan.groups)
    else:
        s = total(size.pow(ord_).sum(plan.dims, keepdim=True), plan.groups)
        positive = s != 0
        y = torch.where(positive, s, torch.ones_like(s)).pow(1 / ord_) * positive  # the gradient at 0 is 0, as torch's
    return wrap(_narrow(y, dtype).reshape(plan.spec.local_shape), plan.spec)


@sharded(torch.norm, _T.norm)
def norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: ShardTensor,
        p: Any = "fro",
        dim: Any = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
        out: Any = None,
    ) -> Any:
        _refuse_out(func, out)
        return _norm(input, p, dim, keepdim, dtype)

    return call(*args, **kwargs)


@sharded(torch.linalg.vector_norm)
def vector_norm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        x: ShardTensor,
        ord: Any = 2,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        return _norm(x, ord, dim, keepdim, dtype)

    return call(*args, **kwargs)


# --- any, all, counts


@sharded(torch.any, _T.any, torch.all, _T.all, torch.count_nonzero, _T.count_nonzero)
def counts(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    is_all, is_any = func in (torch.all, _T.all), func in (torch.any, _T.any)

    def call(input: ShardTensor, dim: Any = None, keepdim: bool = False) -> Any:
        dim = tuple(dim) if isinstance(dim, list) else dim
        local, spec = operand(input)
        plan = reduced(spec, dim, keepdim)
        wanted = (local == 0) if is_all else (local != 0)
        number = wanted.to(torch.int64).sum(plan.dims, keepdim=keepdim) if plan.dims else wanted.to(torch.int64)
        for group in plan.groups:
            number = comm.all_reduce(number, group)
        return wrap(number == 0 if is_all else number > 0 if is_any else number, plan.spec)

    return call(*args, **kwargs)
