"""Annotated functions and the label specs of their calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...rules.local_call import tensors_of
from ...rules.spec import Spec, operands
from ...torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from ...torch_internals.operators import disable_current_modes
from .annotation import Annotation

__all__ = ["Operator", "is_tensor"]


class Operator:
    """Function with its annotation."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        annotation: Annotation | Callable[..., str],
        name: str,
    ) -> None:
        self.function, self.signature, self.name = function, signature, name
        self.rule = annotation
        self.example: tuple[Sequence[Any], Mapping[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's results; if it needs values that a check does not have, only shapes and dtypes."""
        try:
            return self.function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            given = [self.bound(args, kwargs)[name] for name in self.operand_names(args, kwargs)]
            spec = self.spec(*args, **kwargs)
            shapes = [[math.prod(spec.sizes[label] for label in factors) for factors in dims] for dims in spec.outs]
            results = _WithoutValues.apply(shapes, self._dtypes(given, len(shapes)), *given)
            return results if len(results) > 1 else results[0]

    def _dtypes(self, given: Sequence[torch.Tensor], count: int) -> list[torch.dtype]:
        """Dtypes of the results for operands of these dtypes, from the example; without one, the first operand's."""
        if self.example is None:
            return [next((x.dtype for x in given if x.is_floating_point()), given[0].dtype)] * count
        args, kwargs = self.example
        names, call = self.operand_names(args, kwargs), self.signature.bind_partial()
        call.arguments.update(self.bound(args, kwargs))
        with disable_current_modes(), torch.no_grad():
            call.arguments.update({name: call.arguments[name].to(x.dtype) for name, x in zip(names, given)})
            return [result.dtype for result in tensors_of(self.function(*call.args, **call.kwargs))]

    def annotation(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Annotation:
        if isinstance(self.rule, Annotation):
            return self.rule
        return Annotation.read(self.rule(*args, **kwargs))

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments by parameter, in order, with defaults."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def spec(self, *args: Any, **kwargs: Any) -> Spec:
        """Returns the label spec of a call: the rule's builder."""
        annotation, bound = self.annotation(args, kwargs), self.bound(args, kwargs)
        shapes = [tuple(value.shape) if is_tensor(value) else None for value in bound.values()]
        dims, spec = annotation.spec(shapes, bound, self.name)
        by_name = dict(zip(bound, dims))
        return spec._replace(ins=tuple(by_name[name] for name in self.operand_names(args, kwargs)))

    def operand_names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Returns the names of tensor parameters, in the order of the rules' operands."""
        named = [
            _TensorParameter(name) if is_tensor(value) else value
            for name, value in zip(self.signature.parameters, args)
        ]
        slots = {name: _TensorParameter(name) if is_tensor(value) else value for name, value in kwargs.items()}
        return [slot.name for slot in operands(named, slots, _TensorParameter)]


class _TensorParameter(NamedTuple):
    """Placeholder for the tensor that is passed for a parameter."""

    name: str


class _WithoutValues(torch.autograd.Function):
    """Makes results of these shapes and dtypes, with gradients, on tensors without values."""

    @staticmethod
    def forward(
        ctx: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*given)
        return tuple(given[0].new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *(torch.empty_like(x) if x.is_floating_point() else None for x in ctx.saved_tensors)


def is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
