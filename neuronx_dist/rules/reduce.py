"""Rules of functions along dims: reductions, norms, statistics, softmax, sorting and scans.

Results of shards can be combined for a sum or a maximum (`Spec.reduced`). Where they cannot, or not simply, the dim is
fixed, and the phrase says which function mixes it or what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .names import register
from .pointwise import pointwise, rounds
from .spec import Spec, along, derive, elementwise, labels, nonzero, operands, reduction, rule

__all__ = ["SQUARES", "ends"]

Dim = int | Iterable[int] | None

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "A": "input", "x": "input"}


def _read(names: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the values of the arguments `names` (`"input dim keepdim"`), None for absent ones."""
    named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    return tuple(
        args[position] if position < len(args) else named.get(name) for position, name in enumerate(names.split())
    )


def ends(shape: Sequence[int], dims: Dim, keepdim: bool, why: str, outs: int = 1) -> Spec:
    """Spec of a reduction whose dims must not be sharded."""
    spec = reduction(shape, dims, keepdim, "", outs)
    return spec._replace(reduced={}, fixed=dict.fromkeys(spec.reduced, why))


def _to_integers(*args: Any, **kwargs: Any) -> bool:
    return kwargs.get("dtype") is not None and rounds(operands(args, kwargs)[0].dtype, kwargs["dtype"])


# --- results of shards can be combined ---


def _combined(kind: str) -> Callable[..., Spec]:
    def spec(*args: Any, **kwargs: Any) -> Spec:
        x, dim, keepdim = _read("input dim keepdim", args, kwargs)
        return reduction(x.shape, dim, bool(keepdim), kind)

    return spec


register("sum", _combined("sum"), linear=((0,),), affine=_to_integers)
register("mean", _combined("mean"), linear=((0,),))
# not linear: a NaN in one addend hides only this addend
register("nansum count_nonzero", _combined("sum"))
register("prod", _combined("prod"))
register("amax", _combined("max"), positive=((0,),))
register("amin", _combined("min"), positive=((0,),))
register("any", _combined("any"))
register("all", _combined("all"))


@rule(Tensor.sum_to_size, linear=((0,),), aliases=True)
def sum_to_size(x: Tensor, *size: Any) -> Spec:
    target = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    ndim = x.dim()
    over = [
        dim
        for dim, length in enumerate(x.shape)
        if dim < ndim - len(target) or (target[dim - ndim] == 1 and length != 1)
    ]
    out = tuple(() if dim in over else (dim,) for dim in range(ndim - len(target), ndim))
    return Spec((labels(ndim),), (out,), dict(enumerate(x.shape)), dict.fromkeys(over, "sum"))


# --- norms ---

_OF_NORMS = {inf: "max", -inf: "min", 1: "sum", 0: "sum"}
SQUARES = "the norm over all of it is taken: sum the powers, all_reduce, then take the root"


def _norm(x: Tensor, order: Any, dim: Dim, keepdim: Any) -> Spec:
    kind = _OF_NORMS.get(order) if isinstance(order, (int, float)) else None
    if kind is None:
        why = SQUARES if order in (None, 2, "fro") else "another norm than that of squares is taken over all of it"
        return ends(x.shape, dim, bool(keepdim), why)
    return reduction(x.shape, dim, bool(keepdim), kind)


@rule(torch.norm, Tensor.norm, positive=((0,),))
def norm(*args: Any, **kwargs: Any) -> Spec:
    x, order, dim, keepdim = _read("input p dim keepdim", args, kwargs)
    return _norm(x, order, dim, keepdim)


@rule(torch.linalg.vector_norm, positive=((0,),))
def vector_norm(*args: Any, **kwargs: Any) -> Spec:
    x, order, dim, keepdim = _read("input ord dim keepdim", args, kwargs)
    return _norm(x, order, dim, keepdim)


@rule(torch.linalg.norm, positive=((0,),))
def linalg_norm(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a vector norm for one dim or without an order, else of a matrix norm."""
    x, order, dim, keepdim = _read("input ord dim keepdim", args, kwargs)
    single = isinstance(dim, int) or (dim is not None and len(dim) == 1) or (dim is None and x.dim() == 1)
    return _norm(x, order if single or order is None else "fro" if order == "fro" else "matrix", dim, keepdim)


@rule(torch.linalg.matrix_norm, positive=((0,),))
def matrix_norm(*args: Any, **kwargs: Any) -> Spec:
    x, _, dim, keepdim = _read("input ord dim keepdim", args, kwargs)
    return ends(x.shape, (-2, -1) if dim is None else dim, bool(keepdim), "it is a dim of the matrix")


@rule(F.cosine_similarity)
def cosine_similarity(*args: Any, **kwargs: Any) -> Spec:
    one, two = operands(args, kwargs)
    dim = _read("x1 x2 dim", args, kwargs)[2]
    return _pairs(one, two, 1 if dim is None else dim, False, "the angle is between vectors along it")


@rule(F.pairwise_distance)
def pairwise_distance(*args: Any, **kwargs: Any) -> Spec:
    one, two = operands(args, kwargs)
    keepdim = _read("x1 x2 p eps keepdim", args, kwargs)[4]
    return _pairs(one, two, -1, bool(keepdim), "the distance along all of it is taken")


@rule(torch.dist, Tensor.dist)
def dist(*args: Any, **kwargs: Any) -> Spec:
    one, two = operands(args, kwargs)
    return _pairs(one, two, None, False, "the distance along all of it is taken")


def _pairs(one: Tensor, two: Tensor, dim: Dim, keepdim: bool, why: str) -> Spec:
    both = elementwise(one.shape, two.shape)
    ended = ends(list(both.sizes.values()), dim, keepdim, why)
    return ended._replace(ins=both.ins)


# --- statistics ---


def _spread(outs: int) -> Callable[..., Spec]:
    why = "the mean over all of it is needed: sum, all_reduce, then divide by the global count"

    def spec(*args: Any, **kwargs: Any) -> Spec:
        if len(args) > 1 and isinstance(args[1], bool):  # var(x, unbiased)
            args = args[:1]
        x, dim, _, keepdim = _read("input dim unbiased keepdim", args, kwargs)
        return ends(x.shape, dim, bool(keepdim), why, outs)

    return spec


register("var std", _spread(1))
register("var_mean std_mean", _spread(2))


def _ended(why: str, names: str = "input dim keepdim", default: Dim = None) -> Callable[..., Spec]:
    """Builder for a reduction with one result, whose dims must not be sharded."""

    def spec(*args: Any, **kwargs: Any) -> Spec:
        x, *_, dim, keepdim = _read(names, args, kwargs)
        return ends(x.shape, default if dim is None else dim, bool(keepdim), why)

    return spec


register("argmax argmin", _ended("positions in the shard are not positions in the whole"))
register("logsumexp", _ended("exponentials over all of it are summed: use the maximum and the sum, each all_reduced"))
register("nanmean", _ended("the mean needs the global count: nansum, all_reduce, then divide"))


def _with_positions(name: str, default: Dim = None) -> Callable[..., Spec]:
    """Builder: with a dim, the results are values and positions; without one (and no default), the value alone."""
    why = f"{name} looks at all of it"

    def spec(*args: Any, **kwargs: Any) -> Spec:
        x, dim, keepdim = _read("input dim keepdim", args, kwargs)
        dim = default if dim is None else dim
        return ends(x.shape, dim, bool(keepdim), why, 1 if dim is None else 2)

    return spec


register("median", _with_positions("median"))
register("nanmedian", _with_positions("nanmedian"))
register("mode", _with_positions("mode", -1))


def _extreme(kind: str) -> Callable[..., Spec]:
    """Builder for `max(x)`, `max(x, dim)` with positions, and `max(x, y)`."""
    why = f"{kind} with a dim gives positions in the shard; a{kind} gives the value alone"

    def spec(*args: Any, **kwargs: Any) -> Spec:
        if len(operands(args, kwargs)) > 1:
            return pointwise(*args, **kwargs)
        x, dim, keepdim = _read("input dim keepdim", args, kwargs)
        if dim is None:
            return reduction(x.shape, None, False, kind)
        return ends(x.shape, dim, bool(keepdim), why, 2)

    return spec


register("max", _extreme("max"))
register("min", _extreme("min"))


def aminmax(*args: Any, **kwargs: Any) -> Spec:
    x, dim, keepdim = _read("input dim keepdim", args, kwargs)
    return ends(x.shape, dim, bool(keepdim), "aminmax reduces it in two ways; use amin and amax", 2)


register("aminmax", aminmax)


def kthvalue(*args: Any, **kwargs: Any) -> Spec:
    x, _, dim, keepdim = _read("input k dim keepdim", args, kwargs)
    return ends(x.shape, -1 if dim is None else dim, bool(keepdim), "kthvalue orders all of it", 2)


register("kthvalue", kthvalue)


def quantile(*args: Any, **kwargs: Any) -> Spec:
    x, q, dim, keepdim = _read("input q dim keepdim", args, kwargs)
    spec = ends(x.shape, dim, bool(keepdim), "quantile orders all of it")
    if not isinstance(q, Tensor):
        return spec
    levels = labels(q.dim(), x.dim())
    sizes = {**spec.sizes, **{x.dim() + number: size for number, size in enumerate(q.shape)}}
    return spec._replace(ins=(*spec.ins, levels), outs=((*levels, *spec.outs[0]),), sizes=sizes)


register("quantile nanquantile", quantile)


def hash_tensor(*args: Any, **kwargs: Any) -> Spec:
    x, dim, keepdim = _read("input dim keepdim", args, kwargs)
    return ends(x.shape, dim, bool(keepdim), "a hash is made of all of it")


register("hash_tensor", hash_tensor)


def trace(input: Tensor) -> Spec:
    return ends(input.shape, None, False, "trace walks along two dims at once")


register("trace", trace, linear=((0,),))


# --- same shape, mixed along a dim ---


def _mixed(why: str, outs: int = 1, default: Dim = -1, names: str = "input dim") -> Callable[..., Spec]:
    def spec(*args: Any, **kwargs: Any) -> Spec:
        x, *_, dim = _read(names, args, kwargs)
        return along(x.shape, default if dim is None else dim, why, outs)

    return spec


def _softmax(name: str) -> Callable[..., Spec]:
    why = f"{name} normalises over it"

    def spec(*args: Any, **kwargs: Any) -> Spec:
        x, dim = _read("input dim", args, kwargs)
        if dim is None:  # the default dim of torch.nn.functional
            dim = 0 if x.dim() in (0, 1, 3) else 1
        return along(x.shape, dim, why)

    return spec


for _name in ("softmax", "log_softmax", "softmin"):
    register(_name, _softmax(_name))
rule(F.gumbel_softmax, random=True)(
    lambda logits, tau=1, hard=False, eps=1e-10, dim=-1: along(logits.shape, dim, "gumbel_softmax normalises over it")
)
rule(F.normalize)(_mixed("normalize divides by the norm over all of it", default=1, names="input p dim"))
register("cumsum", _mixed("cumsum runs along all of it"), linear=((0,),), affine=_to_integers)
register("cumprod", _mixed("cumprod runs along all of it"))
register("logcumsumexp", _mixed("logcumsumexp runs along all of it"))
register("cummax", _mixed("cummax runs along all of it", 2))
register("cummin", _mixed("cummin runs along all of it", 2))
register("msort", _mixed("msort orders all of it", default=0))


def _sorted(outs: int, name: str) -> Callable[..., Spec]:
    why = f"{name} orders all of it"

    def spec(*args: Any, **kwargs: Any) -> Spec:
        if len(args) > 1 and isinstance(args[1], bool):  # sort(x, stable, dim): the overload that names stable
            args = (args[0], *args[2:])
        x, dim = _read("input dim", args, kwargs)
        return along(x.shape, -1 if dim is None else dim, why, outs)

    return spec


register("sort", _sorted(2, "sort"))
register("argsort", _sorted(1, "argsort"))


def _resized(spec: Spec, dim: int, size: int) -> Spec:
    """Spec whose results have a new label of `size` at `dim`."""
    new = len(spec.sizes)
    outs = tuple((*out[:dim], (new,), *out[dim + 1 :]) for out in spec.outs)
    return spec._replace(outs=outs, sizes={**spec.sizes, new: size})


def topk(*args: Any, **kwargs: Any) -> Spec:
    x, k, dim = _read("input k dim", args, kwargs)
    dim = -1 if dim is None else dim
    spec = along(x.shape, dim, "topk orders all of it", 2)
    return _resized(spec, dim % x.dim(), k) if x.dim() else spec


register("topk", topk)


def diff(*args: Any, **kwargs: Any) -> Spec:
    x, n, dim, prepend, append = _read("input n dim prepend append", args, kwargs)
    dim = (-1 if dim is None else dim) % x.dim()
    why, whole = "diff takes neighbours along it", labels(x.dim())
    spec = along(x.shape, dim, why)
    size = x.shape[dim] - (1 if n is None else n)
    for more in (prepend, append):
        if more is not None:  # its dim has another label
            new = len(spec.sizes)
            dims = (*whole[:dim], (new,), *whole[dim + 1 :])
            length = more.shape[dim]
            spec = spec._replace(
                ins=(*spec.ins, dims), sizes={**spec.sizes, new: length}, fixed={**spec.fixed, new: why}
            )
            size += length
    return _resized(spec, dim, size)


register("diff", diff, linear=((0, 1, 2),))


# --- searches for values ---


def isin(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a search for each element of the first operand in the second; either may be a number."""
    first, second = _read("elements test_elements", args, kwargs)
    dims = labels(first.dim()) if isinstance(first, Tensor) else ()
    sizes = dict(enumerate(first.shape)) if isinstance(first, Tensor) else {}
    ins: tuple[Any, ...] = (dims,) if isinstance(first, Tensor) else ()
    fixed: dict[int, str] = {}
    if isinstance(second, Tensor):
        tests = labels(second.dim(), len(sizes))
        fixed = {label: "isin looks through all of it" for (label,) in tests}
        sizes = {**sizes, **{label: size for (label,), size in zip(tests, second.shape)}}
        ins += (tests,)
    return Spec(ins, (dims,), sizes, {}, fixed)


register("isin", isin)


def _into_order(sequence: Tensor, values: Any) -> Spec:
    """Spec of values placed in sorted sequences: all dims but the last belong together."""
    why = "its values are looked for in all of it"
    if not isinstance(values, Tensor):
        dims = labels(sequence.dim())
        fixed = {label: why for (label,) in dims}
        return Spec((dims,), ((),), dict(enumerate(sequence.shape)), {}, fixed)
    placed = labels(values.dim())
    new = values.dim()
    dims = (*placed[:-1], (new,)) if sequence.dim() > 1 else ((new,),)
    sizes = {**dict(enumerate(values.shape)), new: sequence.shape[-1]}
    return Spec((dims, placed), (placed,), sizes, {new: "sum"})  # a place is a count of the smaller ones


def searchsorted(*args: Any, **kwargs: Any) -> Spec:
    sequence, values = _read("sorted_sequence input", args, kwargs)
    spec = _into_order(sequence, values)
    order = kwargs.get("sorter")
    if order is None:
        return spec
    fixed = {spec.ins[0][-1][0]: "the sorter's positions are of all of it"}  # type: ignore[index]
    return spec._replace(ins=(*spec.ins, spec.ins[0]), reduced={}, fixed=fixed)


def bucketize(*args: Any, **kwargs: Any) -> Spec:
    values, boundaries = _read("input boundaries", args, kwargs)
    spec = _into_order(boundaries, values)
    return spec._replace(ins=spec.ins[::-1])


register("searchsorted", searchsorted)
register("bucketize", bucketize)


def histc(*args: Any, **kwargs: Any) -> Spec:
    """Spec of counts, which add up if the range is an argument; if min equals max, the range depends on the values."""
    x, bins, low, high = _read("input bins min max", args, kwargs)
    spec = reduction(x.shape, None)
    if (low or 0) == (high or 0):
        spec = ends(x.shape, None, False, "without min and max the bins are those of its own range")
    return spec._replace(outs=(((x.dim(),),),), sizes={**spec.sizes, x.dim(): bins or 100})


register("histc", histc)


@rule(torch.renorm, Tensor.renorm)
def renorm(input: Tensor, p: Any, dim: int, maxnorm: Any) -> Spec:
    others = [other for other in range(input.dim()) if other != dim % input.dim()]
    return along(input.shape, others, "renorm takes the norm over it")


derive(torch.renorm, Tensor.renorm_, inplace=0)


def _is_no_sum(data: Tensor, reduce: str, *, initial: Any = None, **_: Any) -> bool:
    return reduce not in ("sum", "mean") or nonzero(initial)


@rule(torch.segment_reduce, linear=((0,),), affine=_is_no_sum)
def segment_reduce(
    data: Tensor, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None, axis: int = 0, **_: Any
) -> Spec:
    """Spec of reductions of segments along `axis`, before which dims are those of the segments' lengths, too."""
    bounds = offsets if lengths is None else lengths
    dims, why = labels(data.dim()), "segments end anywhere in it"
    cuts, segments = data.dim(), data.dim() + 1
    sizes = {**dict(enumerate(data.shape)), cuts: bounds.shape[-1], segments: bounds.shape[-1] - (lengths is None)}
    out = (*dims[:axis], (segments,), *dims[axis + 1 :])
    return Spec((dims, (*dims[:axis], (cuts,))), (out,), sizes, fixed={axis: why, cuts: why})
