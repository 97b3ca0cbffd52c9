"""Products: linear, matmul and its relatives, einsum. A contracted dim that is sharded makes the result Partial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import composed, sharded
from ..labels import Labels, inside, labels_of, rule_of
from ..tensor import wrap

__all__: list[str] = []

_T = torch.Tensor


_MATMUL, _LINEAR = rule_of(torch.matmul), rule_of(F.linear)


@sharded(
    *(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.bmm, _T.bmm, torch.mv, _T.mv),
    *(torch.dot, _T.dot, torch.vdot, _T.vdot, torch.linalg.matmul),
)
def matmul(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: Any, other: Any = None, *, mat2: Any = None, vec: Any = None, tensor: Any = None, out: Any = None
    ) -> Any:
        if out is not None:
            name = func.__name__
            raise ValueError(f"{name}: out= is not supported; use out.copy_(torch.{name}(..))")
        second = next((operand for operand in (other, mat2, vec, tensor) if operand is not None), None)
        locals_, spec = inside(_MATMUL, (input, second))
        return wrap(func(*locals_), spec)

    return call(*args, **kwargs)


@sharded(_T.__rmatmul__)
def reversed_matmul(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return torch.matmul(args[1], args[0])


@sharded(F.linear)
def linear(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return _linear(func, *args, **kwargs)


def _linear(func: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    locals_, spec = inside(_LINEAR, (input, weight, bias))
    return wrap(func(*locals_), spec)


@sharded(
    *(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addmv, _T.addmv),
    *(torch.outer, _T.outer, torch.ger, _T.ger),
)
def by_rule(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Computes a function on shards by the labels of its rule."""
    locals_, spec = inside(rule_of(func), args)
    return wrap(func(*locals_, **kwargs), spec)


@cache
def _cheapest(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Returns the multiplications of a product of matrices of `sizes[i]` rows, and how many come first, together."""
    if len(sizes) < 4:
        return (prod(sizes) if len(sizes) == 3 else 0), 1
    ends = sizes[0] * sizes[-1]
    costs = {
        at: _cheapest(sizes[: at + 1])[0] + _cheapest(sizes[at:])[0] + ends * sizes[at]
        for at in range(1, len(sizes) - 1)
    }
    first = min(costs, key=costs.__getitem__)
    return costs[first], first


def _product(matrices: Sequence[Any]) -> Any:
    if len(matrices) == 1:
        return matrices[0]
    _, first = _cheapest((*(x.shape[0] for x in matrices), matrices[-1].shape[1]))
    return torch.matmul(_product(matrices[:first]), _product(matrices[first:]))


@composed(torch.linalg.multi_dot, torch.chain_matmul, checked=True)
def multi_dot(*tensors: Any) -> Any:
    first, *others = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    *inner, last = (first, *others)
    matrices = [*inner, last.unsqueeze(1) if last.dim() == 1 else last]
    matrices[0] = first.unsqueeze(0) if first.dim() == 1 else matrices[0]
    y = _product(matrices)
    y = y.squeeze(1) if last.dim() == 1 else y
    return y.squeeze(0) if first.dim() == 1 else y


def _einsum(*arguments: Any) -> Labels:
    *shapes, equation = arguments
    return labels_of(torch.einsum, (equation, *shapes), {})


def _of_sublists(args: Any) -> tuple[Any, ...]:
    """Returns `x, [0, 1], y, [1, 2]`, perhaps with the result's dims last, as an equation and operands."""
    letters = ascii_uppercase + ascii_lowercase  # torch's numbering, so that the order of implicit dims is equal

    def term(names: Any) -> str:
        return "".join("..." if name is Ellipsis else letters[name] for name in names)

    equation = ",".join(term(names) for names in args[1::2])
    if len(args) % 2:
        return f"{equation}->{term(args[-1])}", *args[:-1:2]
    return equation, *args[::2]


@sharded(torch.einsum)
def einsum(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], str):
        args = _of_sublists(args)
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    locals_, spec = inside(_einsum, operands, equation)
    # otherwise the dtype would depend on the sizes of shards
    if torch.is_autocast_enabled(locals_[0].device.type) and _is_matmul(equation, [x.shape for x in operands]):
        locals_ = [_as_matmul(local) for local in locals_]
    return wrap(torch.einsum(equation, *locals_), spec)


def _is_matmul(equation: str, shapes: list[torch.Size]) -> bool:
    """Returns True if torch computes the einsum by a product of matrices: two operands share a summed dim."""
    labels = _einsum(*shapes, equation)
    longer = [{name for name, size in zip(dims, shape) if size > 1} for dims, shape in zip(labels.operands, shapes)]
    names = [name for dims in longer for name in dims - {None, *labels.out}]
    return len(names) > len(set(names))


def _as_matmul(x: torch.Tensor) -> torch.Tensor:
    """Casts an operand as autocast does for `matmul`."""
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def known_to_opt_einsum(package: Any) -> None:
    """Makes opt_einsum compute ShardTensors by torch: it takes functions of the package of an operand's class.

    It would take numpy's otherwise, which gathers, and refuses what has a gradient.
    """
    for name in ("einsum", "tensordot", "transpose"):
        function = getattr(package.backends.torch, name)
        package.backends.dispatch._cached_funcs[name, __name__.partition(".")[0]] = function


if torch.backends.opt_einsum.is_available():  # torch has imported it
    known_to_opt_einsum(torch.backends.opt_einsum.get_opt_einsum())
