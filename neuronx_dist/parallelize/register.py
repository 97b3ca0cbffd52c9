"""Functions without a typing rule get one from an annotation: `register_op`.

    @register_op("m k+, n k+ -> m n")
    def fused_matmul(x, w): ...

The rule is the checker's (`RULES`), so that one registration serves it and `parallelize`. A registered function is one
call to whoever records or checks, whatever it does inside.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..checking.types.rules.spec import RULES, Spec, operands, rule
from .annotation import Annotation, AnnotationError
from .congruence import tensors_of

__all__ = ["register_op", "registrations"]

AnnotationLike = str | Callable[..., str]
Example = tuple[Sequence[Any], Mapping[str, Any]]


def register_op(
    annotation: AnnotationLike,
    name: str | None = None,
    *,
    example: Callable[[], Example] | None = None,
    linear: Sequence[int] | None = None,
    random: bool = False,
) -> Callable[[Any], Any]:
    """Decorator that says what a function, or a `torch.autograd.Function`, does to dims, in `annotation.py`'s notation.

    The function's module gets what it returns in its place, so that existing functions can be registered too, before
    others import them by name. A Function is called by `apply` as before.

    It is verified on examples: split along each dim that may be split, the pieces make up the whole; and in which
    operands it is linear is measured.

    Args:
        annotation: or a function of the call's arguments that returns one.
        name: for messages and `select`; None: the function's.
        example: makes arguments `(args, kwargs)` to verify with; None: of the annotation, where it is a text and other
            arguments have defaults.
        linear: numbers of the operands in each of which the function is linear; None: measured on the example.
        random: it draws random numbers; then it is not verified.

    Raises:
        AnnotationError: the annotation cannot be read, or pieces make up something else.
    """
    read = Annotation.read(annotation) if isinstance(annotation, str) else annotation

    def register(target: Any) -> Any:
        is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
        inner = target.apply if is_function else target
        signature = inspect.signature(target.forward if is_function else target)
        if is_function and "ctx" in list(signature.parameters)[:1]:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        op = _Operator(inner, signature, read, name or target.__name__)
        arguments = None if random else _example_of(op, example)
        if arguments is not None:
            _verify(op, *arguments)
        groups = tuple((i,) for i in (_measured(op, *arguments) if arguments else ())) if linear is None else None
        called = _as_one_call(target, inner)
        linear_in = groups if groups is not None else tuple((index,) for index in linear or ())
        rule(called, name=op.name, linear=linear_in, random=lambda *args, **kwargs: random)(op.spec)
        if is_function:
            target.apply = staticmethod(called)
            return target
        module = sys.modules.get(getattr(target, "__module__", ""))
        own_name = getattr(target, "__name__", "")
        if module is not None and vars(module).get(own_name) is target:
            setattr(module, own_name, called)
        return called

    return register


def registrations() -> dict[str, tuple[Any, ...]]:
    """What is registered, by the functions' full names: annotation, groups of linear operands, randomness."""
    found = {}
    for function, known in RULES.items():
        op = getattr(known.spec, "__self__", None)
        if isinstance(op, _Operator):
            annotation = op.rule.text if isinstance(op.rule, Annotation) else op.rule
            random = known.random() if callable(known.random) else known.random
            found[f"{function.__module__}.{function.__qualname__}"] = (annotation, known.linear, random)
    return found


class _Operator:
    """A function with its annotation."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        annotation: Annotation | Callable[..., str],
        name: str,
    ) -> None:
        self.function, self.signature, self.name = function, signature, name
        self.rule = annotation

    def annotation(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Annotation:
        if isinstance(self.rule, Annotation):
            return self.rule
        return Annotation.read(self.rule(*args, **kwargs))

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter, in order, defaults too."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def spec(self, *args: Any, **kwargs: Any) -> Spec:
        """The label spec of a call: what the rule builds."""
        annotation, bound = self.annotation(args, kwargs), self.bound(args, kwargs)
        shapes = [tuple(value.shape) if _is_tensor(value) else None for value in bound.values()]
        dims, spec = annotation.spec(shapes, bound, self.name)
        by_name = dict(zip(bound, dims))
        return spec._replace(ins=tuple(by_name[name] for name in self.operand_names(args, kwargs)))

    def operand_names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The parameters that tensors are given for, in the order of the rules' operands."""
        named = [_Slot(name) if _is_tensor(value) else value for name, value in zip(self.signature.parameters, args)]
        slots = {name: _Slot(name) if _is_tensor(value) else value for name, value in kwargs.items()}
        return [slot.name for slot in operands(named, slots, _Slot)]


class _Slot(NamedTuple):
    """Stands for the tensor that is given for a parameter."""

    name: str


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _as_one_call(target: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which modes and tensor subclasses receive as one call."""

    @functools.wraps(getattr(target, "forward", target))
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(operands(args, kwargs))
        if has_torch_function(tensors or (None,)):
            return handle_torch_function(called, tensors, *args, **kwargs)
        return inner(*args, **kwargs)

    if isinstance(target, type):
        called.__name__ = called.__qualname__ = f"{target.__qualname__}.apply"
    return called


# --- is it so? --------------------------------------------------------------------------------------------------------


def _example_of(op: _Operator, example: Callable[[], Example] | None) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments to verify with; None: there are none, which a warning says."""
    if example is not None:
        args, kwargs = example()
        return list(args), dict(kwargs)
    reason = "its annotation is a function"
    if isinstance(op.rule, Annotation):
        made = _made(op, op.rule)
        try:
            if isinstance(made, list):
                with torch.no_grad():
                    op.function(*made)
                return made, {}
            reason = made
        except Exception as error:
            reason = f"it raises {type(error).__name__} on {_shapes(made)}: {error}"
    warnings.warn(
        f"register_op: {op.name} is not verified, because {reason}; pass example=lambda: (args, kwargs)", stacklevel=4
    )
    return None


def _made(op: _Operator, annotation: Annotation) -> list[Any] | str:
    """Arguments for an annotation; or why there are none."""
    generator = torch.Generator().manual_seed(0)
    names = sorted({name for term in annotation.inputs for factors in term or () for name in factors if name != "*"})
    parameters = list(op.signature.parameters.values())
    if len(parameters) < len(annotation.inputs):
        raise AnnotationError(
            f"register_op: {op.name} has {len(parameters)} parameters, and annotation {annotation.text!r} "
            f"{len(annotation.inputs)} inputs"
        )
    sizes = {name: int(name) if name.isdigit() else 4 + 2 * (index % 3) for index, name in enumerate(names)}
    args: list[Any] = []
    for index, parameter in enumerate(parameters):
        term = annotation.inputs[index] if index < len(annotation.inputs) else None
        if term is not None:
            shape: list[int] = []
            for factors in term:
                shape += [2, 4] if factors == ("*",) else [math.prod(sizes[name] for name in factors)]
            args.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        elif parameter.name in sizes:
            args.append(sizes[parameter.name])
        elif parameter.default is not parameter.empty:
            args.append(parameter.default)
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            return f"its argument {parameter.name} has no default"
    return args


def _verify(op: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs the function on halves along each label that may be split, and compares with the whole.

    Raises:
        AnnotationError: they make up something else.
    """
    annotation, bound = op.annotation(args, kwargs), op.bound(args, kwargs)
    spec = op.spec(*args, **kwargs)
    dims_of = dict(zip(op.operand_names(args, kwargs), spec.ins))
    with torch.no_grad():
        whole = tensors_of(op.function(*args, **kwargs))
        if [tuple(result.shape) for result in whole] != [_shape(dims, spec.sizes) for dims in spec.outs]:
            raise AnnotationError(
                f"register_op: {op.name} gives {_shapes(whole)}, and annotation {annotation.text!r} says "
                f"{[list(_shape(dims, spec.sizes)) for dims in spec.outs]}"
            )
        names = list(annotation.sizes([tuple(v.shape) if _is_tensor(v) else None for v in bound.values()], bound)[0])
        for label, size in spec.sizes.items():
            if label in spec.fixed or size % 2 or label >= len(names):
                continue
            halves = []
            for half in range(2):
                local = {
                    name: value if dims_of.get(name) is None else _half(value, dims_of[name], label, spec.sizes, half)
                    for name, value in bound.items()
                }
                if isinstance(local.get(names[label]), int):
                    local[names[label]] = size // 2
                halves.append(_call(op, local, names[label]))
            _compare(op, annotation, names[label], label, spec, whole, halves)


def _call(op: _Operator, arguments: dict[str, Any], label: str) -> list[torch.Tensor]:
    bound = op.signature.bind_partial()
    bound.arguments.update(arguments)
    try:
        return tensors_of(op.function(*bound.args, **bound.kwargs))
    except Exception as error:
        raise AnnotationError(
            f"register_op: {op.name} raises {type(error).__name__} on a half of {label} ({error}): if it cannot be "
            f"split there, write {label}^"
        ) from error


def _compare(
    op: _Operator,
    annotation: Annotation,
    name: str,
    label: int,
    spec: Spec,
    whole: Sequence[torch.Tensor],
    halves: Sequence[Sequence[torch.Tensor]],
) -> None:
    for index, (dims, result) in enumerate(zip(spec.outs, whole)):
        if any(label in factors for factors in dims):
            expected = [_half(result, dims, label, spec.sizes, half) for half in range(2)]
            found = [half[index] for half in halves]
        elif label in spec.reduced:
            expected, found = [result], [halves[0][index] + halves[1][index]]
        else:
            expected, found = [result, result], [half[index] for half in halves]
        for a, b in zip(found, expected):
            if a.shape != b.shape or not torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-6, equal_nan=True):
                difference = "another shape" if a.shape != b.shape else f"off by {float((a - b).abs().max()):.2g}"
                raise AnnotationError(
                    f"register_op: {op.name} is annotated {annotation.text!r}, but split in two along {name} its "
                    f"pieces do not make up result {index} ({difference}): write {name}^ if it cannot be split there"
                    + (f", {name}+ if the pieces add up" if label not in spec.reduced else "")
                )


def _measured(op: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The operands in which the function is linear, as far as an example shows."""
    bound = op.bound(args, kwargs)
    linear = []

    def value(name: str, replacement: torch.Tensor) -> list[torch.Tensor]:
        return _call(op, {**bound, name: replacement}, "an operand")

    with torch.no_grad():
        for index, name in enumerate(op.operand_names(args, kwargs)):
            x = bound[name]
            if not x.is_floating_point():
                continue
            other = torch.randn(x.shape, generator=torch.Generator().manual_seed(index + 1)).to(x)
            sums = value(name, 2 * x - 3 * other)
            parts = zip(value(name, x), value(name, other))
            if all(torch.allclose(a, 2 * b - 3 * c, rtol=1e-6, atol=1e-6) for a, (b, c) in zip(sums, parts)):
                linear.append(index)
    return linear


def _half(x: torch.Tensor, dims: Any, label: int, sizes: Mapping[int, int], half: int) -> torch.Tensor:
    for dim, factors in enumerate(dims):
        if label in factors:
            blocks = x.unflatten(dim, [sizes[factor] for factor in factors])
            return blocks.chunk(2, dim + factors.index(label))[half].flatten(dim, dim + len(factors) - 1).contiguous()
    return x


def _shape(dims: Any, sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[factor] for factor in factors) for factors in dims)


def _shapes(tensors: Any) -> list[list[int]]:
    return [list(x.shape) for x in tensors if isinstance(x, torch.Tensor)]
