"""Rules of elementwise functions: arithmetic, comparisons, activations, casts, copies, and their forms for lists.

They are tables of names: operands broadcast in all of them, and they differ in where they are linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals.tensors import foreach_functions, native_nn, tensor_to
from .names import getter, register
from .spec import ALL, RULES, Rule, Spec, along, elementwise, labels, nonzero, operands, rule, same

__all__ = ["ELEMENTWISE", "pointwise", "rounds", "unary"]


def pointwise(*args: Any, **kwargs: Any) -> Spec:
    """Spec of tensor operands that broadcast against each other."""
    return elementwise(*[x.shape for x in operands(args, kwargs)])


def unary(*args: Any, **kwargs: Any) -> Spec:
    """Spec of one operand and a result of its shape."""
    return same(operands(args, kwargs)[0].shape)


def compared(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a comparison; with 0 the result is the same at any scale."""
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return pointwise(*args, **kwargs)._replace(at_any_scale=isinstance(other, Number) and not nonzero(other))


def filled(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a function that may replace elements by a constant."""
    infinite = any(isinstance(value, float) and math.isinf(value) for value in (*args, *kwargs.values()))
    return pointwise(*args, **kwargs)._replace(infinite=infinite)


def of_the_sign(*args: Any, **kwargs: Any) -> Spec:
    """Spec of one operand, whose positive factors do not change the result."""
    return unary(*args, **kwargs)._replace(at_any_scale=True)


ELEMENTWISE = frozenset((pointwise, unary, compared, filled, of_the_sign))
"""The builders of specs in which all operands have the shape of the result, or are broadcast to it."""


# --- calls of linear functions that are not linear ---


def _adds(*args: Any, **kwargs: Any) -> bool:
    """Returns True if the second operand is a number other than 0: `x + 3`."""
    return nonzero(args[1] if len(args) > 1 else kwargs.get("other"))


def _adds_value(*args: Any, **kwargs: Any) -> bool:
    """Returns True if the last argument, which is written, is a number other than 0: `masked_fill`, `fill_`."""
    return nonzero(kwargs["value"] if "value" in kwargs else args[-1])


def _adds_branch(*args: Any, **kwargs: Any) -> bool:
    """Returns True if a branch of `where` is a number other than 0."""
    return any(nonzero(value) for value in (*args, *kwargs.values()) if isinstance(value, Number))


def _divides_to_integers(*args: Any, **kwargs: Any) -> bool:
    return kwargs.get("rounding_mode") is not None


def rounds(source: torch.dtype, target: Any) -> bool:
    """Returns True if a cast to `target` (None: no cast) loses more than precision: floats to integers, any to bool."""
    if not isinstance(target, torch.dtype) or target.is_floating_point or target.is_complex:
        return False
    return source.is_floating_point or source.is_complex or (target is torch.bool and source is not torch.bool)


# --- tables ---

NONLINEAR = (
    # arithmetic
    "ceil fix floor frac trunc round rsqrt sqrt square nan_to_num pow "
    "float_power remainder fmod floor_divide copysign nextafter gcd lcm heaviside "
    "clamp clip clamp_min clamp_max "
    # exponentials, angles, special functions
    "exp exp2 expm1 log log10 log1p log2 logit logaddexp logaddexp2 sigmoid expit sin cos tan sinh cosh "
    "tanh sinc asin acos atan arcsin arccos arctan asinh acosh atanh arcsinh arccosh arctanh atan2 arctan2 angle polar "
    "digamma psi polygamma lgamma gammaln mvlgamma multigammaln gammainc gammaincc igamma igammac erf erfc erfcx "
    "erfinv entr ndtr ndtri log_ndtr zeta i0 i0e i1 i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0 airy_ai chebyshev_polynomial_t chebyshev_polynomial_u hermite_polynomial_h "
    "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    # activations
    "relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink softshrink softplus "
    "softsign tanhshrink logsigmoid log_sigmoid threshold _threshold "
    # tests, logic
    "isclose isreal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "bitwise_left_shift bitwise_right_shift"
)

COMPARISONS = "eq ne lt le gt ge not_equal less less_equal greater greater_equal"
OF_THE_SIGN = "sign sgn signbit isfinite isinf isnan isneginf isposinf"

# a positive factor of all operands becomes a factor of the result
POSITIVE = "abs absolute relu leaky_relu maximum minimum fmax fmin hypot"

# one operand, linear; the second table: the result may be the operand itself, or share its memory
LINEAR = "neg negative clone deg2rad rad2deg"
LINEAR_VIEWS = (
    "positive contiguous detach conj conj_physical resolve_conj resolve_neg pin_memory "
    "bfloat16 half double float cfloat cdouble chalf cpu cuda xpu"
)
TO_INTEGERS = dict(
    byte=torch.uint8, char=torch.int8, short=torch.int16, int=torch.int32, long=torch.int64, bool=torch.bool
)

register(NONLINEAR, pointwise)
register(COMPARISONS, compared)
register(OF_THE_SIGN, of_the_sign)
register(POSITIVE, pointwise, positive=ALL)
register("reciprocal", pointwise, inverse=(0,))
register(LINEAR, unary, linear=((0,),))
register(LINEAR_VIEWS, unary, linear=((0,),), aliases=True)
for _name, _dtype in TO_INTEGERS.items():
    register(
        _name,
        unary,
        linear=((0,),),
        aliases=True,
        affine=lambda x, *args, _dtype=_dtype, **kwargs: rounds(x.dtype, _dtype),
    )
register("add sub subtract", pointwise, linear=((0, 1),), affine=_adds, adds=True)
register("rsub", pointwise, linear=((0, 1),), affine=_adds, adds=True)
register("complex", pointwise, linear=((0, 1),))
register("mul multiply", pointwise, linear=((0,), (1,)))
register("ldexp", pointwise, linear=((0,),))
register("xlogy xlog1py", pointwise, linear=((0,),))
register("div divide true_divide", pointwise, linear=((0,),), inverse=(1,), affine=_divides_to_integers)
register("lerp", pointwise, linear=((0, 1),))
register("addcmul", pointwise, linear=((0, 1), (0, 2)))
register("addcdiv", pointwise, linear=((0, 1),))
register("masked_fill", filled, linear=((0, 2),), affine=_adds_value)
rule(Tensor.__rsub__, linear=((0, 1),), affine=_adds, adds=True)(pointwise)
rule(Tensor.__rdiv__, Tensor.__rtruediv__, positive=((1,),), inverse=(0,))(pointwise)
rule(
    Tensor.__rpow__,
    Tensor.__rmod__,
    Tensor.__rfloordiv__,
    Tensor.__rlshift__,
    Tensor.__rrshift__,
)(pointwise)
rule(Tensor.detach_, torch.detach_, Tensor.requires_grad_, kind="pass")(None)
rule(getter("real"), getter("imag"), torch.real, torch.imag, linear=((0,),), aliases=True)(unary)
rule(Tensor.__deepcopy__, linear=((0,),))(unary)
rule(Tensor.zero_, torch.zero_, linear=((0,),), inplace=0)(unary)
# The old value is lost: linear in the new value, whatever the old one is, and in both.
rule(Tensor.copy_, linear=((0, 1), (1,)), inplace=0)(pointwise)
rule(Tensor.fill_, torch.fill_, linear=((0, 1), (1,)), affine=_adds_value, inplace=0)(pointwise)
rule(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, kind="scalar")(None)

rule(Tensor.where, linear=((0, 2),), affine=_adds_branch)(filled)
rule(torch.frexp, Tensor.frexp)(lambda input: same(input.shape, outs=2))


@rule(torch.where, linear=((1, 2),), affine=_adds_branch)
def where(*args: Any, **kwargs: Any) -> Spec:
    """Spec of a choice by element; of a condition alone, of positions: one vector of indices for each dim."""
    if len(args) + len(kwargs) > 1:
        return filled(*args, **kwargs)
    (condition,) = operands(args, kwargs)
    spec = along(condition.shape, None, "where(condition) gives positions in the shard")
    new = condition.dim()
    return spec._replace(outs=(((new,),),) * max(1, new), sizes={**spec.sizes, new: 0})


# --- casts that name their dtype ---


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the dtype that `.to(...)`, `.type(...)` or `.type_as(...)` names, or None."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, str) and value.startswith("torch."):
            return torch.empty(0).type(value).dtype
    return None


@rule(
    tensor_to,
    Tensor.type,
    Tensor.type_as,
    linear=((0,),),
    aliases=True,
    affine=lambda x, *args, **kwargs: rounds(x.dtype, _target(args, kwargs)),
)
def cast(x: Tensor, *args: Any, **kwargs: Any) -> Spec:
    """Spec of a cast: only dtype and device of another tensor operand are read. `x.type()` returns a name."""
    if not args and not kwargs:
        return Spec((None,), (), {})
    spec = same(x.shape)
    return spec._replace(ins=spec.ins + (None,) * (len(operands(args, kwargs))))


# --- with dims of their own ---


@rule(F.prelu, torch.prelu, Tensor.prelu)
def prelu(input: Tensor, weight: Tensor) -> Spec:
    """Spec of prelu: one slope for all elements, or one for each channel (dim 1)."""
    spec = same(input.shape)
    slopes = () if weight.numel() == 1 or input.dim() < 2 else (1,)
    return spec._replace(ins=(*spec.ins, (slopes,) * weight.dim()))


@rule(F.glu, native_nn.glu)
def glu(input: Tensor, dim: int = -1) -> Spec:
    """Spec of `a * sigmoid(b)` of two halves of a dim: a shard must hold both halves of its part."""
    ndim = input.dim()
    dim %= ndim
    out = labels(ndim)
    ins = (*out[:dim], (ndim, dim), *out[dim + 1 :])
    sizes = {**dict(enumerate(input.shape)), dim: input.shape[dim] // 2, ndim: 2}
    return Spec((ins,), (out,), sizes, {}, {ndim: "glu cuts it into two halves"}, frozenset((ndim,)))


# --- lists of tensors, item by item ---


def _foreach(function: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Returns the list form of `function`: lists are read item by item, other arguments go to all calls."""

    def of_lists(*args: Any, **kwargs: Any) -> list[Tensor]:
        args += tuple(kwargs.pop(name) for name in ("scalar", "scalars") if name in kwargs)
        count = next(len(value) for value in args if isinstance(value, (list, tuple)))

        def pick(value: Any, number: int) -> Any:
            return value[number] if isinstance(value, (list, tuple)) else value

        return [
            function(*[pick(value, number) for value in args], **{name: pick(kwargs[name], number) for name in kwargs})
            for number in range(count)
        ]

    return of_lists


def _addcmul(x: Tensor, one: Tensor, two: Tensor, value: Any = 1) -> Tensor:
    return torch.add(x, torch.mul(torch.mul(one, two), value))


def _addcdiv(x: Tensor, one: Tensor, two: Tensor, value: Any = 1) -> Tensor:
    return torch.add(x, torch.mul(torch.div(one, two), value))


# List forms that differ from the function of the same name.
_FOREACH = {
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: torch.sum(torch.pow(torch.abs(x), ord), dtype=dtype),
    "max": torch.amax,
    "maximum": torch.clamp_min,  # of tensors and of numbers
    "minimum": torch.clamp_max,
    "pow": lambda x, exponent: torch.pow(x, exponent),
    "zero": lambda x: torch.mul(x, 0),
    "copy": lambda x, source, non_blocking=False: torch.add(torch.mul(x, 0), source),
}


def _register_foreach() -> None:
    """Registers list forms: they decompose into calls for each item; in-place ones into the values that they write."""
    for form, name in foreach_functions.items():
        base = name.rstrip("_")
        function: Any = _FOREACH.get(base) or getattr(torch, base)
        inplace = 0 if name.endswith("_") else None
        shown = form.__name__ if form.__name__ != name else f"foreach.{name}"
        RULES[form] = Rule(shown, None, kind="decompose", decompose=_foreach(function), inplace=inplace)


_register_foreach()
