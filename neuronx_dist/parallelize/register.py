"""Functions without a typing rule get one from an annotation: `register_op`.

    @register_op("m k+, n k+ -> m n")
    def fused_matmul(x, w): ...

The rule is the checker's (`RULES`), so that one registration serves it and `parallelize`. A registered function is one
call to whoever records or checks, whatever it does inside.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..checking.types.rules.spec import RULES, operands, rule
from .annotation import Annotation
from .examples import Example, example_of, linear_operands, verify
from .registered import Operator

__all__ = ["register_op", "registrations"]

AnnotationLike = str | Callable[..., str]


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

    It is verified on examples: split along each dim that may be split, the pieces make up the whole, and their
    gradients the whole's; and in which operands it is linear is measured.

    Args:
        annotation: or a function of the call's arguments that returns one.
        name: for messages and `select`; None: the function's.
        example: makes arguments `(args, kwargs)` to verify with; None: of the annotation, where it is a text and other
            arguments have defaults.
        linear: numbers of the operands in each of which the function is linear; None: measured on the example.
        random: it draws random numbers; then it is not verified.

    Raises:
        AnnotationError: the annotation cannot be read, or pieces make up something else, forward or backward.
    """
    read = Annotation.read(annotation) if isinstance(annotation, str) else annotation

    def register(target: Any) -> Any:
        is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
        inner = target.apply if is_function else target
        signature = inspect.signature(target.forward if is_function else target)
        if is_function and "ctx" in list(signature.parameters)[:1]:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        op = Operator(inner, signature, read, name or target.__name__)
        arguments = None if random else example_of(op, example)
        if arguments is not None:
            verify(op, *arguments)
            op.example = arguments
        groups = tuple((i,) for i in (linear_operands(op, *arguments) if arguments else ())) if linear is None else None
        called = _as_one_call(target, op)
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
        if isinstance(op, Operator):
            annotation = op.rule.text if isinstance(op.rule, Annotation) else op.rule
            random = known.random() if callable(known.random) else known.random
            found[f"{function.__module__}.{function.__qualname__}"] = (annotation, known.linear, random)
    return found


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
