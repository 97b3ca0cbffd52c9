"""Products and convolutions: contractions of dims, multilinear in their operands.

If a label that only some operands have is summed over, an operand that is *added* (a bias: it is in a linear group
with an operand that has the label) would be added once for each shard, so it must be partial too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .names import register
from .reduce import ends
from .spec import Spec, along, contraction, elementwise, labels, operands, rule

__all__ = ["matmul"]

EACH = tuple((number,) for number in range(16))
"""For `Rule.linear`: in each operand by itself."""

ADDED = ((0, 1), (0, 2))
"""For `Rule.linear`: operand 0 is added to the product of the others."""


def _product(equation: str) -> Callable[..., Spec]:
    def spec(*args: Any, **kwargs: Any) -> Spec:
        return contraction(equation, *[x.shape for x in operands(args, kwargs)])

    return spec


def _sum_of_products(equation: str) -> Callable[..., Spec]:
    """Builder for a product to which operand 0, of the shape of the result or broadcast to it, is added."""
    result = equation.partition("->")[2]

    def spec(*args: Any, **kwargs: Any) -> Spec:
        shapes = [x.shape for x in operands(args, kwargs)]
        return contraction(f"{result[len(result) - len(shapes[0]) :]},{equation}", *shapes)

    return spec


for _names, _equation in {
    "mm": "nk,km->nm",
    "bmm": "bnk,bkm->bnm",
    "mv": "nk,k->n",
    "dot vdot": "k,k->",
    "outer ger": "n,m->nm",
}.items():
    register(_names, _product(_equation), linear=EACH)
for _names, _equation in {
    "addmm": "nk,km->nm",
    "addmv": "nk,k->n",
    "addr": "n,m->nm",
    "baddbmm": "bnk,bkm->bnm",
    "addbmm": "bnk,bkm->nm",
}.items():
    register(_names, _sum_of_products(_equation), linear=ADDED)


def matmul(input: Tensor, other: Tensor, **_: Any) -> Spec:
    """Spec of a product of vectors, matrices, or batches of matrices, which are broadcast."""
    left = "k" if input.dim() == 1 else "...nk"
    right = "k" if other.dim() == 1 else "...km"
    result = "..." + "n" * (input.dim() > 1) + "m" * (other.dim() > 1)
    if input.dim() == other.dim() == 1:
        result = ""
    return contraction(f"{left},{right}->{result}", input.shape, other.shape)


register("matmul", matmul, linear=EACH)


@rule(Tensor.__rmatmul__, linear=EACH)
def rmatmul(self: Tensor, other: Tensor) -> Spec:
    spec = matmul(other, self)
    return spec._replace(ins=spec.ins[::-1])


@rule(F.linear, linear=((0, 2), (1, 2)))
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Spec:
    """Spec of `input @ weight.T + bias`; the weight may be a vector, the bias have any dims that torch broadcasts."""
    row = "n" if weight.dim() == 2 else ""
    if bias is None:
        return contraction(f"...k,{row}k->...{row}", input.shape, weight.shape)
    added = f"...{row}" if bias.dim() > len(row) else row[: bias.dim()]
    return contraction(f"...k,{row}k,{added}->...{row}", input.shape, weight.shape, bias.shape)


@rule(F.bilinear, linear=((0, 3), (1, 3), (2, 3)))
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Spec:
    shapes = [x.shape for x in (input1, input2, weight, bias) if x is not None]
    return contraction("...i,...j,oij" + ",o" * (bias is not None) + "->...o", *shapes)


@rule(torch.einsum, linear=EACH, aliases=True)
def einsum(*args: Any) -> Spec:
    """Spec of einsum in both forms: an equation and operands, or each operand followed by its subscripts."""
    shapes = [x.shape for x in operands(args, {})]
    if isinstance(args[0], str):
        return contraction(args[0], *shapes)

    def term(subscripts: Sequence[Any]) -> str:
        return "".join("..." if subscript is Ellipsis else ascii_letters[subscript] for subscript in subscripts)

    terms = [term(subscripts) for subscripts in args[1::2]]
    result = "->" + term(args[-1]) if len(args) % 2 else ""
    return contraction(",".join(terms) + result, *shapes)


@rule(torch.tensordot, linear=EACH)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, **_: Any) -> Spec:
    extra: tuple[None, ...] = ()
    if isinstance(dims, Tensor):
        dims, extra = dims.tolist(), (None,)
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    left, right = ([dims[0]], [dims[1]]) if isinstance(dims[0], int) else dims
    a_labels, b_labels = ascii_letters[: a.dim()], list(ascii_letters[26 : 26 + b.dim()])
    for one, two in zip(left, right):
        b_labels[two] = a_labels[one]
    paired = {a_labels[one] for one in left}
    result = [letter for letter in (*a_labels, *b_labels) if letter not in paired]
    spec = contraction(f"{a_labels},{''.join(b_labels)}->{''.join(result)}", a.shape, b.shape)
    return spec._replace(ins=spec.ins + extra)


def inner(input: Tensor, other: Tensor, **_: Any) -> Spec:
    if not input.dim() or not other.dim():
        return elementwise(input.shape, other.shape)
    input_labels, other_labels = ascii_letters[: input.dim() - 1], ascii_letters[26 : 25 + other.dim()]
    return contraction(f"{input_labels}z,{other_labels}z->{input_labels}{other_labels}", input.shape, other.shape)


register("inner", inner, linear=EACH)


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1, **_: Any) -> Spec:
    spec = elementwise(x.shape, y.shape)
    (out,) = spec.outs
    dim %= len(out)
    return spec._replace(outs=(out[:dim] + out[dim + 1 :],), reduced={dim: "sum"})


register("vecdot", vecdot, linear=EACH)


def kron(input: Tensor, other: Tensor, **_: Any) -> Spec:
    """Spec of kron: each dim of the result is the first operand's dim (outer) times the second's (inner)."""
    ndim = max(input.dim(), other.dim())
    input_labels, other_labels = labels(input.dim()), labels(other.dim(), input.dim())
    pad = ((),) * ndim
    pairs = zip((*pad, *input_labels)[-ndim:], (*pad, *other_labels)[-ndim:]) if ndim else ()
    sizes = dict(enumerate((*input.shape, *other.shape)))
    return Spec((input_labels, other_labels), (tuple(one + two for one, two in pairs),), sizes)


register("kron", kron, linear=EACH)


def cross(input: Tensor, other: Tensor, dim: int | None = None, **_: Any) -> Spec:
    """Spec of products of vectors of size 3 along `dim`; by default `torch.cross` takes the first dim of size 3."""
    spec = elementwise(input.shape, other.shape)
    if dim is None:
        dim = list(input.shape).index(3)
    return spec._replace(fixed={dim % len(spec.outs[0]): "the cross product mixes it"})


register("cross", cross, linear=EACH)
rule(torch.linalg.cross, linear=EACH)(lambda input, other, *, dim=-1, **_: cross(input, other, dim))


@rule(torch.linalg.multi_dot, torch.chain_matmul, linear=EACH)
def multi_dot(*args: Any, **_: Any) -> Spec:
    """Spec of a chain of matrices; the first and the last may be vectors."""
    shapes = [x.shape for x in operands(args, {})]
    terms = [ascii_letters[number : number + 2] for number in range(len(shapes))]
    if len(shapes[0]) == 1:
        terms[0] = terms[0][1:]
    if len(shapes[-1]) == 1:
        terms[-1] = terms[-1][:1]
    ends = ascii_letters[0] * (len(shapes[0]) == 2) + ascii_letters[len(shapes)] * (len(shapes[-1]) == 2)
    return contraction(f"{','.join(terms)}->{ends}", *shapes)


@rule(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, *_: Any, **__: Any) -> Spec:
    spec = contraction("...nk,...mk->...nm", x1.shape, x2.shape)
    return spec._replace(reduced={}, fixed=dict.fromkeys(spec.reduced, "the distance along all of it is taken"))


register(
    "inv inverse matrix_exp matrix_power cholesky",
    lambda *args, **kwargs: along(operands(args, kwargs)[0].shape, (-2, -1), "it is a dim of the matrix"),
)
for _name, _outs in {"det": 1, "logdet": 1, "slogdet": 2}.items():
    register(
        _name,
        lambda *args, _outs=_outs, **kwargs: ends(
            operands(args, kwargs)[0].shape, (-2, -1), False, "it is a dim of the matrix", _outs
        ),
    )


# --- convolutions ---


def _many(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * (count if len(value) == 1 else 1)


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, transposed: bool, extents: list[int]
) -> Spec:
    """Spec with labels for groups, input channels, output channels, batch; then input places, window, output places."""
    spatial = weight.dim() - 2
    batch = ((3,),) if input.dim() == spatial + 2 else ()
    group: tuple[int, ...] = (0,) if groups > 1 else ()
    places_in, window, places_out = (labels(spatial, 4 + part * spatial) for part in range(3))
    first, second = weight.shape[:2]
    inner, outer = (first // groups, second) if transposed else (second, first // groups)
    sizes = {0: groups, 1: inner, 2: outer, 3: input.shape[0]}
    for part, extent in enumerate((input.shape[-spatial:], weight.shape[2:], extents)):
        sizes.update({4 + part * spatial + dim: size for dim, size in enumerate(extent)})
    ins_of_group = () if groups > 1 and inner == 1 else (1,)
    outs_of_group = () if groups > 1 and outer == 1 else (2,)
    channels, features = (group + ins_of_group, outs_of_group) if transposed else (group + outs_of_group, ins_of_group)
    result = group + outs_of_group
    ins: tuple[Any, ...] = ((*batch, group + ins_of_group, *places_in), (channels, features, *window))
    if bias is not None:
        ins += ((result,),)
    fixed = {label: "the convolution mixes neighbours along it" for (label,) in places_in}
    fixed.update({label: "it is the window of the convolution" for (label,) in window})
    outs = ((*batch, result, *places_out),)
    used = {label for dims in (*ins, *outs) for dim in dims for label in dim}
    return Spec(
        ins,
        outs,
        {label: size for label, size in sizes.items() if label in used},
        {1: "sum"} if 1 in used else {},
        fixed,
    )


@rule(F.conv1d, F.conv2d, F.conv3d, linear=((0, 2), (1, 2)))
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Spec:
    """Spec of a convolution: contracts input channels, keeps groups apart; neighbours mix along the other dims."""
    count = weight.dim() - 2
    places, windows = input.shape[-count:], weight.shape[2:]
    steps, spread = _many(stride, count), _many(dilation, count)
    reach = [gap * (window - 1) for gap, window in zip(spread, windows)]
    if isinstance(padding, str):
        added = reach if padding == "same" else [0] * count
    else:
        added = [2 * size for size in _many(padding, count)]
    extents = [(size + more - far - 1) // step + 1 for size, more, far, step in zip(places, added, reach, steps)]
    return _convolution(input, weight, bias, groups, False, extents)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, linear=((0, 2), (1, 2)))
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Spec:
    count = weight.dim() - 2
    extents = [
        (size - 1) * step - 2 * less + gap * (window - 1) + more + 1
        for size, step, less, gap, window, more in zip(
            input.shape[-count:],
            _many(stride, count),
            _many(padding, count),
            _many(dilation, count),
            weight.shape[2:],
            _many(output_padding, count),
        )
    ]
    return _convolution(input, weight, bias, groups, True, extents)
