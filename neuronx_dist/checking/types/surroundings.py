"""What is changed in torch while any mode is entered, and put back by the last one that leaves.

    nn.Parameter(x)       which no mode sees: the parameter is what `x` was declared to be
    torch.distributed     takes no typed tensors (`raw_collectives.py`)
    hooks                 of nodes in the graph, and of saved tensors (`handlers/hooks.py`)
    torch.vmap, torch.func  what they hide of a tensor is in its type (`handlers/vmapped.py`)
    len                   of a sharded tensor is a number that knows it is local (`handlers/axis_numbers.py`)
    torch.jit             graphs run node by node (`handlers/scripted.py`)
    torch.compile         what was compiled runs as it is written: a compiler cannot follow types

What a program just made (`torch.empty`, random numbers) was never declared: a parameter made of that is what its layout
says (`parameter_type`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...shared_context import SharedContext
from ...spmd.tensor_type import READONLY, note_of
from ...spmd.watching import active
from . import raw_collectives as raw
from .handlers import axis_numbers, hooks, scripted, vmapped

__all__ = ["surroundings"]

_PARTS: Any = (raw, hooks, vmapped, scripted, axis_numbers)
_NEW = nn.Parameter.__new__


def _new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    param = _NEW(cls, data, requires_grad)
    mode = active()
    note = note_of(data) if mode is not None and isinstance(data, Tensor) else None
    if mode is None or note is None or param is data:
        return param
    if note.type.types and note.type.rest is None and note.extra in (None, READONLY):
        mode.stamp(param, note.type, note.origins)
    return param


@contextmanager
def _changed() -> Iterator[None]:
    nn.Parameter.__new__ = _new  # type: ignore[method-assign]
    for part in _PARTS:
        part.install()
    # Where nothing is compiled yet, importing what compiles would take seconds.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo.eval_frame" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        nn.Parameter.__new__ = _NEW  # type: ignore[method-assign]
        for part in _PARTS:
            part.remove()


surroundings = SharedContext(_changed)
"""Changes torch, as the docstring of this file lists, until the last one who entered leaves."""
