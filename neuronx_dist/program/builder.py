"""A program under construction: calls are added in order, and shapes of results are inferred without values."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..rules.containers import substituted
from ..rules.indexing import write
from .fake_mode import QuietFakeMode
from .program import FILE_NAMES, Call, Value, values_in

__all__ = ["Builder", "ResultSpec", "another_call", "without_dead_calls"]

_TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "nn", *FILE_NAMES}


class ResultSpec(NamedTuple):
    """Shape, dtype and `requires_grad` of one tensor that a call returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Builder:
    """Adds calls to a program.

    Attributes:
        calls: the calls added so far, in order.
    """

    def __init__(self, values: Iterable[Value] = (), reserved: Iterable[str] = ()) -> None:
        """`values`: the values that the program has already; `reserved`: names that no value may get."""
        self.calls: list[Call] = []
        self._names: dict[str, int] = dict.fromkeys([*_TAKEN, *reserved, *(value.name for value in values)], 0)

    def name(self, wish: str) -> str:
        """Returns an unused identifier: `wish`, or `wish` and a number."""
        base = re.sub(r"\W", "_", wish).strip("_") or "value"
        base = f"v{base}" if base[0].isdigit() else base
        name = base
        while name in self._names:
            self._names[base] = self._names.get(base, 0) + 1
            name = f"{base}_{self._names[base]}"
        self._names[name] = 0
        return name

    def add(self, call: Call, results: Sequence[ResultSpec], several: bool = False) -> list[Value]:
        """Adds `call`, and returns new values for its results."""
        varies = any(value.varies for value in values_in((call.args, call.kwargs)))
        for shape, dtype, requires_grad in results:
            name = self.name(call.name.strip("_").lower())
            value = Value(name, "result", tuple(shape), dtype, requires_grad, producer=call, varies=varies)
            call.results.append(value)
        call.several = several
        self.calls.append(call)
        return call.results

    def compute(self, like: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Adds the call `function(*args, **kwargs)`, with the source line and modes of `like`; returns its value."""
        call = another_call(like, function, *args, **kwargs)
        return self.add(call, [_result(call)])[0]


def another_call(like: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Returns a call of `function`, without results yet, with the source line and modes of the call `like`."""
    call = replace(like, function=function, args=args, kwargs=kwargs, results=[], several=False, writes=())
    call.flops, call.random = 0, False
    return call


def without_dead_calls(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """Returns the calls whose results are used, or that write a buffer or draw random numbers."""
    used = set(values_in(outputs))
    alive = []
    for call in reversed(calls):
        if call.writes or call.random or not used.isdisjoint(call.results):
            alive.append(call)
            used.update(values_in((call.args, call.kwargs)))
    return alive[::-1]


def _result(call: Call) -> ResultSpec:
    """Returns the shape, dtype and `requires_grad` of a call's result, by running it on tensors without values."""
    if call.function is write:  # tensors without values do not say how many positions a mask selects
        before, value = call.args[:2]
        return ResultSpec(before.shape, before.dtype, call.grad and (before.requires_grad or value.requires_grad))
    device = "meta" if call.autocast is None else call.autocast[0]

    def stand_in(value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)

    with torch.set_grad_enabled(call.grad), ExitStack() as stack:
        if call.autocast is not None:  # autocast depends on the device, so meta tensors do not do
            stack.enter_context(QuietFakeMode())
            stack.enter_context(torch.autocast(device, dtype=call.autocast[1], enabled=call.autocast[2]))
        result = call.function(*substituted(call.args, Value, stand_in), **substituted(call.kwargs, Value, stand_in))
    return ResultSpec(tuple(result.shape), result.dtype, result.requires_grad)
