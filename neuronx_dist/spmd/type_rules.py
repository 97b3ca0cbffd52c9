"""Types of expressions without their values, for `spmd_typecheck` of an autograd function (`spmd.rules`).

Each function takes typed tensors and returns a tensor on the meta device with the type of the result. Collectives are
judged as the operators are, and nothing is communicated.
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm import communicator
from ..comm.backends.shapes import ShapesCommunicator
from ..torch_internals.tensors import DisableTorchFunction
from . import collectives
from .tensor_type import note_of, tensors_in, write
from .types import P, SpmdType, V

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "einsum",
    "ignore",
    "output",
    "reduce_scatter",
    "reinterpret",
    "without_values",
]


def without_values(x: Any) -> Any:
    """Returns a tensor on the meta device with the type of `x`; anything else as it is, lists item by item."""
    if type(x) in (list, tuple):
        return type(x)(map(without_values, x))
    if not isinstance(x, torch.Tensor):
        return x
    with DisableTorchFunction():
        meta = torch.empty_like(x, device="meta", requires_grad=False)
        note = note_of(x)
        if x.requires_grad:
            meta.requires_grad_()
        if note is not None:
            write(meta, note.type, note.origins, note.session)
    return meta


def einsum(equation: str, *operands: torch.Tensor, out: Any = None) -> torch.Tensor:
    """Returns the type of `torch.einsum`, and writes it on `out`."""
    result: torch.Tensor = torch.einsum(equation, *map(without_values, operands))
    output(out, result)
    return result


def _typed(function: Any, x: torch.Tensor, axis: Any, out: Any, **types: SpmdType) -> torch.Tensor:
    group = communicator(axis)
    silent = ShapesCommunicator(group.axis, group.ranks, group.global_rank)
    silent.axis_sizes = group.axis_sizes
    silent.global_rank = -1  # of no rank's record
    result: torch.Tensor = function(without_values(x), silent, **types)
    output(out, result)
    return result


def all_reduce(x: torch.Tensor, axis: Any, *, src: SpmdType = P, dst: SpmdType, out: Any = None) -> torch.Tensor:
    """Returns the type of `spmd.all_reduce`."""
    return _typed(collectives.all_reduce, x, axis, out, src=src, dst=dst)


def all_gather(x: torch.Tensor, axis: Any, *, src: SpmdType = V, dst: SpmdType, out: Any = None) -> torch.Tensor:
    """Returns the type of `spmd.all_gather`."""
    return _typed(collectives.all_gather, x, axis, out, src=src, dst=dst)


def reduce_scatter(
    x: torch.Tensor, axis: Any, *, src: SpmdType = P, dst: SpmdType = V, out: Any = None
) -> torch.Tensor:
    """Returns the type of `spmd.reduce_scatter`."""
    return _typed(collectives.reduce_scatter, x, axis, out, src=src, dst=dst)


def all_to_all(x: torch.Tensor, axis: Any, *, src: SpmdType = V, dst: SpmdType = V, out: Any = None) -> torch.Tensor:
    """Returns the type of `spmd.all_to_all`."""
    return _typed(collectives.all_to_all, x, axis, out, src=src, dst=dst)


def convert(x: torch.Tensor, axis: Any, *, src: SpmdType, dst: SpmdType, out: Any = None) -> torch.Tensor:
    """Returns the type of `spmd.convert`."""
    return _typed(collectives.convert, x, axis, out, src=src, dst=dst)


def reinterpret(x: torch.Tensor, axis: Any, *, src: SpmdType, dst: SpmdType, out: Any = None) -> torch.Tensor:
    """Returns the type of `spmd.reinterpret`."""
    return _typed(collectives.reinterpret, x, axis, out, src=src, dst=dst)


def ignore(*tensors: torch.Tensor) -> None:
    """Marks operands that the types of the results do not depend on."""


def output(out: Any, typed: Any) -> None:
    """Writes the types of `typed` on `out`, tensor by tensor."""
    for x, y in zip(tensors_in([out]), tensors_in([typed])):  # none of None
        note = note_of(y)
        if note is not None:
            with DisableTorchFunction():
                write(x, note.type, note.origins, note.session)
