"""Compares what the stages of an emitted module pass on with the table by which messages are made.

A message does not describe its tensor: the receiver allocates a buffer of the shape and dtype in the table, and sends
gradients back for the values that require one by the table. So the type check runs each stage on the results of the
stage before, and compares these with the table and with the types of the division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from ...program.program import Division
from ...spmd.declarations import get_local_type
from ...spmd.errors import SpmdTypeError
from ...spmd.types import I, R, Shard, SpmdType
from ..choose.stages import stages_of
from ..train.parallel_module import ParallelModule

__all__ = ["compare_stages"]


def compare_stages(emitted: type[ParallelModule], division: Division) -> None:
    """Makes each stage raise an SpmdTypeError when it receives something else than its table says."""
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
                    f"{value}, which {name} receives", f"it is {found}, but the table of messages has {expected}"
                )
            for axis, expected_type in expected_types.items():
                spmd_type = _pieces(get_local_type(x).get(axis, R))
                are_equal_data = not x.requires_grad and {spmd_type, expected_type} <= {I, R}
                if spmd_type != expected_type and not are_equal_data:
                    raise SpmdTypeError(
                        f"{value}, which {name} receives", f"it is {spmd_type} on {axis}, not {expected_type}"
                    )
        return stage(self, *args)

    return compared


def _pieces(type_: SpmdType) -> SpmdType:
    """Returns a type without the extent of a sharding of one block: its pieces are the same data at any extent."""
    return replace(type_, extent=None) if isinstance(type_, Shard) and type_.stride == 1 else type_
