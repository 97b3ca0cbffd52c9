"""What tensors are on their way between two stages: which ones a message carries, and how they lie in memory.

Shapes, dtypes and who needs a gradient are known from the recording, so no message describes another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..cut.splitting import StagePlan
from ..cut.stage import Chunk
from ..record.recording import TensorSpec
from ..schedule import Kind

__all__ = ["Wire", "off_the_wire", "on_the_wire", "wires_of"]


class Wire(NamedTuple):
    """How a tensor of the model travels.

    A transposed one travels as it lies in memory, without a copy, and arrives with the strides that it has in the
    model: a `view` which is possible there is possible here.

    Attributes:
        shape, dtype: on its way, contiguous.
        order: the dims of the model's tensor in that order; None: as they are.
        back: the dims of what travels, in the model's order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None
    back: tuple[int, ...] | None


def wires_of(plan: StagePlan | Chunk, kind: Kind) -> list[Wire]:
    """The tensors of a send or receive of a stage with this plan."""
    specs = plan.received_specs if kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else plan.sent_specs
    forward = kind in (Kind.RECV_FORWARD, Kind.SEND_FORWARD)
    return [_wire(spec) for spec in specs if forward or spec.requires_grad]


def on_the_wire(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """A tensor of the model as it travels."""
    # On XLA even the identity is a computation.
    return (x if wire.order is None else x.permute(wire.order)).contiguous()


def off_the_wire(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """What travelled, with the shape and strides that it has in the model."""
    return x if wire.back is None else x.permute(wire.back)


def _wire(spec: TensorSpec) -> Wire:
    order = _memory_order(spec)
    shape = tuple(spec.shape[dim] for dim in order)
    if order == sorted(order):
        return Wire(shape, spec.dtype, None, None)
    return Wire(shape, spec.dtype, tuple(order), tuple(order.index(dim) for dim in range(len(order))))


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dims from the largest stride to the smallest; as they are, if memory has gaps or overlaps."""
    order = sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], spec.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] > 1 and spec.stride[dim] != expected:
            return list(range(len(spec.shape)))
        expected *= spec.shape[dim]
    return order
