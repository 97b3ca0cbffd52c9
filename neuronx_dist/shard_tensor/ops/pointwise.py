"""Elementwise functions, with broadcasting, in place, and into `out=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...rules import RULES, Spec
from ...rules.pointwise import ELEMENTWISE
from ...rules.spec import elementwise
from ...torch_internals.tensors import foreach_functions, tensor_to
from ..fallback import into_plain
from ..handlers import FUNCTIONS, sharded
from ..labels import inside, rule_of
from ..moves.exchange import linked
from ..moves.redistribute import check_is_no_copy, redistributed
from ..partials import kept
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, gradient_spec, leave_leaf, local_of, wrap, written

__all__: list[str] = []


def aligned(*shapes: torch.Size | None) -> Spec:
    """Returns the spec of operands that are broadcast against one another; None for an absent operand."""
    return elementwise(*(shape for shape in shapes if shape is not None))


aligned.__name__ = "an elementwise function"  # in messages and reports


def _pointwise(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    parts = kept(func, args, kwargs)
    if parts is not None:
        return wrap(func(*parts[0], **kwargs), parts[1])
    locals_, keywords, spec = _operands(args, kwargs, None)
    return wrap(func(*locals_, **keywords), spec)


def check_writable(name: str, x: torch.Tensor) -> None:
    """Raises an error if the function of this name cannot modify `x` in place.

    Raises:
        ValueError: `x` is a plain tensor, or Partial.
        RuntimeError: it is a view that holds a copy.
    """
    if not isinstance(x, ShardTensor):
        raise ValueError(
            f"{name} would write a ShardTensor's values to a plain tensor of shape {tuple(x.shape)}: distribute the "
            "plain tensor first, or use the out-of-place form"
        )
    if x._spec.partial:
        raise ValueError(f"{name} in place on {x._spec.placements}: redistribute() the tensor to Replicate first")
    check_is_no_copy(name, x._local)


def _in_place(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, ShardTensor):
        return into_plain(func, func.__name__, args, kwargs)
    leave_leaf(x)
    parts = kept(func, args, kwargs) if x._spec.partial else None
    if parts is not None and parts[1] is x._spec:
        check_is_no_copy(func.__name__, x._local)
        func(*parts[0], **kwargs)
        return written(x)
    check_writable(func.__name__, x)
    locals_, keywords, _ = _operands(args, kwargs, x._spec)
    func(*locals_, **keywords)
    return written(x)


def _into(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func(..., out=out)`, and copies the result into `out` in the layout of `out`."""
    out = kwargs.pop("out")
    result = _pointwise(func, types, args, kwargs)
    if not isinstance(out, ShardTensor) or out.shape != result.shape:
        raise ValueError(
            f"{func.__name__}: out must be a ShardTensor of shape {tuple(result.shape)}, got a {type(out).__name__} of "
            f"{tuple(out.shape)}"
        )
    check_is_no_copy(func.__name__, out._local)
    out._local.copy_(redistributed(result._local, result._spec, out._spec))
    return out


def _operands(
    args: Any, kwargs: Any, result: ShardTensorSpec | None
) -> tuple[list[Any], dict[str, Any], ShardTensorSpec]:
    """Returns the arguments with local tensors, and the layout of the result."""
    positions = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    names = [name for name, x in kwargs.items() if isinstance(x, torch.Tensor)]
    tensors = [args[i] for i in positions] + [kwargs[name] for name in names]
    locals_, spec = inside(aligned, tensors, result=result)
    if spec.mesh.communicators is None:  # of an empty part the operands behind its first dim are broadcast to it
        locals_ = [x if x.dim() == len(spec.shape) else linked(x.new_ones([1] * x.dim()), x) for x in locals_]
    arguments, keywords = list(args), dict(kwargs)
    for i, local in zip(positions, locals_):
        arguments[i] = local
    for name, local in zip(names, locals_[len(positions) :]):
        keywords[name] = local
    return arguments, keywords, spec


def pointwise(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    # Fast paths without a scan of the arguments: one tensor, a tensor and a number, two tensors of one layout.
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
    if kwargs.get("out") is not None:
        return _into(func, types, args, kwargs)
    if kwargs.get("inplace"):
        return _in_place(func, types, args, kwargs)
    return _pointwise(func, types, args, kwargs)


@sharded(torch.Tensor.type)
def converted(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Converts a tensor; returns the tensor itself, as torch does, if nothing is to be converted."""
    result = pointwise(func, types, args, kwargs)
    x = args[0] if args else None
    return x if type(x) is ShardTensor and result._local is x._local and result._spec is x._spec else result


@sharded(torch.Tensor.contiguous)
def contiguous(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Returns `x` itself if its memory is contiguous, else a copy, on all ranks equally.

    Strides of a dim with one position on this rank, and more on others, count too, which torch ignores.
    """
    x = args[0]
    stride, shape = 1, x._spec.shape
    for size, actual, global_size in reversed([*zip(x._local.shape, x._local.stride(), shape)]):
        if global_size != 1 and actual != stride and not args[1:] and not kwargs:
            return torch.clone(x, memory_format=torch.contiguous_format)
        stride *= max(size, 1)
    return converted(func, types, args, kwargs)


@sharded(tensor_to, torch.Tensor.type_as)
def cast(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Casts a tensor; only the dtype and the device of another tensor are used."""
    x, *options = args
    keywords = dict(kwargs)
    other = options[0] if options else keywords.pop("tensor", keywords.pop("other", None))
    if not isinstance(other, torch.Tensor):
        return converted(func, types, args, kwargs)
    target = (x, other.device, other.dtype, *options[1:])
    if isinstance(x, ShardTensor):
        return converted(tensor_to, types, target, keywords)
    return tensor_to(*target, **keywords)


@sharded(torch.where, torch.Tensor.where)
def where(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Chooses by element; `where(condition)` alone returns positions, whose number depends on values."""
    if len(args) + len(kwargs) == 1:
        return torch.nonzero(*args, *kwargs.values(), as_tuple=True)
    return pointwise(func, types, args, kwargs)


@sharded(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
def filled_like(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args
    return wrap(func(x._local, *others, **kwargs), gradient_spec(x._spec))


@sharded(F.prelu, torch.prelu, torch.Tensor.prelu)
def _prelu(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(input: Any, weight: Any) -> Any:
        if weight.numel() != 1 and (input.dim() < 2 or weight.shape != input.shape[1:2]):
            raise ValueError(
                f"prelu: weight has shape {tuple(weight.shape)} and the input {tuple(input.shape)}: weight must "
                "have one value, or one for each channel (dim 1)"
            )
        (x, weight), spec = inside(rule_of(torch.prelu), (input, weight))
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


# The functions of lists that are not elementwise, as functions of the items.
_BY_ITEM: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "max": torch.max,
    "mm": torch.mm,
    "powsum": lambda x, ord=2, dtype=None: torch.sum(torch.pow(torch.abs(x), ord), dtype=dtype),
}


@sharded(*foreach_functions)
def foreach(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """Computes functions of lists item by item, each with the items at its place in the other lists."""
    by_item = _BY_ITEM.get(foreach_functions[func])
    if by_item is not None:
        other_lists = [x for x in args[1:] if isinstance(x, (list, tuple))]
        scalars = [x for x in args[1:] if not isinstance(x, (list, tuple))]
        return tuple(by_item(*items, *scalars, **kwargs) for items in zip(args[0], *other_lists, strict=True))
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
        next(replaced) if any(x is listed for listed in lists) else x.full_tensor() if isinstance(x, ShardTensor) else x
        for x in args
    ]
    results = func(*arguments, **kwargs)
    if writes or results is None:
        for column in columns:
            if isinstance(column[0], ShardTensor):
                written(column[0])
        return args[0] if results is not None else None
    return tuple(value if spec is None else wrap(value, spec) for value, spec in zip(results, specs))


# All functions that are elementwise by their rules.
for _function, _rule in RULES.items():
    if _rule.spec in ELEMENTWISE and _rule.kind == "op" and _function not in FUNCTIONS:
        sharded(_function)(_in_place if _rule.inplace == 0 else converted if _rule.aliases else pointwise)
