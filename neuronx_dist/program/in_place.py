"""Calls that write their first operand in place, and the equivalent functions that write nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ..rules.indexing import write, write_number
from ..torch_internals.tensors import tensor_to
from .builder import Builder, ResultSpec
from .program import Call, Value
from .recording import TracingError

__all__ = ["writes_first", "written_value"]

# In-place operators; an in-place method is named like its equivalent, with "_" added: `add_`, `add`.
_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div",
    "__ifloordiv__": "floor_divide", "__imod__": "remainder", "__ipow__": "pow", "__iand__": "bitwise_and",
    "__ior__": "bitwise_or", "__ixor__": "bitwise_xor", "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}  # fmt: skip


def writes_first(call: Call) -> bool:
    """Returns whether the call writes its first operand or `out`, judged by its name and arguments."""
    name = call.name
    return name.endswith("_") and (not name.endswith("__") or name in {*_OPERATORS, "__setitem__"}) or _option(call)


def written_value(builder: Builder, call: Call, before: Value, is_fresh: Callable[[], bool]) -> Value:
    """Adds calls that compute the new value of the operand that `call` writes, and returns that value.

    Args:
        before: the operand's value before the call.
        is_fresh: returns whether no call has read the operand yet.

    Raises:
        TracingError: torch has no function that computes the value without writing.
    """
    value = _value(builder, call, before, is_fresh)
    if value.producer is not None and value.producer is builder.calls[-1]:
        value.producer.flops, value.producer.random = call.flops, call.random
    if value.dtype != before.dtype:
        value = builder.compute(call, tensor_to, value, before.dtype)
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
        in_place_call = replace(call, results=[])
        return builder.add(in_place_call, [ResultSpec(before.shape, before.dtype, False)])[0]
    raise TracingError(
        f"{call.where}: {name} writes a tensor in place, and torch has no out-of-place form of it. "
        f"Write to a new tensor: torch.empty_like(x).{name}(...)."
    )


def _option(call: Call) -> bool:
    """Returns whether an argument makes the call write in place: `out=`, `inplace=True`."""
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
    if call.name == "bernoulli_":  # the function without "_" reads its operand as the probabilities
        return None
    name = _OPERATORS.get(call.name, call.name.removesuffix("_"))
    for namespace in (torch.Tensor, torch, F):
        forms = [getattr(namespace, form, None) for form in (call.name, f"__i{name}__")]  # `__ipow__` is named `pow_`
        if call.function in forms:
            return getattr(namespace, name, None)
    return None
