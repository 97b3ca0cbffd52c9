"""Records of a program's calls, to be compared between ranks: operators, draws, numbers that differ."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.checking.programs.calls import Deadline, OpRecorder, OutOfTime
from neuronx_dist.comm.backends.observed import CheckBackend


def names(recorder: OpRecorder) -> list[str]:
    return [op.name for op in recorder.ops]


def test_what_autograd_calls_is_recorded_in_hooks_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    with OpRecorder(Deadline(None)) as recorder:
        y = x * 2
        y.register_hook(lambda grad: torch.neg(grad))
        y.sum().backward()
    assert names(recorder) == ["mul", "sum"]
    recorder = OpRecorder(Deadline(None))

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with recorder.in_backward():
            return torch.neg(grad)

    for _ in range(2):
        y = x * 2
        y.register_hook(hook)
        y.register_hook(lambda grad: torch.exp(grad))
        with recorder:
            y.sum().backward()
    assert names(recorder) == ["sum", "neg"] * 2


def test_draws_are_those_of_calls_that_draw() -> None:
    with comm.as_rank(Mesh(2, tp=2), 0, CheckBackend()), spmd.SpmdTypeMode() as types:
        with OpRecorder(Deadline(None), types) as recorder:
            x = torch.randn(4)
            y = x + 1
            F.dropout(y, 0.5, training=False)
            F.dropout(y, 0.5)
            torch.rand(2, generator=torch.Generator().manual_seed(3))
        with types.pause(), recorder:
            torch.randn(4)
    assert [op.draw is not None for op in recorder.ops] == [True, False, False, True, True]
    assert all(op.types is not None for op in recorder.ops)
    with OpRecorder(Deadline(None)) as plain:
        torch.randn(4)
    assert plain.ops[0].draw is None and plain.ops[0].types is None


def test_questions_are_not_recorded() -> None:
    x = torch.ones(2, 3)
    with OpRecorder(Deadline(None)) as recorder:
        assert (x.shape, x.dim(), x.dtype, x.requires_grad) == ((2, 3), 2, torch.float32, False)
        x.sum(dim=1)
    assert names(recorder) == ["sum"] and recorder.ops[0].line.startswith(__file__)
    assert 1 in recorder.ops[0].scalars


def test_a_program_that_takes_too_long_is_stopped_while_it_calls() -> None:
    x = torch.ones(2)
    with pytest.raises(OutOfTime), OpRecorder(Deadline(0.0)):
        for _ in range(65):
            x = x + 1
    Deadline(None).check()
    Deadline(60.0).check()
    assert Deadline(None).elapsed < 60.0
