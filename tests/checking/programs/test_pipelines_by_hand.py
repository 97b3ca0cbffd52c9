"""Steps that send and receive by themselves: types travel with messages; deadlocks and gradients are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, spmd

STAGES, MICROBATCHES, ROWS, HIDDEN = 3, 4, 8, 6


class Stage(nn.Module):
    """A feed-forward layer, divided over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(HIDDEN, 8, gather_output=False)
        self.down = nxd.RowParallelLinear(8, HIDDEN, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Pipeline:
    """One step of a stage; `gpipe` or `one_f_one_b`. Messages go over `axis`, synchronously or not."""

    def __init__(self, schedule: str, axis: str = "pp", async_op: bool = False, bug: str = "") -> None:
        self.schedule, self.axis, self.async_op, self.bug = schedule, axis, async_op, bug

    def __call__(self, model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        stage, last = comm.rank("pp"), comm.size("pp") - 1
        pieces, active = x.chunk(MICROBATCHES), []

        def forward(index: int) -> None:
            h = pieces[index] if stage == 0 else self.receive(pieces[index], -1).requires_grad_()
            y = model(h)
            if stage < last:
                self.send(y, +1)
            active.append((h, y))

        def backward() -> None:
            h, y = active.pop(0)
            if stage == last:
                (y.square().mean() / MICROBATCHES).backward()
            else:
                gradient = self.receive(y, +1)
                y.backward(comm.all_reduce(gradient, "dp") if self.bug == "summed over dp" else gradient)
            if stage:
                self.send(h.grad, -1)

        optimizer.zero_grad()
        if self.bug == "gradients first" and stage == 0:
            self.receive(x[:2], +1)
        warmup = MICROBATCHES if self.schedule == "gpipe" else last - stage
        for index in range(warmup):
            forward(index)
        for index in range(warmup, MICROBATCHES):
            forward(index)
            backward()
        for _ in range(len(active) - (self.bug == "a backward is missing" and stage == 1)):
            backward()
        if self.bug != "not reduced":
            nxd.reduce_gradients(model)
        optimizer.step()

    def _peer(self, step: int) -> int:
        if self.axis == "pp":
            return comm.rank("pp") + step
        return comm.rank("world") + step * (comm.size("world") // comm.size("pp"))

    def send(self, x: torch.Tensor, step: int) -> None:
        comm.send(x, self.axis, dst=self._peer(step))

    def receive(self, like: torch.Tensor, step: int) -> torch.Tensor:
        buffer = torch.empty_like(like[:1] if self.bug == "another shape" and step > 0 else like)
        result = comm.recv(buffer, self.axis, src=self._peer(step), async_op=self.async_op)
        return result.wait() if self.async_op else result


RIGHT = {
    "gpipe": Pipeline("gpipe"),
    "1f1b": Pipeline("1f1b"),
    "ranks of the world": Pipeline("1f1b", axis="world"),
    "asynchronous": Pipeline("1f1b", async_op=True),
}
LAYOUTS = [dict(pp=STAGES, dp=2), dict(pp=2, dp=2, tp=2)]


def check(step: Callable[..., Any], mesh: dict[str, int], **options: Any) -> Any:
    return spmd.check(Stage, torch.zeros(ROWS, HIDDEN), mesh, step=step, **options)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str, mesh: dict[str, int]) -> None:
    report = check(RIGHT[name], mesh)
    assert report.ok, report


@pytest.mark.parametrize("name", RIGHT)
def test_they_train_as_one_process(name: str) -> None:
    """The gradients of all stages, in float64, on threads: right programs are right."""
    mesh = Mesh(STAGES * 2, pp=STAGES)
    data = torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def stages(numbers: range) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Stage().double() for _ in range(STAGES)][numbers.start : numbers.stop]

    def rank() -> dict[str, torch.Tensor]:
        stage = comm.rank("pp")
        (model,) = stages(range(stage, stage + 1))
        RIGHT[name](model, torch.optim.SGD(model.parameters(), lr=0.1), data[comm.rank("dp")])
        return {f"{stage}.{key}": param.detach() for key, param in model.named_parameters()}

    def one_process() -> dict[str, torch.Tensor]:
        model = nn.Sequential(*stages(range(STAGES)))
        model(data.flatten(0, 1)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return {key: param.detach() for key, param in model.named_parameters()}

    (expected,) = comm.threads.run(Mesh(1), one_process)
    for weights in comm.threads.run(mesh, rank):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_values_are_not_compared_with_one_process_which_has_one_stage() -> None:
    report = check(RIGHT["1f1b"], LAYOUTS[1], numeric=True)
    assert report.ok and "the step sends between stages that one process does not have" in report.details(), report


WRONG = {
    "gradients first": "this message is never sent: stage 0 waits for message 1 of stage 1, at .*; stage 1 waits for",
    "a backward is missing": "stage 0 waits for message 4 of stage 1, at ",
    "summed over dp": r"comm.all_reduce\(gradient .* its pieces along dim 0 are added up",
    "not reduced": "the parts are not added up\n  repair: reduce_gradients",
    "another shape": "sends|shape|expects",
}


@pytest.mark.each_value
@pytest.mark.parametrize("bug", WRONG)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_wrong_programs_are_refused(schedule: str, bug: str) -> None:
    report = check(Pipeline(schedule, bug=bug), LAYOUTS[0])
    assert not report.ok
    with pytest.raises(AssertionError, match=WRONG[bug]):
        raise AssertionError(str(report))


@pytest.mark.parametrize(("given", "expected"), [(spmd.S(0), spmd.V), (spmd.R, spmd.R)])
def test_messages_along_an_axis_of_one_stage(given: Any, expected: Any) -> None:
    """A ring: the received rows vary over the axis; values that are equal on all ranks stay equal."""

    def ring(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        count, rank = comm.size("cp"), comm.rank("cp")
        comm.send(x, "cp", dst=(rank + 1) % count)
        received = comm.recv(torch.empty_like(x), "cp", src=(rank - 1) % count)
        spmd.assert_type(received, {"cp": expected})

    report = spmd.check(nn.Identity, torch.zeros(4, 6), {"cp": 4}, step=ring, in_types={"cp": given})
    assert report.ok, report
