"""Losses: each rank sums over its elements, and one all-reduce brings the sum and, where it differs, what divides it.

A mean is divided by the number of valid elements of the whole tensor. Over classes that are sharded each rank has the
terms of its own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...sharded_functions.cross_entropy import cross_entropy_of_shard
from ...sharded_functions.softmax import log_softmax, wide
from ...spmd import P, no_typecheck
from ..handlers import sharded
from ..labels import Labels, inside
from ..placements import Partial
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, wrap
from ..typed import on_own_shard
from .indexing import check_positions
from .pointwise import aligned
from .reduce import reduced, total

__all__ = ["as_autocast", "reduction_name"]

_REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers


def reduction_name(reduction: str | int, size_average: bool | None, reduce: bool | None, *more: str) -> str:
    """The name of a reduction; torch's old arguments come first.

    Raises:
        ValueError: it is none.
    """
    if isinstance(reduction, int):
        return _REDUCTIONS[reduction]
    if size_average is not None or reduce is not None:
        return "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in (*_REDUCTIONS, *more):
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join((*_REDUCTIONS, *more))}")
    return reduction


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Casts operands as torch does for losses under autocast: half precision to float32."""
    return wide(x) if torch.is_autocast_enabled(x.device.type) else x


def _scalar(spec: ShardTensorSpec) -> ShardTensorSpec:
    return make_spec(spec.mesh, None, ())


def _over_all(local: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """The sum over the ranks of what each computed from its shard."""
    groups = spec.mesh.groups_over(tuple(m for m, _ in spec.sharded))
    return total(local, tuple(group for group, _ in groups))


# --- of single elements


class _Elementwise:
    """A loss of each element by itself: `function(*local tensors, reduction=, **options)`."""

    def __init__(
        self, function: Callable[..., torch.Tensor], tensors: tuple[str, ...], names: tuple[str, ...], divided: bool
    ) -> None:
        self.function, self.tensors, self.names = function, tensors, names
        self.divided_by_weights = divided

    def __call__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> ShardTensor:
        options = dict(zip(self.names, args)) | kwargs
        reduction, size_average = options.pop("reduction", "mean"), options.pop("size_average", None)
        reduction = reduction_name(reduction, size_average, options.pop("reduce", None), "batchmean")
        if reduction == "batchmean" and func is not F.kl_div:
            raise ValueError(f"reduction {reduction!r} is not one of {', '.join(_REDUCTIONS)}")
        operands = [options.pop(name, None) for name in self.tensors]
        if func in _EQUAL and operands[0].shape != operands[1].shape:
            raise ValueError(
                f"{func.__name__}: input has shape {tuple(operands[0].shape)}, target {tuple(operands[1].shape)}; they "
                "must be equal"
            )
        locals_, spec = inside(aligned, operands)
        keywords = {name: x for name, x in zip(self.tensors[2:], locals_[2:]) if x is not None} | options
        if reduction == "none":
            return wrap(self.function(*locals_[:2], reduction="none", **keywords), spec)
        dtype = torch.result_type(locals_[0], locals_[1])
        if torch.is_autocast_enabled(locals_[0].device.type):  # which chooses the dtype of most
            y = self.function(*locals_[:2], reduction="sum", **keywords)
            dtype = y.dtype
        else:
            keywords = {name: wide(x) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
            y = self.function(*map(wide, locals_[:2]), reduction="sum", **keywords)
        weight = keywords.get("weight")
        if reduction == "mean" and self.divided_by_weights and weight is not None:
            loss, weights = _over_all(torch.stack((y, weight.sum())), spec).unbind(0)
            return wrap((loss / weights).to(dtype), _scalar(spec))
        y = _over_all(y, spec)
        if reduction == "mean":
            y = y / spec.shape.numel() if spec.shape.numel() else y / torch.zeros_like(y)
        elif reduction == "batchmean":
            y = y / spec.shape[0]
        return wrap(y.to(dtype), _scalar(spec))


_OLD = ("size_average", "reduce", "reduction")
_WEIGHTED = ("input", "target", "weight")
_EQUAL = frozenset((F.binary_cross_entropy, F.binary_cross_entropy_with_logits))


def _elementwise(
    function: Callable[..., torch.Tensor],
    names: tuple[str, ...],
    tensors: tuple[str, ...] = ("input", "target"),
    divided: bool = False,
) -> None:
    sharded(function)(_Elementwise(function, tensors, names, divided))


_elementwise(F.mse_loss, ("input", "target", *_OLD, "weight"), _WEIGHTED, divided=True)
_elementwise(F.l1_loss, ("input", "target", *_OLD, "weight"), _WEIGHTED, divided=True)
_elementwise(F.smooth_l1_loss, ("input", "target", *_OLD, "beta"))
_elementwise(F.huber_loss, ("input", "target", "reduction", "delta", "weight"), _WEIGHTED)
_elementwise(F.binary_cross_entropy, ("input", "target", "weight", *_OLD), _WEIGHTED)
_elementwise(
    F.binary_cross_entropy_with_logits,
    ("input", "target", "weight", *_OLD, "pos_weight"),
    (*_WEIGHTED, "pos_weight"),
)
_elementwise(F.kl_div, ("input", "target", *_OLD, "log_target"))
_elementwise(F.poisson_nll_loss, ("input", "target", "log_input", "full", "size_average", "eps", "reduce", "reduction"))
_elementwise(F.soft_margin_loss, ("input", "target", *_OLD))
_elementwise(F.hinge_embedding_loss, ("input", "target", "margin", *_OLD))
_elementwise(
    F.margin_ranking_loss, ("input1", "input2", "target", "margin", *_OLD), tensors=("input1", "input2", "target")
)


# --- of classes


def class_losses(x: torch.Size, target: torch.Size, weight: torch.Size | None) -> Labels:
    """Classes are dim 1 of `x`, or dim 0 of a vector. `target` has them too where it holds probabilities."""
    names: list[Any] = ["n", *range(len(x) - 1)] if len(x) > 1 else [0]
    without = [name for name in names if name != 0]
    same = tuple(target) == tuple(x)
    expected = tuple(size for name, size in zip(names, x) if name != 0)
    if not same and tuple(target) != expected:
        raise ValueError(
            f"input has shape {tuple(x)}, but target has {tuple(target)}: the target must have shape {expected} or "
            "that of the input; a plain tensor counts as the whole: ShardTensor.from_local takes this rank's part"
        )
    return Labels([names, names if same else without, (0,)], names)


@sharded(F.cross_entropy)
def _cross_entropy(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> ShardTensor:
        reduction = reduction_name(reduction, size_average, reduce)
        (x, target, weight), spec = inside(class_losses, (input, target, weight))
        x, weight = as_autocast(x), None if weight is None else as_autocast(weight)
        dtype, dim = x.dtype, min(1, x.dim() - 1)
        m = spec.mesh_dim_of.get(dim)
        if m is not None and weight is None and not label_smoothing and not target.is_floating_point():
            valid = _check_targets(target, ignore_index, spec.shape[dim], dim)
            first, group = spec.offsets[dim], spec.mesh.communicator(m)
            losses = cross_entropy_of_shard(x.movedim(dim, -1), target, group, 0.0, ignore_index, first=first)
            over_classes = reduced(spec, dim, True).spec
            return _reduced(losses, over_classes, dim, reduction, valid.to(losses.dtype), dtype)
        if m is not None or label_smoothing or target.is_floating_point():  # sums over classes
            x, weight = wide(x), None if weight is None else wide(weight)
            target = wide(target)
        logs = torch.log_softmax(x, dim) if m is None else log_softmax(x, dim, axis=spec.mesh.communicator(m))
        if target.is_floating_point():
            probabilities = target * (1 - label_smoothing) + label_smoothing / spec.shape[dim]
            terms = -(logs * probabilities if weight is None else logs * probabilities * _along(weight, logs, dim))
            number = spec.shape.numel() // max(spec.shape[dim], 1)
            return _reduced(terms.sum(dim), spec, dim, reduction, number, dtype)
        losses, divisors = _of_targets(logs, target, weight, ignore_index, spec, dim)
        if label_smoothing:
            weighted_logs = logs if weight is None else logs * _along(weight, logs, dim)
            smooth = torch.where(target == ignore_index, torch.zeros_like(losses), -weighted_logs.sum(dim))
            losses = losses * (1 - label_smoothing) + smooth * (label_smoothing / spec.shape[dim])
        return _reduced(losses, spec, dim, reduction, divisors, dtype)

    return call(*args, **kwargs)


@sharded(F.nll_loss)
def _nll_loss(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> ShardTensor:
        reduction = reduction_name(reduction, size_average, reduce)
        (x, target, weight), spec = inside(class_losses, (input, target, weight))
        x, weight = as_autocast(x), None if weight is None else as_autocast(weight)
        dim = min(1, x.dim() - 1)
        losses, divisors = _of_targets(x, target, weight, ignore_index, spec, dim)
        return _reduced(losses, spec, dim, reduction, divisors, x.dtype)

    return call(*args, **kwargs)


def _along(weight: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return weight.view(-1, *[1] * (x.dim() - dim - 1))


def _check_targets(target: torch.Tensor, ignore_index: int, classes: int, dim: int) -> torch.Tensor:
    """Returns the mask of targets that are not ignored.

    Raises:
        IndexError: a target is no class.
    """
    valid = target != ignore_index
    with no_typecheck():  # each rank looks at its own
        check_positions(torch.where(valid, target, 0), classes, dim, "targets")
    return valid


def _of_targets(
    logs: torch.Tensor, target: torch.Tensor, weight: Any, ignore_index: int, spec: ShardTensorSpec, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the logarithm at each target, and its weight; 0 where another rank has the class, or the target is ignored.

    Raises:
        IndexError: a target is no class.
    """
    valid = _check_targets(target, ignore_index, spec.shape[dim], dim)

    def picked(logs: torch.Tensor, target: torch.Tensor, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
        position = target - spec.offsets[dim]
        is_local = valid & (position >= 0) & (position < logs.shape[dim])
        if not logs.shape[dim]:
            nothing = logs.sum(dim)
            return nothing, torch.zeros_like(nothing)
        position = torch.where(is_local, position, torch.zeros_like(position))
        weights = is_local.to(logs.dtype) if weight is None else weight[position] * is_local
        values = logs.gather(dim, position.unsqueeze(dim)).squeeze(dim)
        return -torch.where(is_local, values, torch.zeros_like(values)) * weights, weights

    m = spec.mesh_dim_of.get(dim)
    if m is None:
        return picked(logs, target, weight)
    group = spec.mesh.communicator(m)
    return on_own_shard(picked, {group: P})(logs, target, weight)


def _reduced(
    losses: torch.Tensor,
    spec: ShardTensorSpec,
    dim: int,
    reduction: str,
    divisors: torch.Tensor | int,
    dtype: torch.dtype,
) -> ShardTensor:
    """`losses` lack dim `dim` of `spec`, the classes; where it was sharded they are this rank's summands.

    Args:
        dtype: of the result, narrower than that of `losses` where these are sums.
    """
    if reduction == "none":
        result = reduced(spec, dim, False).spec
        if dim in spec.mesh_dim_of and losses.dtype != dtype:
            losses = total(losses, (spec.mesh.communicator(spec.mesh_dim_of[dim]),)).to(dtype)
        elif dim in spec.mesh_dim_of:
            placements = list(result.placements)
            placements[spec.mesh_dim_of[dim]] = Partial()
            result = make_spec(spec.mesh, placements, result.shape, result.sizes)
        return wrap(losses.to(dtype), result)
    loss = wide(losses).sum()
    if reduction == "sum":
        return wrap(_over_all(loss, spec).to(dtype), _scalar(spec))
    if isinstance(divisors, int):
        return wrap((_over_all(loss, spec) / divisors).to(dtype), _scalar(spec))
    loss, divisor = _over_all(torch.stack((loss, wide(divisors).sum())), spec).unbind(0)
    return wrap((loss / divisor).to(dtype), _scalar(spec))


# --- distances


@sharded(F.cosine_similarity)
def _cosine_similarity(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> ShardTensor:
        (x, y), spec = inside(aligned, (x1, x2))
        plan = reduced(spec, dim, False)
        dtype = torch.result_type(x, y)
        x, y = torch.broadcast_tensors(wide(x), wide(y))
        dims = [d + 1 for d in plan.dims]
        products = torch.stack((x * y, x * x, y * y))
        products = total(products.sum(dims) if dims else products, plan.groups)
        squares = products[1:]
        squares = squares + (squares.clamp(min=eps * eps) - squares).detach()  # as torch: the gradient is of the square
        return wrap((products[0] / (squares[0].sqrt() * squares[1].sqrt())).to(dtype), plan.spec)

    return call(*args, **kwargs)
