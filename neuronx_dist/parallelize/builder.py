"""A program as it is built: calls are added in order, and what their results are is found without computing them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..checking.types.rules.indexing import write
from ..pipeline.record.fake_mode import QuietFakeMode
from .names import FILE_NAMES
from .program import Call, Value, substituted, values_in

__all__ = ["Builder", "Result", "another_call", "without_dead_calls"]

_TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "nn", *FILE_NAMES}


class Result(NamedTuple):
    """What a call returns, of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Builder:
    """Adds calls to a program.

    Attributes:
        calls: so far, in order.
    """

    def __init__(self, values: Iterable[Value] = (), taken: Iterable[str] = ()) -> None:
        """`values`: what the program has already; `taken`: names that no value gets."""
        self.calls: list[Call] = []
        self._names: dict[str, int] = dict.fromkeys([*_TAKEN, *taken, *(value.name for value in values)], 0)

    def name(self, wish: str) -> str:
        """An identifier that no other value has: the wish, or the wish and a number."""
        base = re.sub(r"\W", "_", wish).strip("_") or "value"
        base = f"v{base}" if base[0].isdigit() else base
        name = base
        while name in self._names:
            self._names[base] = self._names.get(base, 0) + 1
            name = f"{base}_{self._names[base]}"
        self._names[name] = 0
        return name

    def add(self, call: Call, results: Sequence[Result], several: bool = False) -> list[Value]:
        """The values that `call` returns, which is added."""
        varies = any(value.varies for value in values_in((call.args, call.kwargs)))
        for shape, dtype, requires_grad in results:
            name = self.name(call.name.strip("_").lower())
            value = Value(name, "result", tuple(shape), dtype, requires_grad, producer=call, varies=varies)
            call.results.append(value)
        call.several = several
        self.calls.append(call)
        return call.results

    def compute(self, like: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """The value of `function(*args, **kwargs)`, at the place in the user's code that the call `like` has."""
        call = another_call(like, function, *args, **kwargs)
        return self.add(call, [_result(call)])[0]


def another_call(like: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """A call of `function`, without results yet, at the place in the user's code that the call `like` has."""
    call = replace(like, function=function, args=args, kwargs=kwargs, results=[], several=False, writes=())
    call.flops, call.random = 0, False
    return call


def without_dead_calls(calls: Sequence[Call], outputs: Any) -> list[Call]:
    """The calls whose results are used, or that write a buffer or draw random numbers."""
    used = set(values_in(outputs))
    alive = []
    for call in reversed(calls):
        if call.writes or call.random or not used.isdisjoint(call.results):
            alive.append(call)
            used.update(values_in((call.args, call.kwargs)))
    return alive[::-1]


def _result(call: Call) -> Result:
    """What a call returns, which is run on tensors without values."""
    if call.function is write:  # of a mask, such tensors do not know how many positions it has
        before, value = call.args[:2]
        return Result(before.shape, before.dtype, call.grad and (before.requires_grad or value.requires_grad))
    device = "meta" if call.autocast is None else call.autocast[0]

    def stand_in(value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)

    with torch.set_grad_enabled(call.grad), ExitStack() as stack:
        if call.autocast is not None:  # it asks for the device
            stack.enter_context(QuietFakeMode())
            stack.enter_context(torch.autocast(device, dtype=call.autocast[1], enabled=call.autocast[2]))
        result = call.function(*substituted(call.args, Value, stand_in), **substituted(call.kwargs, Value, stand_in))
    return Result(tuple(result.shape), result.dtype, result.requires_grad)
