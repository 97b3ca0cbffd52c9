"""What tensors are on their way between two stages: which ones a message carries, and how they lie in memory.

Shapes, dtypes and who needs a gradient are known from the recording, so no message describes another.
"""

from __future__ import annotations

import torch

from ..cut.splitting import StagePlan
from ..record.recording import TensorSpec
from ..schedule import Kind

__all__ = ["off_the_wire", "on_the_wire", "specs_of", "wire_shape"]


def specs_of(plan: StagePlan, kind: Kind) -> list[TensorSpec]:
    """The tensors of a send or receive of a stage with this plan, as the model has them."""
    specs = plan.received_specs if kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else plan.sent_specs
    forward = kind in (Kind.RECV_FORWARD, Kind.SEND_FORWARD)
    return [spec for spec in specs if forward or spec.requires_grad]


# A transposed tensor travels as it lies in memory, without a copy, and arrives with the strides that it has in the
# model: a `view` which is possible there is possible here.


def _memory_order(spec: TensorSpec) -> list[int]:
    """Dims from the largest stride to the smallest; as they are, if memory has gaps or overlaps."""
    order = sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], spec.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] > 1 and spec.stride[dim] != expected:
            return list(range(len(spec.shape)))
        expected *= spec.shape[dim]
    return order


def wire_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape in which a tensor travels."""
    return tuple(spec.shape[dim] for dim in _memory_order(spec))


def on_the_wire(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor of the model as it travels: contiguous, of `wire_shape(spec)`."""
    return _permuted(x, _memory_order(spec)).contiguous()


def off_the_wire(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What travelled, with the shape and strides that it has in the model."""
    order = _memory_order(spec)
    return _permuted(x, [order.index(dim) for dim in range(len(order))])


def _permuted(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == sorted(order) else x.permute(order)  # on XLA even the identity is a computation
