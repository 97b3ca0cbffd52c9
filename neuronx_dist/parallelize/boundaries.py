"""What the stages of an emitted module pass on, held against the table by which messages are made.

A message has no description of its own: the receiver makes a buffer of the shape and dtype of the table, and gradients
come back for those that the table says require one. So the type check runs each stage on what the one before returns,
and compares that with the table and with the types of the division.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..spmd.declarations import get_local_type
from ..spmd.errors import SpmdTypeError
from ..spmd.types import I, R
from .module import ParallelModule
from .program import Division
from .stages import stages_of

__all__ = ["compare_stages"]


def compare_stages(emitted: type[ParallelModule], division: Division) -> None:
    """From now on a stage that is given something else than its table says raises an SpmdTypeError."""
    mode = "" if not emitted.EVAL_STAGES else "train_" if division.program.training else "eval_"
    for number, stage in enumerate(stages_of(division)):
        name = f"{mode}stage_{number}"
        if not stage.received:
            continue
        table = (emitted.EVAL_STAGES if mode == "eval_" else emitted.STAGES)[name]
        types = {value.name: division.type_of(value) for value in stage.received}
        setattr(emitted, name, _comparing(getattr(emitted, name), name, table, types, division))


def _comparing(stage: Callable[..., Any], name: str, table: Any, types: Any, division: Division) -> Callable[..., Any]:
    @wraps(stage)
    def compared(self: ParallelModule, *args: Any) -> Any:
        for (value, (shape, dtype, requires_grad)), x in zip(table.items(), args[len(args) - len(table) :]):
            asked = requires_grad and torch.is_grad_enabled() and division.program.training
            expected = f"{list(shape)} {dtype}{', which requires a gradient' if asked else ''}"
            grad = x.requires_grad and division.program.training
            found = f"{list(x.shape)} {x.dtype}{', which requires a gradient' if grad else ''}"
            if found != expected:
                raise SpmdTypeError(
                    f"{value}, which {name} receives", f"it is {found}, and the table of messages has {expected}"
                )
            spmd_type = get_local_type(x).get(division.axis, R)
            is_same = spmd_type == types[value] or (not x.requires_grad and {spmd_type, types[value]} <= {I, R})
            if division.size > 1 and not is_same:
                raise SpmdTypeError(
                    f"{value}, which {name} receives", f"it is {spmd_type} on {division.axis}, and not {types[value]}"
                )
        return stage(self, *args)

    return compared
