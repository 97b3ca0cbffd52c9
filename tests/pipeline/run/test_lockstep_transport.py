"""Stages in lockstep, where ranks have no messages: ranks as threads that may not send, and what one process computes.

That each task is one XLA program, and each transfer one that is the same on all ranks, is shown in tests/xla.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.pipeline.run.executor import Executor
from neuronx_dist.pipeline.run.lockstep_transport import Lockstep
from neuronx_dist.pipeline.schedule import Inference, Kind, OneFOneB, Task, WrittenSchedule, rounds, simulate
from tests.pipeline import test_parity
from tests.support import pipeline_models
from tests.support.paths import file_name
from tests.support.pipeline_models import (
    HIDDEN,
    SEQ,
    Block,
    Model,
    batch,
    check_parity,
    cut,
    error,
    make,
    on_ranks,
    reference,
    train,
)

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

PP2 = Mesh(2, pp=2)


class Programs(threading.local):
    """Contents of each rank's programs, as its thread runs them."""

    def __init__(self) -> None:
        self.depth = 0
        self.found: list[list[str]] = [[]]

    def cut(self) -> None:
        if self.found[-1]:
            self.found.append([])

    @contextmanager
    def own(self) -> Iterator[None]:
        if not self.depth:
            self.cut()
        self.depth += 1
        yield
        self.depth -= 1
        if not self.depth:
            self.cut()


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Makes a backend of threads that has no messages; tasks and permutations are noted in the program they are in."""
    noted = Programs()

    def refuse(*_: Any) -> Any:
        raise AssertionError("a message between two ranks")

    def noting(original: Any, what: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            noted.found[-1].append(str(args[0]) if isinstance(args[0], Task) else f"{what} {list(args[2])}")
            return original(self, *args)

        return call

    monkeypatch.setattr(threads.ThreadsBackend, "has_messages", False)
    monkeypatch.setattr(threads.ThreadsBackend, "own_program", lambda self: noted.own())
    for verb in ("start_send", "start_recv"):
        monkeypatch.setattr(threads.ThreadsCommunicator, verb, refuse)
    permute = noting(threads.ThreadsCommunicator.start_permute, "permute")
    monkeypatch.setattr(threads.ThreadsCommunicator, "start_permute", permute)
    monkeypatch.setattr(Executor, "_compute", noting(Executor._compute, "task"))
    return noted


# --- rounds as data ---------------------------------------------------------------------------------------------------

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 5, 8, 16)]


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_1f1b_in_rounds(stages: int, microbatches: int) -> None:
    schedule = OneFOneB(stages, microbatches)
    found = rounds(schedule)
    assert len(found) == 2 * (microbatches + stages - 1)
    peaks = []
    for stage in range(stages):
        tasks = [step.tasks[stage] for step in found if step.tasks[stage] is not None]
        assert tasks == [task for task in schedule.tasks(stage) if task.kind in (Kind.FORWARD, Kind.BACKWARD)]
        open_now = [sum(1 if task.kind is Kind.FORWARD else -1 for task in tasks[:n]) for n in range(len(tasks) + 1)]
        peaks.append(max(open_now))
    assert peaks == simulate(schedule).peak_in_flight == [min(stages - s, microbatches) for s in range(stages)]
    when = {(stage, task): number for number, step in enumerate(found) for stage, task in enumerate(step.tasks) if task}
    for (stage, task), number in when.items():
        before = stage - 1 if task.kind is Kind.FORWARD else stage + 1
        if 0 <= before < stages:
            assert when[before, task] < number
            assert found[when[before, task]][1 if task.kind is Kind.FORWARD else 2]


def test_inference_in_rounds() -> None:
    found = rounds(Inference(3, 4))
    assert len(found) == 4 + 3 - 1 and not any(step.backward for step in found)
    assert [step.forward for step in found] == [True] * 5 + [False]


def test_prints_compactly() -> None:
    found = rounds(OneFOneB(2, 2))
    assert list(map(str, found)) == ["F0 - >", "F1 F0 >", "- B0 <", "B0 F1", "- B1 <", "B1 -"]


def test_a_deadlock_says_where() -> None:
    with pytest.raises(RuntimeError, match="deadlock: stage 0 at B0, stage 1 at F1"):
        rounds(WrittenSchedule("F0 B0 F1 B1", "F0 F1 B0 B1"))


# --- what comes out of it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_any_number_of_stages_and_microbatches(pp: int, microbatches: int, tied: bool) -> None:
    check_parity(Mesh(pp, pp=pp), make(tied=tied), batch(rows=10), microbatches)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("pp,microbatches", [(4, 4), (2, 1)])  # in turns, and the other way round in test_parity
@pytest.mark.parametrize("model_class", test_parity.MODELS, ids=lambda c: c.__name__)
def test_whatever_lies_between_layers(model_class: Any, pp: int, microbatches: int) -> None:
    test_parity.test_whatever_lies_between_layers(model_class, pp, microbatches)


class Uneven(Model):
    """Boundary 0 carries one tensor, boundary 1 floats with and without a gradient and integers, boundary 2 three of
    one shape, of which two are one in memory. The second layer has a parameter that nothing uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].idle = nn.Parameter(torch.randn(3))
        self.layers[1].still = nn.Parameter(torch.randn(3), requires_grad=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        best, mean = x.argmax(-1), x.detach().mean(-1)
        x = self.layers[1](x) + best[..., None] * mean[..., None]
        same = x.detach()
        return self.layers[3](self.layers[2](x)) * same.sigmoid() + x


def test_boundaries_that_differ() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        with comm.record() as calls:
            pipeline.run_train(**batch())
        return [(call.axis, call.shape, call.dtype) for call in calls if call.verb == "permute"]

    model = make(Uneven)
    check_parity(Mesh(4, pp=4), model, batch(), 4)
    options = {"num_microbatches": 4, "output_loss_value_spec": True}
    found = on_ranks(Mesh(4, pp=4), model, use, **options)
    assert found == [found[0]] * 4
    schedule = rounds(OneFOneB(4, 4))
    forward, backward = sum(step.forward for step in schedule), sum(step.backward for step in schedule)
    wide, flat = (2, SEQ, HIDDEN), (2, SEQ)
    assert Counter(found[0]) == {
        ("pp_forward", wide, torch.float64): 3 * forward,
        ("pp_forward", flat, torch.float64): forward,
        ("pp_forward", flat, torch.int64): forward,
        ("pp_backward", wide, torch.float64): 2 * backward,
    }


@pytest.mark.parametrize("model_class", [Model, Uneven])
def test_three_steps_of_sgd(model_class: Any) -> None:
    """With weight decay and momentum: a gradient of zeros would move a parameter that has none."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    model = make(model_class)
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(whole.parameters(), **options)
    for seed in range(3):
        optimizer.zero_grad()
        torch.stack([whole(**piece) for piece in cut(batch(seed=seed), 4)]).mean().backward()
        optimizer.step()

    def use(pipeline: NxDPPModel) -> Any:
        optimizer = torch.optim.SGD(pipeline.local_parameters(), **options)
        for seed in range(3):
            optimizer.zero_grad()
            pipeline.run_train(**batch(seed=seed))
            optimizer.step()
        return pipeline.local_state_dict()

    expected, seen = whole.state_dict(), set()
    for state in on_ranks(Mesh(4, pp=4), model, use, num_microbatches=4, output_loss_value_spec=True):
        seen |= state.keys()
        assert all(error(value, expected[name]) < 1e-10 for name, value in state.items())
    assert seen == expected.keys()


def test_gradients_accumulate_over_runs_and_unused_ones_stay_none() -> None:
    model = make(Uneven)
    _, once = reference(model, batch(), 2)

    def use(pipeline: NxDPPModel) -> Any:
        for _ in range(2):
            pipeline.run_train(**batch())
            for param in pipeline.local_parameters():
                if param.grad is not None:
                    param.grad = param.grad.clone()  # a reduced gradient refuses to be reduced again
        return {name: param.grad for name, param in pipeline.local_named_parameters()}

    for grads in on_ranks(PP2, model, use, num_microbatches=2, output_loss_value_spec=True):
        idle = {name for name, grad in grads.items() if grad is None}
        assert idle == {"layers.1.idle", "layers.1.still"} & grads.keys()
        assert all(error(grad, 2 * once[name]) < 1e-10 for name, grad in grads.items() if grad is not None)


def test_gradients_in_fp32_accumulators(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1's `main_grad` is filled in the place of `grad`, which its hook clears."""
    model = make(Uneven).to(torch.bfloat16)

    def use(pipeline: NxDPPModel) -> Any:
        params = list(pipeline.local_parameters())
        optimizer = NeuronZero1Optimizer(params, torch.optim.SGD, lr=0.1, use_grad_acc_hook=True)
        idle = None
        for seed in range(2):
            optimizer.zero_grad()
            pipeline.run_train(**batch(seed=seed))
            assert all(param.grad is None for param in params)
            idle = [n for n, p in pipeline.local_named_parameters() if getattr(p, "main_grad", None) is None]
            optimizer.step()
        return idle, {name: value.clone() for name, value in pipeline.local_state_dict().items()}

    options = {"num_microbatches": 4, "output_loss_value_spec": True, "use_zero1_optimizer": True}
    found = on_ranks(PP2, model, use, **options)
    monkeypatch.undo()
    for (idle, state), (expected_idle, expected) in zip(found, on_ranks(PP2, model, use, **options)):
        assert idle == expected_idle
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert found[0][0] == ["layers.1.idle", "layers.1.still"] and found[1][0] == []


def test_evaluation_and_losses_on_all_ranks() -> None:
    model = make()
    expected, _ = reference(model, batch(), 4)

    def use(pipeline: NxDPPModel) -> Any:
        piece = cut(batch(), 2)[comm.rank("dp")]
        values = pipeline.run_eval(**piece), pipeline.run_train(**piece)
        assert all(p.grad is not None for p in pipeline.local_parameters())
        return values

    options = {"num_microbatches": 2, "output_loss_value_spec": True, "broadcast_and_average_loss": True}
    for values in on_ranks(Mesh(4, pp=2), model, use, **options):
        assert all(error(value, expected) < 1e-10 for value in values)


def test_evaluation_leaves_no_gradients_and_returns_outputs() -> None:
    model = make(test_parity.DictOutput)

    def use(pipeline: NxDPPModel) -> Any:
        outputs = pipeline.run_eval(**batch())
        assert all(param.grad is None for param in pipeline.parameters())
        return outputs

    results = on_ranks(Mesh(3, pp=3), model, use, num_microbatches=2)
    assert results[:2] == [None, None]
    for found, piece in zip(results[2], cut(batch(), 2)):
        assert error(found["loss"], model(**piece)["loss"]) < 1e-10


def test_frozen_stages_send_no_gradients() -> None:
    model = make()
    for part in (model.embed, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    check_parity(PP2, model, batch(), 4)
    check_parity(Mesh(4, pp=4), model, batch(), 4)


def test_errors_name_task_and_stage() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if type(x) is torch.Tensor:
                self.countdown -= 1
                if self.countdown < 0:
                    raise IndexError("no such thing")
            return super().forward(x)

    model = make()
    model.layers[2] = Failing().double()
    model.layers[2].countdown = 1
    with pytest.raises(
        IndexError, match=rf"^F1 on stage 1 of 2: layers_2 \(.*{file_name(pipeline_models)}:\d+\): no such thing"
    ):
        train(PP2, model, batch(), 4)


# --- which programs it would be ---------------------------------------------------------------------------------------


def test_each_task_and_each_transfer_is_a_program(programs: Programs) -> None:
    """Two busy stages compute at the same time; a permutation is alone, and equal on all ranks."""

    def use(pipeline: NxDPPModel) -> Any:
        programs.cut()
        programs.found.clear()
        programs.found.append([])
        pipeline.run_train(**batch())
        return [" ".join(found) for found in programs.found if found]

    first, last = on_ranks(PP2, make(), use, num_microbatches=2, output_loss_value_spec=True)
    ahead, back = "permute [(0, 1)]", "permute [(1, 0)]"
    assert first == ["F0", ahead, "F1", ahead, back, "B0", back, "B1"]
    assert last == [ahead, "F0", ahead, "B0", back, "F1", "B1", back]


def test_gradients_are_there_before_each_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first would make them, and the others add to them: two programs."""
    missing: list[Any] = []
    checked: list[Task] = []
    original = Lockstep.run

    def run(self: Lockstep, compute: Any) -> None:
        def computing(task: Task) -> None:
            if task.kind is Kind.BACKWARD:
                checked.append(task)
                missing.extend(param for param in self._parameters if param.grad is None)
            compute(task)

        original(self, computing)

    monkeypatch.setattr(Lockstep, "run", run)
    on_ranks(PP2, make(), lambda p: p.run_train(**batch()), num_microbatches=4, output_loss_value_spec=True)
    assert missing == [] and len(checked) == 8


def test_dummies_are_made_once() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        found = []
        for _ in range(2):
            pipeline.run_train(**batch())
            pipeline.zero_grad()
            transfers = pipeline.program(batch()).transfers
            assert transfers is not None
            found.append({key: id(value) for key, value in transfers.dummies.items()})
        assert found[0] == found[1]
        return len(found[0])

    assert on_ranks(PP2, make(), use, num_microbatches=4, output_loss_value_spec=True) == [1, 1]
