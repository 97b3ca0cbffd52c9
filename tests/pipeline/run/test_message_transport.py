"""Work of the transport in a step, counted: messages, waits, buffers, and questions to the schedule."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.pipeline.schedule import Kind, Schedule
from neuronx_dist.pipeline.schedule.tasks import RECEIVES, SENDS
from tests.support.pipeline_models import Model, batch, make, on_ranks

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v")


class Buffers(TorchDispatchMode):
    """Counts the calls of `torch.empty` in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


def options(name: str, microbatches: int) -> dict[str, Any]:
    return {
        "num_microbatches": microbatches,
        "output_loss_value_spec": True,
        "schedule": name,
        "virtual_pipeline_size": 2 if name in ("interleaved", "zb_v") else 1,
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_has_the_messages_of_its_schedule_and_a_buffer_for_each_that_comes(name: str) -> None:
    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        with comm.record(waits=True) as calls, Buffers() as buffers:
            pipeline.run(pipeline.training_schedule, batch())
        messages = Counter((call.verb, *re.findall("pp_forward|pp_backward", call.axis)) for call in calls)
        return messages, {call.shape for call in calls}, buffers.count, pipeline.training_schedule

    for stage, (messages, shapes, buffers, schedule) in enumerate(
        on_ranks(Mesh(2, pp=2), make(), use, **options(name, 4))
    ):
        expected = expected_messages(schedule, stage)
        assert messages == expected
        assert shapes == {(2, 6, 8)}
        assert buffers == sum(expected["recv", axis] for axis in ("pp_forward", "pp_backward"))


def expected_messages(schedule: Schedule, stage: int) -> Counter[tuple[str, str]]:
    """Each send and receive once, and its wait once."""
    expected: Counter[tuple[str, str]] = Counter()
    for task in schedule.tasks(stage):
        if task.kind in SENDS or task.kind in RECEIVES:
            verb = "send" if task.kind in SENDS else "recv"
            axis = "pp_forward" if task.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else "pp_backward"
            expected[verb, axis] += 1
            expected[f"wait:{verb}", axis] += 1
    return expected


def test_sends_of_1f1b_are_awaited_when_their_answer_has_come() -> None:
    """So that no wait for a send blocks in the steady state: the other stage has used what was sent."""
    stages, microbatches = 3, 8

    def use(pipeline: NxDPPModel) -> Any:
        with comm.record(waits=True) as calls:
            pipeline.run(pipeline.training_schedule, batch())
        return [(call.verb, call.axis) for call in calls]

    for stage, calls in enumerate(on_ranks(Mesh(stages, pp=stages), make(), use, **options("1f1b", microbatches))):
        window = stages - stage
        for sent, answered, lag in (("pp_forward", "pp_backward", 0), ("pp_backward", "pp_forward", window + 1)):
            waits = [at for at, call in enumerate(calls) if call == ("wait:send", sent)]
            answers = [at for at, call in enumerate(calls) if call == ("wait:recv", answered)]
            answered_in_time = [answer < wait for answer, wait in zip(answers[lag:], waits)]
            assert answered_in_time == [True] * max(0, len(answers) - lag) * (len(waits) > 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_asked_once_and_not_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(pipeline: NxDPPModel) -> Any:
        pipeline.run_train(**batch())
        pipeline.zero_grad()
        with monkeypatch.context() as patch:
            for question in ("computations", "tasks", "peer", "send_window"):
                patch.setattr(pipeline.training_schedule, question, None)
            return pipeline.run_train(**batch())

    *_, loss = sorted(map(str, on_ranks(Mesh(2, pp=2), make(), use, **options(name, 4))))
    assert loss.startswith("tensor(")


@pytest.mark.parametrize(
    "verb,place",
    [("send", "SF0 on stage 0 of 2"), ("recv", "RF0 on stage 1 of 2"), ("last", "last SF on stage 0 of 2")],
)
def test_errors_of_messages_name_the_message(verb: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stage waits in vain, and hears of it."""
    original = getattr(comm, "send" if verb == "last" else verb)

    def failing(x: torch.Tensor, channel: Any, **options: Any) -> Any:
        handle = original(x, channel, **options) if verb == "last" else None
        if channel.axis != "pp_forward":
            return handle or original(x, channel, **options)
        if handle is None:
            raise OSError("no route")

        def wait() -> Any:
            raise OSError("no route")

        return type("Failing", (), {"wait": staticmethod(wait)})()

    monkeypatch.setattr(comm, "send" if verb == "last" else verb, failing)
    with pytest.raises(OSError, match=f"^{place}: no route"):
        on_ranks(Mesh(2, pp=2), make(), lambda p: p.run_train(**batch(rows=2)), **options("1f1b", 1))


def test_a_transposed_tensor_arrives_with_the_strides_that_it_has_in_the_model() -> None:
    class Transposing(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1)
            for layer in self.layers:
                x = layer(x)
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            return x.transpose(0, 1)

    def use(pipeline: NxDPPModel) -> Any:
        (wires,) = pipeline.program(batch()).wires
        with comm.record() as calls:
            pipeline.run_train(**batch())
        wire = (wires[Kind.SEND_FORWARD] or wires[Kind.RECV_FORWARD])[0]
        return wire.shape, wire.order, {call.shape for call in calls if call.axis.startswith("pp_")}

    for shape, order, seen in on_ranks(Mesh(2, pp=2), make(Transposing), use, **options("1f1b", 4)):
        assert shape == (2, 6, 8) and order == (1, 0, 2) and seen == {(2, 6, 8)}
