"""Changes of torch while any mode is entered, which the last mode to leave reverts.

    nn.Parameter(x)       arrives in no mode: the parameter gets the type that `x` was declared to have
    torch.distributed     takes no typed tensors (`raw_collectives.py`)
    hooks                 of nodes in the graph, and of saved tensors (`handlers/hooks.py`)
    torch.vmap, torch.func  dims that they hide stay in the type (`handlers/vmapped.py`)
    len                   of a sharded tensor is an AxisSize (`handlers/axis_numbers.py`)
    apply = F.apply       of a custom function is checked, though it was bound before (`handlers/captured.py`)
    torch.jit             scripted functions run as Python (`handlers/scripted.py`)
    torch.compile         compiled functions run as written: a compiler cannot follow types

A tensor that a program just made (`torch.empty`, random numbers) was not declared: a parameter made of it has the type
of its layout (`parameter_type`).
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
from ...torch_internals.operators import COMPILER
from . import raw_collectives as raw
from .handlers import axis_numbers, captured, hooks, scripted, vmapped

__all__ = ["surroundings"]

_PARTS: Any = (raw, hooks, vmapped, scripted, axis_numbers, captured)
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
    # The import of the compiler would take seconds: left out if nothing is compiled yet.
    stance = torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        nn.Parameter.__new__ = _NEW  # type: ignore[method-assign]
        for part in _PARTS:
            part.remove()


surroundings = SharedContext(_changed)
"""Changes torch, as the docstring of this file lists, until the last one who entered leaves."""
