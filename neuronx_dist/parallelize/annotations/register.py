"""Registration of functions by annotations: `register_op`.

    @register_op("m k+, n k+ -> m n")
    def fused_matmul(x, w): ...

One registration serves the type checker, ShardTensor and `parallelize` (`rules.spec.register_operator`). A registered
function is one call for recorders and checkers, whatever it does inside.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ...rules.spec import RULES, operands, register_operator
from .annotation import Annotation
from .examples import Example, example_of, linear_operands, verify
from .registered import Operator

__all__ = ["register_op", "registrations"]

_PACKAGES = ("torch", __name__.partition(".")[0])  # packages whose rules are not a user's
AnnotationLike = str | Callable[..., str]


def register_op(
    annotation: AnnotationLike,
    name: str | None = None,
    *,
    example: Callable[[], Example] | None = None,
    linear: Sequence[int] | None = None,
    random: bool = False,
    code_impl_pattern: str = "import",
    input_gen_fn: Any = None,
    emit_fn: Any = None,
    transform_rules: Any = None,
) -> Callable[[Any], Any]:
    """Registers a function, a `torch.autograd.Function` or its `apply` with an annotation (`annotation.py`).

    The decorated function replaces the original in its module, so that existing functions can be registered too, before
    others import them by name. A Function is called by `apply` as before.

    The annotation is verified on examples: split along each dim that may be split, the pieces must make up the whole
    result, and their gradients the whole gradient. The operands in which the function is linear are measured.

    Args:
        annotation: a text, or a function of the call's arguments that returns one.
        name: name in messages and for `select`; None: the function's name.
        example: returns arguments `(args, kwargs)` to verify with; None: they follow from the annotation, if it is a
            text and the other arguments have defaults.
        linear: numbers of the operands in each of which the function is linear; None: measured on the example.
        random: True if the function draws random numbers; it is then not verified.
        code_impl_pattern, input_gen_fn: accepted for compatibility: emitted code imports the function, and costs follow
            from shapes.
        emit_fn, transform_rules: refused: they write nnScaler's code.

    Raises:
        NotImplementedError: `emit_fn` or `transform_rules` is passed.
        AnnotationError: the annotation cannot be read, or pieces make up something else, forward or backward.
    """
    if emit_fn is not None or transform_rules:
        raise NotImplementedError(
            "register_op: emit_fn and transform_rules write nnScaler's code, and are not supported: leave them out. A "
            "rank calls the function on its shards, as the annotation says; mark a dim with ^ that it must have whole"
        )
    read = Annotation.read(annotation) if isinstance(annotation, str) else annotation

    def register(target: Any) -> Any:
        function = getattr(target, "__self__", None)
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):  # target is its `apply`
            return register(function).apply
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
        register_operator(called, spec=op.spec, name=op.name, linear=linear_in, random=lambda *_, **__: random)
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
    """Returns the rules of users by their functions' full names.

    An annotation stands with the groups of linear operands and with randomness; another rule with all its fields.
    """
    rules: dict[str, tuple[Any, ...]] = {}
    for function, known in RULES.items():
        op = getattr(known.spec, "__self__", None)
        if isinstance(op, Operator):
            annotation = op.rule.text if isinstance(op.rule, Annotation) else op.rule
            random = known.random() if callable(known.random) else known.random
            rules[f"{function.__module__}.{function.__qualname__}"] = (annotation, known.linear, random)
        elif not (getattr(known.spec or function, "__module__", None) or "torch").startswith(_PACKAGES):
            rules[f"{function.__module__}.{function.__qualname__}"] = tuple(known)
    return rules


def _as_one_call(target: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as one call for modes and tensor subclasses."""

    @functools.wraps(getattr(target, "forward", target))
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(operands(args, kwargs))
        if has_torch_function(tensors or (None,)):
            return handle_torch_function(called, tensors, *args, **kwargs)
        return inner(*args, **kwargs)

    if isinstance(target, type):
        called.__name__ = called.__qualname__ = f"{target.__qualname__}.apply"
    return called
