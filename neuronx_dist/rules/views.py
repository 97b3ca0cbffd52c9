"""Rules of functions that give values another shape: view, reshape, transpose, squeeze and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from .names import getter
from .spec import Spec, derive, labels, normal_dims, rule, same

__all__ = ["FIRST", "ViewLabels", "each_of", "as_int", "raised", "regroup", "sizes_of", "swapped"]

FIRST = ((0,),)
"""For `Rule.linear`: linear in operand 0, the others are indices or shapes."""


def as_int(value: Any) -> int:
    """Returns a number as a plain int, also if it is a `RankValue`, which records its readers."""
    return int.__pos__(value) if isinstance(value, int) else int(value)


def sizes_of(values: Sequence[Any], named: Any = None) -> tuple[int, ...]:
    """Returns the sizes or dims of a call that has them one by one, as one sequence, or by name."""
    if not values:
        values = (named,)
    if len(values) == 1 and not isinstance(values[0], int):
        values = values[0]
    return tuple(as_int(value) for value in values)


class ViewLabels:
    """Issues labels while a spec is built, and collects their sizes and reasons."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.fixed: dict[int, str] = {}
        self.selected: set[int] = set()
        self.looked_up: set[int] = set()
        self.reduced: dict[int, str] = {}
        self.weak: set[int] = set()
        self.ranges: dict[int, tuple[tuple[int, int, int, int], ...]] = {}

    def new(self, size: int, why: str | None = None, selected: bool = False, looked_up: bool = False) -> int:
        """Returns a new label of `size`, fixed if there is a reason `why`."""
        label = len(self.sizes)
        self.sizes[label] = size
        if why is not None:
            self.fixed[label] = why
        if selected:
            self.selected.add(label)
        if looked_up:
            self.looked_up.add(label)
        return label

    def dims(self, shape: Iterable[int]) -> list[tuple[int, ...]]:
        """Returns one new label per dim."""
        return [(self.new(size),) for size in shape]

    def spec(self, ins: Iterable[Any], outs: Iterable[Any]) -> Spec:
        """Returns the spec of these operands and results (None in `ins`: only shape or dtype is read)."""
        return Spec(
            tuple(None if dims is None else tuple(tuple(dim) for dim in dims) for dims in ins),
            tuple(tuple(tuple(dim) for dim in dims) for dims in outs),
            self.sizes,
            self.reduced,
            self.fixed,
            frozenset(self.selected),
            frozenset(self.looked_up),
            frozenset(self.weak),
            ranges=self.ranges,
        )


# --- view, reshape, flatten ---


def _common_ends(sizes: Sequence[int], into: Sequence[int]) -> tuple[int, int]:
    """Returns the number of equal dims of two shapes at the front, and that of the other dims at the end."""
    shorter = min(len(sizes), len(into))
    head = next((dim for dim in range(shorter) if sizes[dim] != into[dim]), shorter)
    tail = next((dim for dim in range(shorter - head) if sizes[-1 - dim] != into[-1 - dim]), shorter - head)
    return head, tail


# Long because it is one walk through both shapes, whose cases share the position in each and the rest there.
def regroup(source: Sequence[int], target: Sequence[int], inferred: int | None = None, name: str = "view") -> Spec:
    """Regroups elements under another shape: each dim becomes a product of factors that both shapes have.

    A dim of size 1 of `source` stays a factor of the dim it is merged into, since it may be the local part of a sharded
    dim. A dim of size 1 that is new in `target` is the outer factor of its neighbour. The new dim holds the sharding if
    it was `inferred` (passed as -1), or is put before the last dim of three or more (`[b, s, d]` to `[b, s, 1, d]`, one
    head); else it is weak: a dim that was merged before (`[1, s, h]` to `[s, h]` and back), or a new one.

    Args:
        source: local shape before.
        target: local shape after, without -1.
        inferred: the dim of `target` that was passed as -1.
        name: name of the function in the reasons.
    """
    sizes, into = list(source), list(target)
    builder = ViewLabels()
    if 0 in sizes:
        if sizes == into:
            return same(sizes)
        why = f"{name} cannot say where its positions go, the tensor is empty"
        return builder.spec([[(builder.new(size, why),) for size in sizes]], [builder.dims(into)])
    ins: list[list[int]] = [[] for _ in sizes]
    outs: list[list[int]] = [[] for _ in into]

    def both(i: int, j: int, size: int) -> None:
        label = builder.new(size)
        ins[i].append(label)
        outs[j].append(label)

    head, tail = _common_ends(sizes, into)
    for dim in range(head):
        both(dim, dim, sizes[dim])
    for dim in range(1, tail + 1):
        both(len(sizes) - dim, len(into) - dim, sizes[-dim])

    i, j, end, stop = head, head, len(sizes) - tail, len(into) - tail
    left = sizes[i] if i < end else 1  # the rest of dims i and j
    right = into[j] if j < stop else 1
    opened = False  # dim j has some of its factors already
    while i < end or j < stop:
        if i < end and sizes[i] == 1 and j < stop and into[j] == 1:
            both(i, j, 1)
            i, j = i + 1, j + 1
            left, right = (sizes[i] if i < end else 1), (into[j] if j < stop else 1)
        elif i < end and sizes[i] == 1:
            home = _home(j, opened, into, inferred)
            if home is None:
                ins[i].append(builder.new(1, f"{name} removes it, so it has size 1 in the whole tensor too"))
            elif home >= stop and outs[home]:  # a dim of the tail has its factor already: put outside of that
                _put_outside(builder, ins, outs, i, home)
            else:
                both(i, home, 1)
            i += 1
            left = sizes[i] if i < end else 1
        elif j < stop and into[j] == 1:
            last = j == len(into) - 2 and j == len(sizes) - 1 >= 2
            split = _split_off(builder, ins, outs, i, j, end)
            if split is not None and not (j == inferred or last):
                builder.weak.add(split)
            j += 1
            right = into[j] if j < stop else 1
        else:
            common = gcd(left, right)
            if common == 1:
                i, j = _mixed(builder, ins, outs, sizes, into, i, j, left, right, name)
                left = right = 1
            else:
                both(i, j, common)
                left, right = left // common, right // common
            opened = right != 1
            if left == 1:
                i += 1
                left = sizes[i] if i < end else 1
            if right == 1:
                j += 1
                right = into[j] if j < stop else 1
    return builder.spec([ins], [outs])


def _put_outside(builder: ViewLabels, ins: list[list[int]], outs: list[list[int]], i: int, home: int) -> None:
    """Makes the operand's dim i, of size 1, the outer factor of the result's dim `home`, with an equal tail."""
    label = builder.new(1)
    ins[i].append(label)
    outs[home].insert(outs[home].index(ins[home - len(outs)][-1]), label)


def _home(j: int, opened: bool, into: list[int], inferred: int | None) -> int | None:
    """Result dim that takes up a dim of size 1: an open one, the inferred one, the next, or the one before."""
    if not opened and inferred is not None and j - 1 == inferred:
        return j - 1
    while j < len(into) and into[j] == 1:
        j += 1
    if j < len(into):
        return j
    return len(into) - 1 if into else None


def _split_off(
    builder: ViewLabels, ins: list[list[int]], outs: list[list[int]], i: int, j: int, end: int
) -> int | None:
    """Makes the result's dim j, of size 1, the outer factor of the operand's dim i, or the inner one of the last."""
    if not ins:
        return None
    label = builder.new(1)
    outs[j].append(label)
    if i < len(ins):
        ins[i].insert(len(ins[i]) if i < end else 0, label)
    else:
        ins[-1].append(label)
    return label


def _mixed(
    builder: ViewLabels,
    ins: list[list[int]],
    outs: list[list[int]],
    sizes: list[int],
    into: list[int],
    i: int,
    j: int,
    left: int,
    right: int,
    name: str,
) -> tuple[int, int]:
    """Fixes the rest of a group of dims that have no common factor. Returns the group's last dims."""
    why = f"{name} from {tuple(sizes)} to {tuple(into)} cuts across it"
    ins[i].append(builder.new(left, why))
    outs[j].append(builder.new(right))
    while left != right:
        if left < right:
            i += 1
            left *= sizes[i]
            ins[i].append(builder.new(sizes[i], why))
        else:
            j += 1
            right *= into[j]
            outs[j].append(builder.new(into[j]))
    return i, j


def _filled(shape: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    """Returns `(sizes without -1, the dim that was -1)`."""
    if -1 not in sizes:
        return tuple(sizes), None
    at = list(sizes).index(-1)
    rest = prod(size for size in sizes if size != -1)
    return tuple(size if size != -1 else prod(shape) // max(rest, 1) for size in sizes), at


def _to_dtype(*args: Any, dtype: Any = None, **_: Any) -> bool:
    return isinstance(args[-1], torch.dtype) or dtype is not None


@rule(Tensor.view, linear=FIRST, affine=_to_dtype, aliases=True)
def view(input: Tensor, *size: Any, dtype: torch.dtype | None = None) -> Spec:
    if size and isinstance(size[0], torch.dtype):
        dtype = size[0]
    if dtype is None:
        return reshape(input, *size, name="view")
    shape = list(input.shape)
    before, after = input.dtype.itemsize, dtype.itemsize
    if before == after or not shape:
        return same(shape)
    builder = ViewLabels()
    dims = builder.dims(shape[:-1])
    cut = builder.new(shape[-1], "view(dtype) puts neighbouring values into one, or one into several")
    return builder.spec([[*dims, (cut,)]], [[*dims, (builder.new(shape[-1] * before // after),)]])


@rule(torch.reshape, Tensor.reshape, linear=FIRST, aliases=True)
def reshape(input: Tensor, *sizes: Any, shape: Any = None, name: str = "reshape") -> Spec:
    target, inferred = _filled(input.shape, sizes_of(sizes, shape))
    return regroup(input.shape, target, inferred, name)


@rule(Tensor.view_as, Tensor.reshape_as, linear=FIRST, aliases=True)
def view_as(input: Tensor, other: Tensor) -> Spec:
    spec = regroup(input.shape, other.shape)
    return spec._replace(ins=(*spec.ins, None))


@rule(torch.flatten, Tensor.flatten, linear=FIRST, aliases=True)
def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Spec:
    shape = list(input.shape)
    if not shape:
        return regroup((), (1,), name="flatten")
    first, last = start_dim % len(shape), end_dim % len(shape)
    merged = [*range(len(shape))][first : last + 1]
    dims = labels(len(shape))
    out = (*dims[:first], tuple(merged), *dims[last + 1 :])
    return Spec((dims,), (out,), dict(enumerate(shape)))


@rule(torch.ravel, Tensor.ravel, linear=FIRST, aliases=True)
def ravel(input: Tensor) -> Spec:
    return flatten(input)


@rule(torch.unflatten, Tensor.unflatten, linear=FIRST, aliases=True)
def unflatten(input: Tensor, dim: Any = None, sizes: Any = None) -> Spec:
    shape = list(input.shape)
    at = as_int(dim) % len(shape)
    into, inferred = _filled(shape[at : at + 1], tuple(as_int(size) for size in sizes))
    target = [*shape[:at], *into, *shape[at + 1 :]]
    return regroup(shape, target, None if inferred is None else at + inferred, "unflatten")


# --- orders of dims ---


def _reordered(shape: Sequence[int], order: Sequence[int]) -> Spec:
    dims = labels(len(shape))
    return Spec((dims,), (tuple(dims[dim] for dim in order),), dict(enumerate(shape)))


@rule(torch.permute, Tensor.permute, linear=FIRST, aliases=True)
def permute(input: Tensor, *order: Any, dims: Any = None) -> Spec:
    return _reordered(input.shape, [dim % input.ndim for dim in sizes_of(order, dims)])


def swapped(input: Tensor, first: int, second: int) -> Spec:
    """Spec of a swap of two dims."""
    order = list(range(input.ndim))
    if order:
        order[first], order[second] = order[second], order[first]
    return _reordered(input.shape, order)


@rule(torch.transpose, Tensor.transpose, linear=FIRST, aliases=True)
def transpose(input: Tensor, dim0: int, dim1: int) -> Spec:
    return swapped(input, dim0, dim1)


derive(torch.transpose, torch.swapdims, Tensor.swapdims)


@rule(torch.swapaxes, Tensor.swapaxes, linear=FIRST, aliases=True)
def swapaxes(input: Tensor, axis0: int, axis1: int) -> Spec:
    return swapped(input, axis0, axis1)


@rule(torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis, linear=FIRST, aliases=True)
def movedim(input: Tensor, source: Any, destination: Any) -> Spec:
    sources, targets = normal_dims(source, input.ndim), normal_dims(destination, input.ndim)
    rest = iter([dim for dim in range(input.ndim) if dim not in sources])
    order = [sources[targets.index(dim)] if dim in targets else next(rest) for dim in range(input.ndim)]
    return _reordered(input.shape, order)


@rule(torch.t, Tensor.t, getter("T"), linear=FIRST, aliases=True)
def turned(input: Tensor) -> Spec:
    return _reordered(input.shape, range(input.ndim)[::-1])


@rule(
    *(getter("mT"), getter("mH"), getter("H"), torch.adjoint, Tensor.adjoint),
    linear=FIRST,
    aliases=True,
)
def matrix_turned(input: Tensor) -> Spec:
    return swapped(input, -1, -2) if input.ndim else same(())


derive(torch.transpose, Tensor.transpose_, Tensor.swapdims_, inplace=0)
derive(torch.swapaxes, Tensor.swapaxes_, inplace=0)
derive(torch.t, Tensor.t_, inplace=0)


# --- dims of size 1 ---


@rule(torch.unsqueeze, Tensor.unsqueeze, linear=FIRST, aliases=True)
def unsqueeze(input: Tensor, dim: int) -> Spec:
    dims = labels(input.ndim)
    at = dim % (input.ndim + 1)
    return Spec((dims,), ((*dims[:at], (), *dims[at:]),), dict(enumerate(input.shape)))


@rule(torch.squeeze, Tensor.squeeze, linear=FIRST, aliases=True)
def squeeze(input: Tensor, dim: Any = None) -> Spec:
    shape = input.shape
    gone = [at for at in normal_dims(dim, input.ndim) if shape[at] == 1]
    if dim is not None and not isinstance(dim, int) and not len(dim):
        gone = []
    dims = labels(input.ndim)
    out = tuple(dims[at] for at in range(input.ndim) if at not in gone)
    why = "squeeze removes it: it has size 1 here, but not in the whole tensor"
    return Spec((dims,), (out,), dict(enumerate(shape)), fixed=dict.fromkeys(gone, why))


derive(torch.unsqueeze, Tensor.unsqueeze_, inplace=0)
derive(torch.squeeze, Tensor.squeeze_, inplace=0)


def raised(dims: list[tuple[int, ...]], ndim: int) -> list[tuple[int, ...]]:
    """Dims of the results of `atleast_1d`, `atleast_2d` and `atleast_3d`."""
    if ndim == 3 and len(dims) in (1, 2):
        return [(), *dims, ()] if len(dims) == 1 else [*dims, ()]
    return [()] * (ndim - len(dims)) + dims


def each_of(tensors: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors of a call that has them one by one, or as one list."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(tensors)


def _raise(x: Tensor, ndim: int) -> Tensor:
    for at, dim in enumerate(raised([(1,)] * x.dim(), ndim)):
        if not dim:
            x = x.unsqueeze(at)
    return x


def _at_least(ndim: int) -> Callable[..., Any]:
    def decompose(*tensors: Any) -> Any:
        results = tuple(_raise(x, ndim) for x in each_of(tensors))
        return results[0] if len(tensors) == 1 and isinstance(tensors[0], Tensor) else results

    return decompose


for _ndim, _function in enumerate((torch.atleast_1d, torch.atleast_2d, torch.atleast_3d), 1):
    rule(_function, kind="decompose", decompose=_at_least(_ndim))(None)
