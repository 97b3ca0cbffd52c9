"""Tensors sent between stages: which of them, in which shape, and with which strides they arrive."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from neuronx_dist.pipeline.cut.splitting import StagePlan
from neuronx_dist.pipeline.run.transport import WireFormat, off_the_wire, on_the_wire, wires_of
from neuronx_dist.pipeline.schedule import Kind
from neuronx_dist.program.recording import TensorSpec

F32 = torch.float32


class Plan(StagePlan):
    """A plan with specs only."""

    def __init__(self, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        super().__init__()
        self.specs = [[TensorSpec.of(x) for x in tensors] for tensors in (received, sent)]

    received_specs = property(lambda self: self.specs[0])  # type: ignore[assignment]
    sent_specs = property(lambda self: self.specs[1])  # type: ignore[assignment]


def wire_of(x: torch.Tensor) -> WireFormat:
    (wire,) = wires_of(Plan([x], []), Kind.RECV_FORWARD)
    return wire


@pytest.mark.parametrize(
    "x, wire",
    [
        (torch.ones(2, 3), WireFormat((2, 3), F32, None, None)),
        (torch.ones(2, 3).t(), WireFormat((2, 3), F32, (1, 0), (1, 0))),
        (torch.ones(2, 3, 4).permute(2, 0, 1), WireFormat((2, 3, 4), F32, (1, 2, 0), (2, 0, 1))),
        (torch.ones(2, 3, 4).transpose(0, 1), WireFormat((2, 3, 4), F32, (1, 0, 2), (1, 0, 2))),
        (torch.ones(()), WireFormat((), F32, None, None)),
        (torch.ones(4, 6)[:, :3], WireFormat((4, 3), F32, None, None)),  # gaps: as it is
        (torch.ones(4, 6)[:, :3].t(), WireFormat((3, 4), F32, None, None)),
        (torch.ones(3, 1).expand(3, 4), WireFormat((3, 4), F32, None, None)),  # overlaps
        (torch.ones(2, 1, 3).transpose(1, 2), WireFormat((2, 1, 3), F32, (0, 2, 1), (0, 2, 1))),
        (torch.ones(2, 3, dtype=torch.int64).t(), WireFormat((2, 3), torch.int64, (1, 0), (1, 0))),
    ],
)
def test_shapes_on_the_way(x: torch.Tensor, wire: WireFormat) -> None:
    assert wire_of(x) == wire


def test_every_permutation_arrives_as_it_left_without_a_copy() -> None:
    for sizes in ((2, 3, 4), (3, 1, 2), (2, 2, 2), (1, 1, 3)):
        for order in itertools.permutations(range(3)):
            x = torch.randn(sizes).permute(order)
            wire = wire_of(x)
            travels = on_the_wire(x, wire)
            assert travels.is_contiguous() and tuple(travels.shape) == wire.shape
            assert travels.data_ptr() == x.data_ptr()
            back = off_the_wire(travels, wire)
            assert torch.equal(back, x)
            strides = [step for step, size in zip(back.stride(), back.shape) if size > 1]
            assert strides == [step for step, size in zip(x.stride(), x.shape) if size > 1]
    gaps = torch.randn(4, 6)[:, :3]
    travels = on_the_wire(gaps, wire_of(gaps))
    assert travels.is_contiguous() and torch.equal(off_the_wire(travels, wire_of(gaps)), gaps)


@pytest.mark.parametrize(
    "kind, shapes",
    [
        (Kind.RECV_FORWARD, [(1,), (2,)]),
        (Kind.SEND_BACKWARD, [(2,)]),  # gradients are of what needs them
        (Kind.SEND_FORWARD, [(3,), (4,), (5,)]),
        (Kind.RECV_BACKWARD, [(3,), (5,)]),
    ],
)
def test_what_a_message_carries(kind: Kind, shapes: Any) -> None:
    def tensor(size: int, requires_grad: bool) -> torch.Tensor:
        return torch.ones(size, requires_grad=requires_grad)

    plan = Plan([tensor(1, False), tensor(2, True)], [tensor(3, True), tensor(4, False), tensor(5, True)])
    assert [wire.shape for wire in wires_of(plan, kind)] == shapes
