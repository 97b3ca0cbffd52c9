"""The tensors that a step returns: a metric is the one of one process, or this rank's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import note_of
from ...spmd.types import P
from ..types.messages.explain import shown
from ..types.mode import SpmdTypeMode

__all__ = ["check_returned"]


def check_returned(mode: SpmdTypeMode, returned: Any) -> None:
    """Checks that what a step returns is no summand, and no multiple by the size of an axis; a rank's mean is assumed.

    Raises:
        SpmdTypeError: a tensor holds a part of a sum, or of a maximum; or a power of the size of an axis too much.
    """
    for name, x in _tensors(returned, "it"):
        note = mode.note(x, "the step's result") if note_of(x) is not None else None
        for axis, spmd_type in note.type if note is not None else ():
            if axis == "pp" or (spmd_type.letter not in "PRI") or (spmd_type.letter != "P" and not spmd_type.scale):
                continue
            if spmd_type is P("avg"):
                mode.assume(f"the step returns {name}: that the mean over each rank's part on {axis} is meant")
                continue
            origin = (note.origins or {}).get(axis) if note is not None else None
            raise SpmdTypeError(
                f"the step returns {name if name != 'it' else ''} {shown(x, note.type if note else None)}",
                f"on {axis} it is {spmd_type}: {_why(spmd_type)}",
                where_from=[f"{spmd_type} on {axis} since {origin}"] if origin is not None else [],
                repairs=[_repair(spmd_type, axis), "leave it out of what the step returns, if it is rank-local"],
                axis=axis,
                rule="returned",
            )


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, lists and tuples, with their places."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{'' if name == 'it' else name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _tensors(item, f"{'' if name == 'it' else name}[{key}]")


def _why(spmd_type: Any) -> str:
    if spmd_type.letter == "P":
        return "each rank has its part, and the parts are not put together"
    return "the value is not the one of one process, but a power of the number of ranks too large or too small"


def _repair(spmd_type: Any, axis: str) -> str:
    if spmd_type.letter == "P":
        op = f', op="{spmd_type.reduction}"' if spmd_type.reduction == "max" else ""
        return f'comm.all_reduce(x, "{axis}"{op}) of what is returned'
    return f'{"divide" if spmd_type.scale > 0 else "multiply"} by comm.size("{axis}") what is returned'
