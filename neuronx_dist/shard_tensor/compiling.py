"""`torch.compile` of functions of ShardTensors: their calls are breaks of the graph, and run as they are.

Dynamo would trace the handlers' own code, down to process groups and caches. It is told to leave alone what the marked
functions do, at no cost where nothing is compiled: `torch.compiler.disable` would cost microseconds a call. What lies
between breaks, of plain tensors, is compiled.
"""

from __future__ import annotations

from typing import TypeVar

from ..torch_internals.operators import skip_in_compiler

__all__ = ["run_as_it_is"]

_Function = TypeVar("_Function")


def run_as_it_is(function: _Function) -> _Function:
    """Decorates a function so that `torch.compile` does not trace it."""
    skip_in_compiler(function)
    return function
