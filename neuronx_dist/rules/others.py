"""Rules of FFTs, image sampling, counts, writes to slices, and functions without a family.

The functions: copying forms of views, writes into slices, Fourier transforms, sampling of images, counts and sets,
and low-level twins of functions that have rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals.tensors import conj_copy, neg_view_copy
from .pointwise import pointwise, unary
from .spec import RULES, Spec, along, derive, labels, operands, rule
from .splits import cut
from .views import FIRST, ViewLabels, as_int

__all__ = ["GROUPED_PRODUCTS"]

# --- equal values in other memory ---

for _name in (
    "as_strided diagonal permute select split split_with_sizes squeeze t transpose unbind unsqueeze view_as_complex "
    "view_as_real detach"
).split():
    derive(getattr(torch, _name), getattr(torch, f"{_name}_copy"), aliases=False)
for _name in ("expand", "unfold", "view"):
    derive(getattr(Tensor, _name), getattr(torch, f"{_name}_copy"), aliases=False)
rule(torch.alias_copy, conj_copy, neg_view_copy, linear=FIRST)(unary)
for _name in "ipu mtia _autocast_to_reduced_precision to_dense _to_dense to_mkldnn".split():
    if hasattr(Tensor, _name):
        rule(getattr(Tensor, _name), linear=FIRST, aliases=True)(unary)


@rule(Tensor.__reversed__, linear=FIRST)
def turned_round(input: Tensor) -> Spec:
    return along(input.shape, range(min(1, input.dim())), "reversed() moves values along it")


# --- one tensor with a part of another shape written into it ---


@rule(torch.select_scatter, Tensor.select_scatter, linear=((0, 1),))
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Spec:
    dims = labels(input.dim())
    dim %= input.dim()
    ins = (dims, (*dims[:dim], *dims[dim + 1 :]))
    fixed = {dim: "select_scatter writes one of its positions"}
    return Spec(ins, (dims,), dict(enumerate(input.shape)), fixed=fixed, selected=frozenset((dim,)))


@rule(torch.slice_scatter, Tensor.slice_scatter, linear=((0, 1),))
def slice_scatter(input: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Spec:
    builder = ViewLabels()
    dim %= input.dim()
    dims = builder.dims(input.shape[:dim]) + [()] + builder.dims(input.shape[dim + 1 :])
    why = "slice_scatter writes a range of its positions"
    size = input.shape[dim]
    first, last, _ = slice(*(None if at is None else as_int(at) for at in (start, end))).indices(size)
    if as_int(step) == 1:
        whole, (part,) = cut(builder, size, [(first, max(0, last - first))], why, dim, False)
    else:
        whole, part = (builder.new(size, why, selected=True),), (builder.new(src.shape[dim]),)
    for label in set(part) - set(whole):
        builder.fixed[label] = why
    full = [*dims[:dim], whole, *dims[dim + 1 :]]
    return builder.spec([full, [*dims[:dim], part, *dims[dim + 1 :]]], [full])


@rule(torch.diagonal_scatter, Tensor.diagonal_scatter, linear=((0, 1),))
def diagonal_scatter(input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(input.shape)
    pair = {dim1 % input.dim(), dim2 % input.dim()}
    why = "the diagonal of two dims is written"
    for dim in pair:
        builder.fixed[dims[dim][0]] = why
    src_dims = [dim for at, dim in enumerate(dims) if at not in pair] + [(builder.new(src.shape[-1], why),)]
    return builder.spec([dims, src_dims], [dims])


@rule(Tensor.fill_diagonal_, inplace=0)
def fill_diagonal(input: Tensor, fill_value: Any, wrap: bool = False) -> Spec:
    return along(input.shape, None, "the diagonal is written")


# --- Fourier transforms ---


def _transformed(count: int | None, real: str = "") -> Callable[..., Spec]:
    """Builder for transforms of the `count` last dims (None: all) or the named ones; `real`: "to" halves the last."""

    def spec(input: Tensor, n: Any = None, dim: Any = None, *args: Any, **kwargs: Any) -> Spec:
        n = kwargs.get("s", n)
        lengths = [n] if isinstance(n, int) else list(n) if n is not None else None
        if isinstance(dim, int):
            over = [dim]
        elif dim is not None:
            over = list(dim)
        else:
            width = len(lengths) if lengths is not None and count is None else count or input.dim()
            over = list(range(-width, 0))
        builder = ViewLabels()
        ins = builder.dims(input.shape)
        out = list(ins)
        for number, at in enumerate(over):
            at %= input.dim()
            builder.fixed[at] = "a Fourier transform goes over all of it"
            size = input.shape[at] if lengths is None or lengths[number] == -1 else as_int(lengths[number])
            if number == len(over) - 1 and real:
                size = size // 2 + 1 if real == "to" else 2 * (size - 1) if lengths is None else size
            out[at] = (builder.new(size),)
        return builder.spec([ins], [out])

    return spec


for _name, _real in {"fft": "", "ifft": "", "rfft": "to", "ihfft": "to", "irfft": "from", "hfft": "from"}.items():
    for _end, _count in {"": 1, "2": 2, "n": None}.items():
        rule(getattr(torch.fft, _name + _end), linear=FIRST)(_transformed(_count, _real))


@rule(torch.fft.fftshift, torch.fft.ifftshift, linear=FIRST)
def shifted(input: Tensor, dim: Any = None) -> Spec:
    return along(input.shape, dim, "fftshift moves values along it")


# --- images ---


@rule(F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, linear=FIRST)
def grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Spec:
    builder = ViewLabels()
    why = "a grid says where in it values are taken"
    samples, channels = builder.dims(input.shape[:2])
    places = [(builder.new(size, why, looked_up=True),) for size in input.shape[2:]]
    points = builder.dims(grid.shape[1:-1])
    pair = (builder.new(grid.shape[-1], "it holds the coordinates of one point"),)
    return builder.spec([[samples, channels, *places], [samples, *points, pair]], [[samples, channels, *points]])


@rule(F.affine_grid, linear=FIRST)
def affine_grid(theta: Tensor, size: Any, align_corners: Any = None) -> Spec:
    """Spec of affine_grid: `theta` has a matrix per sample, and the sizes are those of a batch of images."""
    builder = ViewLabels()
    why = "a grid multiplies its positions by the matrix"
    samples = (builder.new(theta.shape[0]),)
    ins = [samples, *((builder.new(n, why),) for n in theta.shape[1:])]
    count = as_int(size[0])
    if count != theta.shape[0]:
        raise ValueError(f"affine_grid: got {theta.shape[0]} matrices for {count} images; pass one matrix per image")
    return builder.spec([ins], [[samples, *builder.dims(map(as_int, size[2:])), (builder.new(len(size) - 2),)]])


# --- counts and sets, whose number of results depends on values ---


def _sets(outs: Callable[..., int], why: str) -> Callable[..., Spec]:
    def spec(*args: Any, **kwargs: Any) -> Spec:
        builder = ViewLabels()
        ins = [[(builder.new(size, why),) for size in x.shape] for x in operands(args, kwargs)]
        return builder.spec(ins, [[(builder.new(0),)] for _ in range(outs(*args, **kwargs))])

    return spec


def _parts_of_unique(*args: Any, **kwargs: Any) -> int:
    return 1 + bool(kwargs.get("return_inverse")) + bool(kwargs.get("return_counts"))


rule(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive)(
    _sets(_parts_of_unique, "values of all of it are compared")
)
rule(torch.bincount, Tensor.bincount)(_sets(lambda *args, **kwargs: 1, "how many bins there are depends on all of it"))
rule(torch.histogram, Tensor.histogram)(_sets(lambda *args, **kwargs: 2, "how wide the bins are depends on all of it"))


@rule(torch.unravel_index)
def unravel_index(indices: Tensor, shape: Any) -> Spec:
    spec = unary(indices)
    return spec._replace(outs=spec.outs * (1 if isinstance(shape, int) else len(shape)))


# --- fused forms, and twins of functions that have rules ---


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: Any = None,
    **kwargs: Any,
) -> Tensor:
    if ignore_index is not None:
        kwargs["ignore_index"] = ignore_index
    shape = linear_weight.shape[:-1]
    if len(shape) > 1:  # a loss of several dims behind that of the classes
        linear_weight = linear_weight.flatten(0, -2)
        linear_bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits.unflatten(-1, shape) if len(shape) > 1 else logits, target, **kwargs)


if hasattr(F, "linear_cross_entropy"):
    rule(F.linear_cross_entropy, kind="decompose", decompose=_linear_cross_entropy)(None)


def grouped_mm(input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any) -> Spec:
    """Spec of one product for each group (an expert).

    Operands: `[tokens, k]` and `[groups, k, n]`, or `[m, tokens]` and `[tokens, n]`, where the offsets cut the tokens
    into groups; or `[groups, m, k]` and `[groups, k, n]`.
    """
    whole, group = "the offsets of the groups count its positions", "each group has offsets of its own"
    last = mat2.shape[-1]
    groups = offs.shape[0] if offs is not None else mat2.shape[0]
    sizes = {0: input.shape[-2], 1: input.shape[-1], 2: last, 3: groups}
    fixed = {3: group} if offs is not None else {}
    reduced = {1: "sum"}
    first: Any = ((3,),) if input.dim() == 3 else ()
    second: Any = ((3,),) if mat2.dim() == 3 else ()
    out: Any = ((3,), (0,), (2,))
    if input.dim() == 2 and mat2.dim() == 3:
        fixed[0], out = whole, ((0,), (2,))
    elif input.dim() == 3 and mat2.dim() == 2:
        fixed[2], out = whole, ((0,), (2,))
    elif input.dim() == 2:
        fixed[1], reduced = whole, {}
    ins: list[Any] = [(*first, (0,), (1,)), (*second, (1,), (2,))]
    if offs is not None:
        ins.append(((3,),))
    if bias is not None:
        ins.append(((3,), (2,)) if bias.dim() == 2 else ((2,),))
    return Spec(tuple(ins), (out,), sizes, reduced, fixed)


# Products of groups of rows; torch 2.9 has those with an underscore alone.
_NAMES = ("grouped_mm", "_grouped_mm")
GROUPED_PRODUCTS = [getattr(place, name) for place in (torch, F) for name in _NAMES if hasattr(place, name)]
for _function in GROUPED_PRODUCTS:
    rule(_function, linear=((0,), (1,)))(grouped_mm)


@rule(torch.native_layer_norm)
def native_layer_norm(input: Tensor, normalized_shape: Any, *args: Any) -> Spec:
    spec = RULES[torch.layer_norm].spec(input, normalized_shape, *args)  # type: ignore[misc]
    rest = spec.outs[0][: input.dim() - len(normalized_shape)] + ((),) * len(normalized_shape)
    return spec._replace(outs=(*spec.outs, rest, rest))


rule(
    *(
        getattr(torch.special, name)
        for name in dir(torch.special)
        if "polynomial" in name and getattr(torch.special, name) not in RULES
    )
)(pointwise)
