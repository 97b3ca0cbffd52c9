"""`torch.compile` of functions of ShardTensors: their calls are breaks of the graph, and run as they are.

Dynamo would trace the handlers' own code, down to process groups and caches. It is told to leave alone what the marked
functions do, at no cost where nothing is compiled: `torch.compiler.disable` would cost microseconds a call. What lies
between breaks, of plain tensors, is compiled.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["run_as_it_is"]

_Function = TypeVar("_Function")


def run_as_it_is(function: _Function) -> _Function:
    """Decorates a function that no compiler looks into."""
    marked: Any = function
    marked._torchdynamo_disable = True
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
