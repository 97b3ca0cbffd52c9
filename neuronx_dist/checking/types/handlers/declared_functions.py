"""Autograd functions whose types are declared (`spmd/function_types.py`): the body runs unchecked.

The declaration is itself checked: operands that a hook asserts, and every expression of types that it computes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....rules import Rule
from ....spmd.errors import SpmdTypeError
from ....spmd.function_types import DECOMPOSITIONS, LOCAL, hook_of
from ....spmd.tensor_type import TensorType, note_of, tensors_in
from ....spmd.type_rules import without_values
from ....torch_internals.tensors import DisableTorchFunction
from ..session import Session

__all__ = ["declared_function"]


def declared_function(mode: Session, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function unchecked, and writes the declared types on its results.

    Raises:
        SpmdTypeError: the operands do not have the declared types, or a result gets no type.
    """
    hook = hook_of(cls)
    if cls in mode.declared_inside:  # `typecheck_forward` calls the function itself
        with mode.pause():
            return original(*args, **kwargs)
    if hook is not None and hook[0] == "typecheck_forward":
        mode.declared_inside.append(cls)
        try:
            result = hook[1](*args, **kwargs)
        finally:
            mode.declared_inside.remove(cls)
        _require_types(cls, result)
    else:
        with DisableTorchFunction():
            for x in tensors_in([*args]):
                mode.note(x, cls.__name__)
        with mode.pause():
            result = original(*args, **kwargs)
        if cls in LOCAL and hook is None and cls not in DECOMPOSITIONS:
            _stamp(mode, cls, result, _local_types(mode, cls, args, result))
        elif hook is None:
            typed = DECOMPOSITIONS[cls](*map(without_values, args), **kwargs)
            _copy(mode, cls, result, typed)
        else:
            _by_hook(mode, cls, hook[1], args, result)
    mode.trust(f"{cls.__name__}: the declared types of an autograd function")
    return result


def _by_hook(mode: Session, cls: Any, hook: Callable[..., Any], args: Any, result: Any) -> None:
    parameters = [*inspect.signature(cls.forward).parameters.values()]
    first = 0 if cls.setup_context is not torch.autograd.Function.setup_context else 1  # without ctx
    names = [parameter.name for parameter in parameters[first:]]
    bound = dict(zip(names, args))
    declared = inspect.signature(hook).parameters.values()
    takes_outputs = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in declared)
    wanted = [p.name for p in declared if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in wanted if name not in names]:
        raise TypeError(f"{cls.__name__}.spmd_typecheck names {', '.join(unknown)}: forward has {', '.join(names)}")
    unused = [name for name, x in bound.items() if isinstance(x, Tensor) and name not in wanted]
    if unused:
        raise SpmdTypeError(
            f"{cls.__name__}.spmd_typecheck",
            f"it does not name the operand {', '.join(unused)} of forward",
            repairs=[f"def spmd_typecheck(..., {unused[0]}): rules.ignore({unused[0]})"],
            rule="spmd_typecheck",
        )
    keywords = {name: bound[name] for name in wanted if name in bound}
    if takes_outputs:
        hook(result, **keywords)
        _require_types(cls, result)
    else:
        _copy(mode, cls, result, hook(**keywords))


def _copy(mode: Session, cls: Any, result: Any, typed: Any) -> None:
    types = [None if (note := note_of(x)) is None else note.type for x in tensors_in([typed])]
    _stamp(mode, cls, result, types)


def _stamp(mode: Session, cls: Any, result: Any, types: list[Any]) -> None:
    results = tensors_in([result])
    if len(results) != len(types) or None in types:
        raise SpmdTypeError(
            f"{cls.__name__}: its declaration gives types to {sum(t is not None for t in types)} results, and it has "
            f"{len(results)}",
            rule="spmd_typecheck",
        )
    with DisableTorchFunction():
        for x, type_ in zip(results, types):
            mode.stamp(x, type_)


def _require_types(cls: Any, result: Any) -> None:
    for index, x in enumerate(tensors_in([result])):
        if note_of(x) is None:
            raise SpmdTypeError(
                f"{cls.__name__}: its declaration gives result {index} {list(x.shape)} no type",
                repairs=["spmd.assert_type(result, {...}) in it"],
                rule="spmd_typecheck",
            )


def _local_types(mode: Session, cls: Any, args: Any, result: Any) -> list[TensorType]:
    """Types of the results of a function that computes position by position."""
    operands, results = tensors_in([*args]), tensors_in([result])
    if all(x.shape == results[0].shape for x in (*operands, *results)):
        values = [without_values(x).float() for x in operands]
        typed = functools.reduce(torch.maximum, values) if len(values) > 1 else torch.relu(values[0])
        note = note_of(typed)
        return [note.type for _ in results if note is not None]
    with DisableTorchFunction():
        notes = [note for x in operands if (note := mode.note(x, cls.__name__)) is not None]
    judgement = mode.judge(Rule(cls.__name__, None), cls.apply, args, {}, operands, notes)
    return [judgement.types[min(index, len(judgement.types) - 1)] for index in range(len(results))]
