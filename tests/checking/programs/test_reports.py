"""Whole reports, of programs that are right and of programs that are not: `expected_reports.txt`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.checking.report import Report
from tests.checking.programs import checked_models as models
from tests.support.reviewed import assert_reviewed, with_code_for_lines

pytestmark = pytest.mark.slow

MESH = {"dp": 2, "tp": 4}


class Program(torch.nn.Module):
    """Calls what it is given, without gradients."""

    def __init__(self, calls: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls(x.detach() * 2)
        return (x * self.weight).sum()


def only(axis: str, rank: int, call: Callable[[], Any]) -> None:
    if comm.rank(axis) == rank:
        call()


def groups(lists: list[list[int]], x: torch.Tensor, skipped: int = -1) -> None:
    group = comm.new_group(lists, "some")
    if group is not None and comm.current().rank != skipped:
        comm.all_reduce(x, group)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one calls more at the end": lambda x: [
        comm.all_reduce(x, "tp"),
        only("tp", 2, lambda: comm.all_gather(x, "tp", dim=0)),
    ],
    "one calls less between": lambda x: [
        only("dp", 0, lambda: comm.broadcast(x, "dp", src=1)),
        comm.all_reduce(x, "dp", op="min"),
    ],
    "one waits in another group": lambda x: [
        only("world", 3, lambda: comm.all_reduce(x, "dp")),
        comm.all_reduce(x, "tp"),
    ],
    "four in a circle": lambda x: [
        comm.all_reduce(x, axis) for axis in (("tp", "dp") if comm.rank("world") in (0, 5) else ("dp", "tp"))
    ],
    "two that wait for each other": lambda x: [
        comm.all_reduce(x, axis) for axis in (("tp", "world") if comm.rank("world") == 2 else ("world", "tp"))
    ],
    "two in another order": lambda x: [
        comm.all_reduce(x, "dp", op=op) for op in (("max", "sum") if comm.rank("dp") else ("sum", "max"))
    ],
    "a barrier and a sum": lambda x: comm.barrier("tp") if comm.rank("tp") == 3 else comm.all_reduce(x, "tp"),
    "a scatter of other pieces": lambda x: comm.reduce_scatter(x.repeat(2 * (1 + (comm.rank("dp") > 0))), "dp"),
    "an exchange of other dtypes": lambda x: comm.all_to_all(
        x.repeat(2).to(torch.float16 if comm.rank("tp") == 1 else torch.bfloat16), "tp"
    ),
    "other sources": lambda x: comm.broadcast(x, "tp", src=comm.rank("tp") // 2),
    "other pairs": lambda x: comm.permute(x, "tp", [(0, 1 + (comm.rank("tp") == 3))]),
    "no receive": lambda x: only("tp", 1, lambda: comm.send(x, "tp", dst=3)),
    "no send": lambda x: only("tp", 1, lambda: comm.recv(x, "tp", src=3, tag=2)),
    "one message too many": lambda x: [
        only("tp", 0, lambda: [comm.send(x, "tp", dst=2) for _ in range(3)]),
        only("tp", 2, lambda: [comm.recv(x, "tp", src=0) for _ in range(2)]),
    ],
    "another tag": lambda x: [
        only("tp", 0, lambda: comm.send(x, "tp", dst=2, tag=1)),
        only("tp", 2, lambda: comm.recv(x, "tp", src=0)),
    ],
    "a message of another shape": lambda x: [
        only("dp", 0, lambda: [comm.send(x, "dp", dst=1), comm.send(x[:1], "dp", dst=1)]),
        only("dp", 1, lambda: [comm.recv(x, "dp", src=0), comm.recv(x, "dp", src=0)]),
    ],
    "a ring": lambda x: [
        comm.send(x, "tp", dst=(comm.rank("tp") + 1) % 4),
        comm.recv(x, "tp", src=(comm.rank("tp") - 1) % 4),
    ],
    "groups of the user's": lambda x: groups([[0, 1, 2], [3, 6]], x),
    "a group without one of its ranks": lambda x: groups([[0, 1, 2], [3, 6]], x, skipped=6),
    "a rank that Python reads unseen": lambda x: (
        [0, 0, 0, comm.all_reduce][comm.rank("tp")] == 0 or comm.all_reduce(x, "tp")
    ),
    "a loop by rank": lambda x: [comm.all_reduce(x, "tp") for _ in range(1 + (comm.rank("world") == 5))],
}


def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()


def of_calls(name: str) -> Report:
    return spmd.check(lambda: Program(CALLS[name]), torch.ones(2), MESH, step=step, level=None)


def masters() -> Any:
    model = models.model_fn()
    return model, nxd.NeuronZero1Optimizer(list(model.parameters()), torch.optim.AdamW)


MODELS: dict[str, Callable[[], Report]] = {
    **{
        f"layers: {defect or 'right'}": lambda defect=defect: spmd.check(
            models.model_fn, models.example_inputs(), MESH, options={"defect": defect}
        )
        for defect in ("", "crash", "allowed", "number", "branch", "converted", "order")
    },
    "layers without types": lambda: spmd.check(models.model_fn, models.example_inputs(), MESH, level=None),
    "a value without types": lambda: spmd.check(
        models.model_fn, models.example_inputs(), MESH, options={"defect": "value"}, level=None
    ),
    "level L": lambda: spmd.check(models.model_fn, models.example_inputs(), {"tp": 2}, level="L"),
    "an optimizer of its own": lambda: spmd.check(masters, models.example_inputs(), MESH),
    "no reduction": lambda: spmd.check(models.model_fn, models.example_inputs(), MESH, step=models.step),
    "stages": lambda: spmd.check(models.pipeline, models.pipeline_inputs(), {"pp": 2}, options={"defect": "stages"}),
    "a pipeline": lambda: spmd.check(models.pipeline, models.pipeline_inputs(), {"pp": 2, "tp": 2}),
    "with values": lambda: spmd.check(models.model_fn, models.example_inputs(), {"tp": 2}, numeric=True),
    "no model": lambda: spmd.check(lambda: None, models.example_inputs(), MESH),
    "inputs that do not fit": lambda: spmd.check(models.model_fn, {"y": models.example_inputs()}, MESH),
    "experts and sequences": lambda: spmd.check(
        models.model_fn, models.example_inputs(), {"dp": 2, "cp": 2, "ep": 2, "edp": 2}
    ),
    "no time": lambda: spmd.check(models.model_fn, models.example_inputs(), MESH, time_limit=0.0),
}


def words(report: Report) -> str:
    text = re.sub(r"\b\d+ operators", "N operators", re.sub(r"\d+(\.\d)? s\b", "N s", report.details()))
    facts = f"{report.ok=} ranks={[list(p.ranks) for p in report.problems]} kinds={[p.kind for p in report.problems]}"
    lines = [line for problem in report.problems for line in problem.lines]
    text = "\n".join([text, facts.replace("report.", ""), *lines])
    return with_code_for_lines(text, models.__file__, __file__)


def test_collectives_and_messages() -> None:
    assert_reviewed(Path(__file__).with_name("expected_calls.txt"), {name: words(of_calls(name)) for name in CALLS})


def test_models() -> None:
    assert_reviewed(Path(__file__).with_name("expected_reports.txt"), {n: words(make()) for n, make in MODELS.items()})
