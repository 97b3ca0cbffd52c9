"""Functions that compute each element by itself, with broadcasting, in place, and into `out=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import FUNCTIONS, UNHANDLED, sharded
from ..labels import Labels, inside
from ..redistribute import redistributed
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, gradient_spec, local_of, wrap, written
from ..written_back import copy_of
from .deferred import Deferred, mapped

__all__: list[str] = []


def aligned(*shapes: torch.Size | None) -> Labels:
    """The labels of operands that are broadcast against one another: dims counted from the end."""
    ndim = max(len(shape) for shape in shapes if shape is not None)
    out = tuple(range(-ndim, 0))
    whole = torch.broadcast_shapes(*(shape for shape in shapes if shape is not None))
    operands = []
    for shape in shapes:
        own = () if shape is None else tuple(shape)
        first = ndim - len(own)
        operands.append([out[first + i] if size == whole[first + i] else None for i, size in enumerate(own)])
    return Labels(operands, out)


def _pointwise(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    locals_, keywords, spec = _operands(args, kwargs, None)
    return wrap(func(*locals_, **keywords), spec)


def check_writable(name: str, x: torch.Tensor) -> None:
    """Raises a ValueError for a tensor that the function of this name cannot modify in place."""
    if not isinstance(x, ShardTensor):
        raise ValueError(
            f"{name} would write a ShardTensor's values into a plain tensor of shape {tuple(x.shape)}: "
            "distribute it first, or use the form that returns a tensor"
        )
    if x._spec.partial:
        raise ValueError(f"{name} in place on {x._spec.placements}: redistribute() the tensor to Replicate first")


def _in_place(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    check_writable(func.__name__, x)
    locals_, keywords, _ = _operands(args, kwargs, x._spec)
    copy = copy_of(x._local)
    func(*locals_, **keywords)
    if copy is not None:
        copy.write_back()
    return written(x)


def _into(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """`func(..., out=out)`: computed, and copied into `out` in its own layout."""
    out = kwargs.pop("out")
    result = _pointwise(func, types, args, kwargs)
    if not isinstance(out, ShardTensor) or out.shape != result.shape:
        raise ValueError(
            f"{func.__name__}: out must be a ShardTensor of shape {tuple(result.shape)}, got a {type(out).__name__} of "
            f"{tuple(out.shape)}"
        )
    copy = copy_of(out._local)
    out._local.copy_(redistributed(result._local, result._spec, out._spec))
    if copy is not None:
        copy.write_back()
    return out


def _operands(
    args: Any, kwargs: Any, result: ShardTensorSpec | None
) -> tuple[list[Any], dict[str, Any], ShardTensorSpec]:
    """Arguments with local tensors in place of all tensors, and the layout of the result."""
    positions = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    names = [name for name, x in kwargs.items() if isinstance(x, torch.Tensor)]
    tensors = [args[i] for i in positions] + [kwargs[name] for name in names]
    locals_, spec = inside(aligned, tensors, result=result)
    arguments, keywords = list(args), dict(kwargs)
    for i, local in zip(positions, locals_):
        arguments[i] = local
    for name, local in zip(names, locals_[len(positions) :]):
        keywords[name] = local
    return arguments, keywords, spec


def pointwise(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    # The usual calls, without a look at all arguments: of one tensor, with a number, of two tensors of one layout.
    if not kwargs and type(x) is ShardTensor and not (spec := x._spec).partial:
        if len(args) == 1:
            return wrap(func(local_of(x) if x._foreign else x._local), spec)
        if len(args) == 2:
            y = args[1]
            if type(y) is ShardTensor:
                if y._spec is spec:
                    local = local_of(x) if x._foreign else x._local
                    return wrap(func(local, local_of(y) if y._foreign else y._local), spec)
            elif not isinstance(y, torch.Tensor):
                return wrap(func(local_of(x) if x._foreign else x._local, y), spec)
    if isinstance(x, Deferred) and func in _KEEPING and not kwargs.get("inplace"):
        numbers = all(isinstance(each, (int, float)) for each in (*args[1:], *kwargs.values()))
        result = mapped(x, lambda local: func(local, *args[1:], **kwargs)) if numbers else None
        if result is not None:
            return result
    if kwargs.get("out") is not None:
        return _into(func, types, args, kwargs)
    if kwargs.get("inplace"):
        return _in_place(func, types, args, kwargs)
    return _pointwise(func, types, args, kwargs)


_NAMES = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max
clamp_min clip conj conj_physical copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 igamma igammac imag
isclose isfinite isinf isnan isneginf isposinf isreal ldexp le lerp less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply
mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma pow rad2deg reciprocal relu
remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh special_entr sqrt square sub
subtract tan tanh threshold true_divide trunc xlogy clone complex celu selu elu hardshrink
""".split()
_SPECIAL = (
    "digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc gammaln i0 i0e i1 i1e log1p log_ndtr logit \
multigammaln ndtr ndtri polygamma psi round sinc xlog1py xlogy zeta".split()
)
_ACTIVATIONS = """
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu
softplus softshrink softsign tanh tanhshrink threshold
""".split()
_METHODS = """
__abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lshift__ __lt__ __mod__ __mul__
__ne__ __neg__ __or__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__
__rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
""".split()
_IN_PLACE = (
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__ __isub__ \
__itruediv__ __ixor__ copy_ fill_ zero_".split()
)


def _existing(holder: Any, names: list[str]) -> list[Any]:
    functions = [getattr(holder, name) for name in names if hasattr(holder, name)]
    return [each if callable(each) else each.__get__ for each in functions]


_POINTWISE = [
    *_existing(torch, _NAMES),
    *_existing(torch.Tensor, _NAMES + _METHODS),
    *_existing(F, _ACTIVATIONS),
    *_existing(torch.special, _SPECIAL),
    *_existing(torch._C._nn, _ACTIVATIONS),
]
# Of a floating point tensor, and of numbers: the result has its dtype.
_CALCULATIONS = "abs add clamp cos div erf exp log mul neg pow sigmoid sin sqrt square sub tanh relu".split()
_KEEPING = {
    *_existing(torch, _CALCULATIONS),
    *_existing(
        torch.Tensor, [*_CALCULATIONS, *"__add__ __mul__ __radd__ __rmul__ __rsub__ __sub__ __truediv__".split()]
    ),
    *_existing(F, _ACTIVATIONS),
    *_existing(torch._C._nn, _ACTIVATIONS),
}
_WRITING = [
    *_existing(torch.Tensor, [f"{name}_" for name in _NAMES] + _IN_PLACE),
    *_existing(torch, [f"{name}_" for name in [*_NAMES, "fill", "zero"]]),
    *_existing(F, [f"{name}_" for name in _ACTIVATIONS]),
]
sharded(*_POINTWISE)(pointwise)
sharded(*_WRITING)(_in_place)


_SELECTING = "positive real resolve_conj resolve_neg".split()
_CONVERTING = "bfloat16 bool byte char contiguous cpu cuda double float half int long short type __pos__".split()


@sharded(*_existing(torch.Tensor, _SELECTING + _CONVERTING), *_existing(torch, _SELECTING))
def converted(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """The tensor itself, as in torch, where nothing is to be converted: what is written into one is in both."""
    result = pointwise(func, types, args, kwargs)
    x = args[0] if args else None
    return x if type(x) is ShardTensor and result._local is x._local and result._spec is x._spec else result


@sharded(torch.Tensor.to, torch.Tensor.type_as)
def cast(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Of another tensor the dtype and the device alone are taken."""
    x, *options = args
    keywords = dict(kwargs)
    other = options[0] if options else keywords.pop("tensor", keywords.pop("other", None))
    if not isinstance(other, torch.Tensor):
        return converted(func, types, args, kwargs)
    target = (x, other.device, other.dtype, *options[1:])
    if isinstance(x, ShardTensor):
        return converted(torch.Tensor.to, types, target, keywords)
    return torch.Tensor.to(*target, **keywords)


@sharded(torch.where, torch.Tensor.where)
def where(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """`torch.where(condition)` alone gives positions, as many as there are."""
    handler = FUNCTIONS[UNHANDLED] if len(args) + len(kwargs) == 1 else pointwise
    return handler(func, types, args, kwargs)


@sharded(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
def filled_like(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args
    return wrap(func(x._local, *others, **kwargs), gradient_spec(x._spec))


def prelu(x: torch.Size, weight: torch.Size) -> Labels:
    """`weight` has one value, or one for each channel, dim 1 of `x`."""
    names = tuple(range(len(x)))
    own = (None if weight.numel() == 1 else 1,) * len(weight)
    return Labels([names, own], names)


@sharded(F.prelu, torch.prelu, torch.Tensor.prelu)
def _prelu(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, weight: Any) -> Any:
        if weight.numel() != 1 and (input.dim() < 2 or weight.shape != input.shape[1:2]):
            raise ValueError(
                f"prelu: weight has shape {tuple(weight.shape)}, and the input {tuple(input.shape)}: it must have one "
                "value, or one for each channel (dim 1)"
            )
        (x, weight), spec = inside(prelu, (input, weight))
        return wrap(torch.prelu(x, weight), spec)

    return call(*args, **kwargs)


@sharded(torch.frexp, torch.Tensor.frexp)
def frexp(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    (x,), spec = inside(aligned, args[:1])
    mantissa, exponent = torch.frexp(x)
    return torch.return_types.frexp((wrap(mantissa, spec), wrap(exponent, spec)))


@sharded(torch.Tensor.detach, torch.detach)
def detach(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return wrap(args[0]._local.detach(), args[0]._spec)


_REDUCING: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: torch.linalg.vector_norm,
    torch._foreach_max: torch.max,
}
_FOREACH = [getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")]


@sharded(*_FOREACH)
def foreach(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Lists of tensors, each of which is computed with the others at its place in operands of one layout."""
    if func in _REDUCING:
        return tuple(_REDUCING[func](x, *args[1:], **kwargs) for x in args[0])
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
    columns = list(zip(*lists))
    specs: list[ShardTensorSpec | None] = []
    locals_: list[list[Any]] = [[] for _ in lists]
    writes = func.__name__.endswith("_")
    for column in columns:
        if not any(isinstance(x, ShardTensor) for x in column):
            specs.append(None)
            values: list[Any] = list(column)
        else:
            if writes:
                check_writable(func.__name__, column[0])
            values, spec = inside(aligned, column, result=column[0]._spec if writes else None)
            specs.append(spec)
        for row, value in zip(locals_, values):
            row.append(value)
    replaced = iter(locals_)
    arguments = [
        next(replaced) if any(x is each for each in lists) else x.full_tensor() if isinstance(x, ShardTensor) else x
        for x in args
    ]
    copies = [copy_of(x) for x in locals_[0]] if writes and any(spec is not None for spec in specs) else []
    results = func(*arguments, **kwargs)
    for copy in copies:
        if copy is not None:
            copy.write_back()
    if writes or results is None:
        for column in columns:
            if isinstance(column[0], ShardTensor):
                written(column[0])
        return results
    return tuple(value if spec is None else wrap(value, spec) for value, spec in zip(results, specs))
