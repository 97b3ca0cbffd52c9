"""Functions of Partial tensors that are exact on each rank's part, so that nothing is reduced: `kept`.

| function | of what each rank has | result |
| --- | --- | --- |
| `x + y`, `x - y` | both "sum", or both "avg", in one layout | the same |
| `x * y`, `x / y` | both "product", in one layout | the same |
| `maximum`, `minimum` | both "max", both "min" | the same |
| `x * c` | "sum" or "avg", and a finite number or a tensor that is equal on the ranks | the same |
| `x / c` | "sum" or "avg", and a number that is not 0 | the same |
| `x + c`, `x - c` | "avg", "max" or "min", and the same | the same; the ranks are not counted |
| `x += y`, `x -= y` | "sum", and another: one rank adds what is equal on the ranks, each its shard | the same |
| `-x` | "sum" or "avg"; "max" or "min" | the same; the other one |
| `clone`, `+x`, `zero_` | any | the same |

A tensor that is equal on the ranks is used by each on its own: its gradient is summed over them. Where such a tensor is
infinite, parts of two signs have no sum.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Any

import torch

from ..rules import RULES
from ..spmd.watching import active
from .moves.redistribute import run, steps
from .placements import Partial, Placement, Replicate, Shard
from .spec import ShardTensorSpec, make_spec
from .tensor import ShardTensor, local_of

__all__ = ["kept"]

_NAMES = {
    **{name: name for name in ("add", "sub", "mul", "div", "neg", "maximum", "minimum")},
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "clone": "same",
    "positive": "same",
    "zero": "same",
}
_LINEAR, _ALL = frozenset(("sum", "avg")), frozenset(("sum", "avg", "max", "min", "product"))
# Reductions with which two tensors of one layout are combined, and one tensor with what is equal on the ranks.
_TOGETHER = {
    "add": _LINEAR,
    "sub": _LINEAR,
    "mul": frozenset(("product",)),
    "div": frozenset(("product",)),
    "maximum": frozenset(("max",)),
    "minimum": frozenset(("min",)),
}
_WITH_EQUAL = {
    "add": frozenset(("avg", "max", "min")),
    "sub": frozenset(("avg", "max", "min")),
    "mul": _LINEAR,
    "div": _LINEAR,
}
_NEGATED = {"max": Partial("min"), "min": Partial("max")}


def kept(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], ShardTensorSpec] | None:
    """Returns the local arguments of a call of Partial tensors, and the result's layout; None: reduce them first."""
    partial = [x for x in args if isinstance(x, ShardTensor) and x._spec.partial]
    if not partial:
        return None
    rule = RULES.get(func)
    name = _NAMES.get(rule.name.rstrip("_")) if rule is not None else None
    if name is None or kwargs.keys() - {"alpha"} or not 1 <= len(args) <= 2:
        return None
    if any(not (x.is_floating_point() or x.is_complex()) for x in partial):
        return None
    spec = partial[0]._spec
    ops = {str(placement.reduce_op) for placement in spec.placements if isinstance(placement, Partial)}
    if active() is not None and ops != {"sum"}:  # of other reductions the type checker has no rules for these
        return None
    if len(args) == 1:
        return _of_one(name, spec, ops, args[0])
    if len(partial) == 2:
        same = partial[1]._spec is spec and ops <= _TOGETHER.get(name, frozenset())
        return ([local_of(x) for x in args], spec) if same else None
    as_summands = rule is not None and rule.inplace == 0 and name in ("add", "sub") and ops == {"sum"}
    if not (as_summands or ops <= _WITH_EQUAL.get(name, frozenset())):
        return None
    x, y = args
    if partial[0] is y and (name == "div" or not ops <= _LINEAR):  # c - x of a maximum is a minimum
        return None
    if name == "div" and (isinstance(y, torch.Tensor) or not y):  # infinite parts of two signs have no sum
        return None
    if as_summands and not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=x.dtype, device=x.device)
    other = _equal(x if partial[0] is y else y, spec, as_summands=as_summands)
    if other is None:
        return None
    return ([local_of(x), other] if partial[0] is x else [other, local_of(y)]), spec


def _of_one(
    name: str, spec: ShardTensorSpec, ops: set[str], x: ShardTensor
) -> tuple[list[Any], ShardTensorSpec] | None:
    if name == "same":
        return [local_of(x)], spec
    if name != "neg" or "product" in ops:
        return None
    placements = [_NEGATED.get(getattr(placement, "reduce_op", ""), placement) for placement in spec.placements]
    return [local_of(x)], make_spec(spec.mesh, placements, spec.shape, spec.sizes)


def _equal(y: Any, spec: ShardTensorSpec, *, as_summands: bool) -> Any:
    """Returns the local part of an operand that is equal on the ranks of Partial mesh dims; None if it is not.

    It is broadcast to a tensor of `spec`; where it lies in another way along other mesh dims, it is not moved.

    Args:
        as_summands: it is moved to parts that add up along these mesh dims: with zeros on all ranks but the first, or
            around a rank's shard.
    """
    if not isinstance(y, torch.Tensor):
        return y if cmath.isfinite(y) else None
    if isinstance(y, ShardTensor):
        other = y._spec
        if other.mesh is not spec.mesh:
            return None
    else:
        other = make_spec(spec.mesh, None, y.shape)
    behind = len(spec.shape) - len(other.shape)
    if behind < 0 or any(size not in (1, spec.shape[d + behind]) for d, size in enumerate(other.shape)):
        return None
    placements: list[Placement] = [Replicate()] * spec.mesh.ndim
    used = list(spec.partial)
    for m, dim in spec.sharded:
        if dim >= behind and other.shape[dim - behind] == spec.shape[dim] and spec.shape[dim] != 1:
            placements[m] = Shard(dim - behind)
        else:
            used.append(m)
    target = make_spec(spec.mesh, placements, other.shape, spec.sizes)
    if as_summands:
        placements = [spec.placements[m] if m in spec.partial else p for m, p in enumerate(placements)]
        target = make_spec(spec.mesh, placements, other.shape, spec.sizes)
        used = [m for m in used if m not in spec.partial]
    elif other is not target and not other.is_replicated():
        return None
    local = local_of(y) if isinstance(y, ShardTensor) else y
    return run(local, steps(other, target, sorted(used)))
