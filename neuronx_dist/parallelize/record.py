"""A module's forward as a `Program`: recorded once on fake tensors, function by function."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import comm
from ..mesh import Mesh
from ..pipeline.record.recorder import record
from ..pipeline.record.surroundings import restored
from .program import Program
from .translate import translate

__all__ = ["record_program"]


def record_program(module: nn.Module, arguments: dict[str, Any], *, training: bool) -> Program:
    """The program that `module(**arguments)` runs. Nothing of the module changes, no random number is drawn.

    Args:
        module: may be on meta.
        arguments: of forward, by name: tensors (of which only shape, strides and dtype count) in any containers, and
            whatever else.
        training: the mode to record it in. What `module.train(training)` leaves as it is (frozen submodules) stays so;
            a module that is in that mode already is recorded as it is.

    Raises:
        TracingError: the forward branches on values of tensors, or writes what it may not.
        TypeError: forward does not take these arguments.
    """
    with restored(module), comm.as_rank(Mesh(1), 0):
        if module.training != training:
            module.train(training)
        recording = record(module, arguments, leaves=False)
    order = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return translate(recording, arguments, order, training)
