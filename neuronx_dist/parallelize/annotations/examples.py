"""Verification of annotations on examples: the results of halves must make up the result of the whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...rules.local_call import tensors_of
from ...rules.spec import Spec
from ...torch_internals.tensors import version_of
from .annotation import Annotation, AnnotationError
from .registered import Operator, is_tensor

__all__ = ["Example", "example_of", "linear_operands", "verify"]

Example = tuple[Sequence[Any], Mapping[str, Any]]


def example_of(op: Operator, example: Callable[[], Example] | None) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns arguments to verify with; None, with a warning, if there are none."""
    if example is not None:
        args, kwargs = example()
        return list(args), dict(kwargs)
    reason = "its annotation is a function"
    if isinstance(op.rule, Annotation):
        arguments = _example_arguments(op, op.rule)
        try:
            if isinstance(arguments, list):
                with torch.no_grad():
                    op.function(*arguments)
                return arguments, {}
            reason = arguments
        except Exception as error:
            reason = f"it raises {type(error).__name__} on {_shapes(arguments)}: {error}"
    warnings.warn(
        f"register_op: {op.name} is not verified, because {reason}; pass example=lambda: (args, kwargs)", stacklevel=4
    )
    return None


def _example_arguments(op: Operator, annotation: Annotation) -> list[Any] | str:
    """Returns arguments for an annotation, or the reason why there are none."""
    generator = torch.Generator().manual_seed(0)
    names = sorted({name for term in annotation.inputs for factors in term or () for name in factors if name != "*"})
    parameters = list(op.signature.parameters.values())
    if len(parameters) < len(annotation.inputs):
        raise AnnotationError(
            f"register_op: {op.name} has {len(parameters)} parameters, but annotation {annotation.text!r} has "
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


def verify(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs the function and its backward on halves along each label that may be split, and compares with the whole.

    Raises:
        AnnotationError: the halves do not make up the whole.
    """
    annotation, bound = op.annotation(args, kwargs), op.bound(args, kwargs)
    spec = op.spec(*args, **kwargs)
    dims_of = dict(zip(op.operand_names(args, kwargs), spec.ins))
    tensors = {name: value for name, value in bound.items() if is_tensor(value)}
    versions = {name: version_of(value) for name, value in tensors.items()}
    with torch.no_grad():
        whole = tensors_of(op.function(*args, **kwargs))
        written = [name for name, value in tensors.items() if version_of(value) != versions[name]]
        if written and any(label not in spec.fixed for label in spec.sizes):
            raise AnnotationError(
                f"register_op: {op.name} writes to its argument {written[0]}: return a new tensor, as x + y in place "
                "of x.add_(y)"
            )
        if [tuple(result.shape) for result in whole] != [_shape(dims, spec.sizes) for dims in spec.outs]:
            raise AnnotationError(
                f"register_op: {op.name} returns shapes {_shapes(whole)}, but annotation {annotation.text!r} expects "
                f"{[list(_shape(dims, spec.sizes)) for dims in spec.outs]}"
            )
    backward = _Backward(op, bound, dims_of, spec, whole)
    names = list(annotation.sizes([tuple(v.shape) if is_tensor(v) else None for v in bound.values()], bound)[0])
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
            halves.append(local)
        with torch.no_grad():
            results = [_call(op, local, names[label]) for local in halves]
        _compare(op, annotation, names[label], label, spec, whole, results)
        backward.compare(annotation, names[label], label, halves)


def _call(op: Operator, arguments: dict[str, Any], label: str) -> list[torch.Tensor]:
    bound = op.signature.bind_partial()
    bound.arguments.update(arguments)
    try:
        return tensors_of(op.function(*bound.args, **bound.kwargs))
    except Exception as error:
        raise AnnotationError(
            f"register_op: {op.name} raises {type(error).__name__} on a half of {label} ({error}): if the function "
            f"cannot be split along {label}, write {label}^"
        ) from error


def _compare(
    op: Operator,
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
            computed = [half[index] for half in halves]
        elif label in spec.reduced:
            expected, computed = [result], [halves[0][index] + halves[1][index]]
        else:
            expected, computed = [result, result], [half[index] for half in halves]
        for a, b in zip(computed, expected):
            if a.shape != b.shape or not torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-6, equal_nan=True):
                difference = "another shape" if a.shape != b.shape else f"off by {float((a - b).abs().max()):.2g}"
                raise AnnotationError(
                    f"register_op: {op.name} is annotated {annotation.text!r}, but the results of two halves along "
                    f"{name} do not combine to result {index} ({difference}): write {name}^ if it cannot be split there"
                    + (f", {name}+ if the pieces add up" if label not in spec.reduced else "")
                )


class _Backward:
    """Backward of a function on the whole example: operand gradients from random result gradients."""

    def __init__(
        self,
        op: Operator,
        arguments: Mapping[str, Any],
        dims_of: Mapping[str, Any],
        spec: Spec,
        results: Sequence[torch.Tensor],
    ) -> None:
        self.op, self.dims_of, self.spec = op, dims_of, spec
        generator = torch.Generator().manual_seed(len(arguments))
        self.given = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]
        self.gradients: dict[str, torch.Tensor] = {}
        try:
            self.gradients = self._run(arguments, self.given)
        except Exception as error:
            warnings.warn(
                f"register_op: backward of {op.name} is not verified, because it raises {type(error).__name__}: "
                f"{error}",
                stacklevel=5,
            )

    def compare(self, annotation: Annotation, name: str, label: int, halves: Sequence[Mapping[str, Any]]) -> None:
        """Checks that halves of an operand get halves of its gradient, and whole operands parts of a sum.

        Raises:
            AnnotationError: the gradients differ.
        """
        if not self.gradients:
            return
        parts = []
        for half, arguments in enumerate(halves):
            given = [self._part(g, dims, label, half) for g, dims in zip(self.given, self.spec.outs)]
            try:
                parts.append(self._run(arguments, given))
            except Exception as error:
                raise AnnotationError(
                    f"register_op: backward of {self.op.name} raises {type(error).__name__} on a half of {name} "
                    f"({error}): if the function cannot be split along {name}, write {name}^"
                ) from error
        for operand, whole in self.gradients.items():
            dims = self.dims_of.get(operand) or ()
            expected, computed = [whole], [parts[0][operand] + parts[1][operand]]
            if any(label in factors for factors in dims):
                expected = [_half(whole, dims, label, self.spec.sizes, half) for half in range(2)]
                computed = [part[operand] for part in parts]
            for a, b in zip(computed, expected):
                if not torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
                    raise AnnotationError(
                        f"register_op: {self.op.name} is annotated {annotation.text!r}, but the gradients of two "
                        f"halves along {name} do not combine to the gradient of {operand} (off by "
                        f"{float((a - b).abs().max()):.2g}): correct its backward, or write {name}^ if it cannot be "
                        "split there"
                    )

    def _part(self, gradient: torch.Tensor, dims: Any, label: int, half: int) -> torch.Tensor:
        """Returns a half's part of a result's gradient: half of its value if both halves have the result."""
        if any(label in factors for factors in dims):
            return _half(gradient, dims, label, self.spec.sizes, half)
        return gradient if label in self.spec.reduced else gradient / 2

    def _run(self, arguments: Mapping[str, Any], given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the operands' gradients; none if no result requires one."""
        leaves = {
            name: value.detach().clone().requires_grad_()
            for name, value in arguments.items()
            if is_tensor(value) and value.is_floating_point()
        }
        with torch.enable_grad():
            bound = self.op.signature.bind_partial()
            bound.arguments.update(arguments)
            bound.arguments.update({name: leaf.clone() for name, leaf in leaves.items()})  # it may write
            results = tensors_of(self.op.function(*bound.args, **bound.kwargs))
        trained = [index for index, result in enumerate(results) if result.requires_grad]
        if not trained:
            return {}
        outputs = [results[index] for index in trained]
        weights = [given[index].to(results[index]) for index in trained]
        return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), weights, materialize_grads=True)))


def linear_operands(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Returns the operands in which the function is linear on an example."""
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
