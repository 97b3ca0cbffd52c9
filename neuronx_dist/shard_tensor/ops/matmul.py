"""Products: linear, matmul and its relatives, einsum. A contracted dim that is sharded makes the result Partial."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import sharded
from ..labels import Labels, inside
from ..tensor import wrap

__all__: list[str] = []

_T = torch.Tensor


def product(x: torch.Size, y: torch.Size) -> Labels:
    """`torch.matmul`: a row or column vector, matrices, and dims before these that are broadcast."""
    batch = torch.broadcast_shapes(x[:-2], y[:-2])
    names = tuple(range(-len(batch), 0))

    def labels(shape: torch.Size, last: tuple[str, ...]) -> list[Any]:
        before = shape[:-2]
        own = names[len(names) - len(before) :]
        return [name if size == batch[name] else None for name, size in zip(own, before)] + list(last)

    rows: tuple[str, ...] = ("m",) if len(x) > 1 else ()
    columns: tuple[str, ...] = ("n",) if len(y) > 1 else ()
    return Labels([labels(x, (*rows, "k")), labels(y, ("k", *columns))], (*names, *rows, *columns), linear=True)


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
            raise ValueError(f"{name}: out= is not written to; use the result: out.copy_(torch.{name}(..))")
        second = next((each for each in (other, mat2, vec, tensor) if each is not None), None)
        locals_, spec = inside(product, (input, second))
        return wrap(func(*locals_), spec)

    return call(*args, **kwargs)


@sharded(_T.__rmatmul__)
def reversed_matmul(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return torch.matmul(args[1], args[0])


def linear_labels(x: torch.Size, weight: torch.Size, bias: torch.Size | None) -> Labels:
    rows = tuple(range(len(x) - 1))
    out = ("n",) if len(weight) > 1 else ()
    return Labels([(*rows, "k"), (*out, "k"), out], (*rows, *out), added=frozenset((2,)), linear=bias is None)


@sharded(F.linear)
def linear(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return _linear(func, *args, **kwargs)


def _linear(func: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    locals_, spec = inside(linear_labels, (input, weight, bias))
    return wrap(func(*locals_), spec)


def _added(bias: torch.Size, x: torch.Size, y: torch.Size) -> Labels:
    labels = product(x, y)
    out = labels.out
    names = out[len(out) - len(bias) :]
    lengths = {"m": x[-2] if len(x) > 1 else 1, "n": y[-1] if len(y) > 1 else 1}
    if len(out) > 2:
        lengths[out[0]] = x[0]  # type: ignore[index]
    own = [name if size == lengths[name] else None for name, size in zip(names, bias)]  # type: ignore[index]
    return Labels([own, *labels.operands], out, added=frozenset((0,)))


@sharded(torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addmv, _T.addmv)
def addmm(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    locals_, spec = inside(_added, args)
    return wrap(func(*locals_, **kwargs), spec)


def _outer(x: torch.Size, y: torch.Size) -> Labels:
    return Labels([("m",), ("n",)], ("m", "n"), linear=True)


@sharded(torch.outer, _T.outer, torch.ger, _T.ger)
def outer(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    locals_, spec = inside(_outer, args)
    return wrap(func(*locals_), spec)


def _einsum(*arguments: Any) -> Labels:
    *shapes, equation = arguments
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    most = max(len(shape) - len(term) + 3 if "..." in term else 0 for term, shape in zip(terms, shapes))
    dots = tuple(range(-most, 0))
    batch = torch.broadcast_shapes(*(_dots_of(term, shape) for term, shape in zip(terms, shapes) if "..." in term))
    operands = []
    for term, shape in zip(terms, shapes):
        before, ellipsis, behind = term.partition("...")
        middle = _dots_of(term, shape) if ellipsis else ()
        names = dots[most - len(middle) :] if middle else ()
        shared = [name if size == batch[name] else None for name, size in zip(names, middle)]
        operands.append([*before, *shared, *behind])
    longer = {name for names, shape in zip(operands, shapes) for name, size in zip(names, shape) if size != 1}
    operands = [  # dims of one element are broadcast
        [None if size == 1 and name in longer else name for name, size in zip(names, shape)]
        for names, shape in zip(operands, shapes)
    ]
    if not arrow:
        letters = [letter for term in terms for letter in term.replace("...", "")]
        out = ("..." if most else "") + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    before, ellipsis, behind = out.partition("...")
    twice = {name for names in operands for name in names if names.count(name) > 1}
    result = (*before, *(dots if ellipsis else ()), *behind)
    return Labels(operands, result, whole=frozenset(twice), linear=True)


def _dots_of(term: str, shape: torch.Size) -> torch.Size:
    before, _, behind = term.partition("...")
    return shape[len(before) : len(shape) - len(behind)]


def _of_sublists(args: Any) -> tuple[Any, ...]:
    """`x, [0, 1], y, [1, 2]`, with the dims of the result last or not, as an equation and operands."""
    letters = ascii_uppercase + ascii_lowercase  # as torch numbers them, so that the order of implicit dims is the same

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
    # else the dtype would depend on the sizes of shards
    if torch.is_autocast_enabled(locals_[0].device.type) and _is_matmul(equation, [x.shape for x in operands]):
        locals_ = [_as_matmul(each) for each in locals_]
    return wrap(torch.einsum(equation, *locals_), spec)


def _is_matmul(equation: str, shapes: list[torch.Size]) -> bool:
    """Whether torch sums over a dim of two operands, that has several elements, by a product of matrices."""
    labels = _einsum(*shapes, equation)
    longer = [{name for name, size in zip(own, shape) if size > 1} for own, shape in zip(labels.operands, shapes)]
    names = [name for own in longer for name in own - {None, *labels.out}]
    return len(names) > len(set(names))


def _as_matmul(x: torch.Tensor) -> torch.Tensor:
    """As autocast gives operands to `matmul`."""
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
