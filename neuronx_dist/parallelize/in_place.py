"""Calls that write their first operand, and the functions of the same value that write nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ..checking.types.rules.indexing import write, write_number
from ..pipeline.record.recording import TracingError
from .builder import Builder, Result
from .program import Call, Value

__all__ = ["writes_first", "written_value"]

# Operators; other methods are called like the one that writes nothing: `add_`, `add`.
_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div",
    "__ifloordiv__": "floor_divide", "__imod__": "remainder", "__ipow__": "pow", "__iand__": "bitwise_and",
    "__ior__": "bitwise_or", "__ixor__": "bitwise_xor", "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}  # fmt: skip


def writes_first(call: Call) -> bool:
    """Whether what it writes is its first operand, or `out`: by its name and arguments."""
    name = call.name
    return name.endswith("_") and (not name.endswith("__") or name in {*_OPERATORS, "__setitem__"}) or _option(call)


def written_value(builder: Builder, call: Call, before: Value, is_fresh: Callable[[], bool]) -> Value:
    """The value of what `call` writes, after it; `before`: what it has before.

    Args:
        is_fresh: whether nobody has read it.

    Raises:
        TracingError: no function has that value and writes nothing.
    """
    value = _value(builder, call, before, is_fresh)
    if value.producer is not None and value.producer is builder.calls[-1]:
        value.producer.flops, value.producer.random = call.flops, call.random
    if value.dtype != before.dtype:
        value = builder.compute(call, torch.Tensor.to, value, before.dtype)
    if value.shape != before.shape:
        value = builder.compute(call, torch.Tensor.expand, value, before.shape)
    return value


def _value(builder: Builder, call: Call, before: Value, is_fresh: Callable[[], bool]) -> Value:
    name, args, kwargs = call.name, call.args, call.kwargs
    if name == "__setitem__":
        index, value = args[1:]
        return builder.compute(call, write if isinstance(value, Value) else write_number, before, value, index)
    if name == "copy_":
        source = args[1] if len(args) > 1 else kwargs["src"]
        return source if isinstance(source, Value) else builder.compute(call, torch.full_like, before, source)
    if name == "zero_":
        return builder.compute(call, torch.zeros_like, before)
    if name == "fill_":
        number = args[1] if len(args) > 1 else kwargs["value"]
        return number if isinstance(number, Value) else builder.compute(call, torch.full_like, before, number)
    if "out" in kwargs:
        return builder.compute(call, call.function, *args, **{k: v for k, v in kwargs.items() if k != "out"})
    if _option(call):
        bound = inspect.signature(call.function).bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return builder.compute(call, call.function, *bound.args, **bound.kwargs)
    function = _twin(call)
    if function is not None:
        return builder.compute(call, function, *args, **kwargs)
    if is_fresh():
        kept = replace(call, results=[])
        return builder.add(kept, [Result(before.shape, before.dtype, False)])[0]
    raise TracingError(
        f"{call.where}: {name} writes a tensor in place, and torch has no function of the same value that writes "
        f"nothing. Write to a tensor that is made for it: torch.empty_like(x).{name}(...)."
    )


def _option(call: Call) -> bool:
    """Whether the call is told to write in place: `out=`, `inplace=True`."""
    if call.kwargs.get("out") is not None:
        return True
    if "inplace" in call.kwargs:
        return bool(call.kwargs["inplace"])
    try:
        bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    except (ValueError, TypeError):  # a built-in function
        return False
    return bool(bound.arguments.get("inplace", False))


def _twin(call: Call) -> Callable[..., Any] | None:
    if call.name == "bernoulli_":  # the function without "_" takes its operand for the probabilities
        return None
    name = _OPERATORS.get(call.name, call.name.removesuffix("_"))
    for namespace in (torch.Tensor, torch, F):
        forms = [getattr(namespace, form, None) for form in (call.name, f"__i{name}__")]  # `__ipow__` is called `pow_`
        if call.function in forms:
            return getattr(namespace, name, None)
    return None
