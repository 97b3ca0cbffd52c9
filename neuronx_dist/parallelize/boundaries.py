"""What the stages of an emitted module pass on, held against the table by which messages are made.

A message has no description of its own: the receiver makes a buffer of the shape and dtype of the table, and gradients
come back for those that the table says require one. So the type check runs each stage on what the one before returns,
and compares that with the table and with the types of the division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from ..spmd.declarations import get_local_type
from ..spmd.errors import SpmdTypeError
from ..spmd.types import I, R, Shard, SpmdType
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
        types = [division.types_of(value) for value in stage.received]
        setattr(emitted, name, _comparing(getattr(emitted, name), name, table, types, division))


def _comparing(
    stage: Callable[..., Any],
    name: str,
    table: Mapping[str, tuple[list[int], torch.dtype, bool]],
    types: Sequence[Mapping[str, SpmdType]],
    division: Division,
) -> Callable[..., Any]:
    @wraps(stage)
    def compared(self: ParallelModule, *args: Any) -> Any:
        received = args[len(args) - len(table) :]
        for (value, (shape, dtype, requires_grad)), x, expected_types in zip(
            table.items(), received, types, strict=True
        ):
            asked = requires_grad and torch.is_grad_enabled() and division.program.training
            expected = f"{list(shape)} {dtype}{', which requires a gradient' if asked else ''}"
            grad = x.requires_grad and division.program.training
            found = f"{list(x.shape)} {x.dtype}{', which requires a gradient' if grad else ''}"
            if found != expected:
                raise SpmdTypeError(
                    f"{value}, which {name} receives", f"it is {found}, and the table of messages has {expected}"
                )
            for axis, expected_type in expected_types.items():
                spmd_type = _pieces(get_local_type(x).get(axis, R))
                alike = not x.requires_grad and {spmd_type, expected_type} <= {I, R}
                if spmd_type != expected_type and not alike:
                    raise SpmdTypeError(
                        f"{value}, which {name} receives", f"it is {spmd_type} on {axis}, and not {expected_type}"
                    )
        return stage(self, *args)

    return compared


def _pieces(type_: SpmdType) -> SpmdType:
    """Of one block the pieces are the same data, however many positions of them the sharding counts."""
    return replace(type_, extent=None) if isinstance(type_, Shard) and type_.stride == 1 else type_
