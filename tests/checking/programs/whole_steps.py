"""Training steps that users write: under the checker, and with values, on ranks against one process.

A step is a function `step(model, optimizer, x)`, the same for the ranks and for one process. What it leaves in the
parameters says whether it is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.gradients import guards
from neuronx_dist.mesh import Mesh
from neuronx_dist.weights.shard_spec import spec_of

FEATURES, INNER, BATCH = 4, 8, 8
DP, TP = {"dp": 2}, {"tp": 2}

Step = Callable[[Any, Any, torch.Tensor], Any]


class Net(nn.Module):
    """Every rank holds all of it; a batch of data on each dp rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, INNER, dtype=torch.float64)
        self.down = nn.Linear(INNER, FEATURES, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Sharded(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        kinds: dict[str, Any] = dict(bias=False, dtype=torch.float64)
        self.up = nxd.ColumnParallelLinear(FEATURES, INNER, gather_output=False, **kinds)
        self.down = nxd.RowParallelLinear(INNER, FEATURES, input_is_parallel=True, **kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Program(NamedTuple):
    """`refused`: a part of the message that refuses it; "": it is right. `assumed`: a part of an assumption."""

    step: Step
    build: Callable[[], Any]
    mesh: dict[str, int]
    refused: str
    assumed: str

    @property
    def file(self) -> str:
        return self.step.__code__.co_filename


PROGRAMS: dict[str, Program] = {}


def program(
    build: Callable[[], Any] = Net, mesh: dict[str, int] = DP, *, refused: str = "", assumed: str = ""
) -> Callable[[Step], Step]:
    """Registers a step under its name. What is neither refused nor assumed is right."""

    def register(step: Step) -> Step:
        PROGRAMS[step.__name__] = Program(step, build, mesh, refused, assumed)
        return step

    return register


def names_in(module: Any) -> list[str]:
    """The names of the programs of a module."""
    return [name for name, program in PROGRAMS.items() if program.file == module.__file__]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(program: Program) -> spmd.Report:
    x = torch.zeros(BATCH // program.mesh.get("dp", 1), FEATURES, dtype=torch.float64)
    return spmd.check(program.build, x, program.mesh, step=program.step, optimizer=torch.optim.SGD)


def _fill(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        spec = spec_of(param)
        shape = spec.full_shape if spec.is_sharded else tuple(param.shape)
        count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        whole = torch.sin(1.3 * count + number).view(shape)
        part = spec.local_slice(whole, comm.rank(spec.axis)) if spec.axis is not None else whole
        with torch.no_grad():
            param.copy_(part)


def _run(program: Program) -> dict[str, torch.Tensor]:
    """The parameters after a step on this rank."""
    built = program.build()
    model, optimizer = built if isinstance(built, tuple) else (built, None)
    _fill(model)
    if isinstance(optimizer, nxd.NeuronZero1Optimizer):
        optimizer.init_zero()
    x = torch.cos(torch.arange(BATCH * FEATURES, dtype=torch.float64)).view(BATCH, FEATURES)
    x = x.chunk(comm.size("dp"))[comm.rank("dp")].clone()
    program.step(model, optimizer if optimizer is not None else sgd(model), x)
    return {name: param.detach() for name, param in model.named_parameters()}


def error(program: Program) -> float:
    """Returns the relative distance of the parameters on the ranks from those of one process."""
    with comm.as_rank(Mesh(1), 0):
        expected = _run(program)
    sizes = program.mesh
    mesh = Mesh(sizes.get("dp", 1) * sizes.get("tp", 1), tp=sizes.get("tp", 1))
    with comm.as_rank(mesh, 0):
        built = program.build()
        specs = {n: spec_of(p) for n, p in (built[0] if isinstance(built, tuple) else built).named_parameters()}
    worst = 0.0
    with mock.patch.object(guards, "refuse_not_elementwise"):  # which would stop the wrong programs
        results = threads.run(mesh, _run, program, timeout=60.0)
    for rank, params in enumerate(results):
        for name, value in params.items():
            spec, want = specs[name], expected[name]
            if spec.axis is not None:
                want = spec.local_slice(want, mesh.coordinate(spec.axis, rank))
            worst = max(worst, float((value - want).norm() / want.norm()))
    return worst


def verify(name: str) -> None:
    """The checker says of a program what running it shows."""
    program = PROGRAMS[name]
    report, distance = check(program), error(program)
    wrong = bool(program.refused or program.assumed)
    assert distance > 1e-4 if wrong else distance < 1e-10, distance
    assert report.ok is not bool(program.refused), str(report)
    if program.refused:
        assert re.search(program.refused, str(report)), str(report)
    elif program.assumed:
        assert any(program.assumed in line and line.startswith(program.file) for line in report.assumed), report.assumed
    else:
        assert report.assumed == []
