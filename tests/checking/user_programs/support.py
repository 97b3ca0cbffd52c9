"""Training programs as users write them, right ones and buggy ones: what execution says of each, and what the checker.

    @programs(mesh={"dp": 2}, inputs=dict(x=normal(8, 4), y=normal(8, 1)),
              bugs={"no_mean": "the gradients are summed over dp and not divided by its size"})
    def averaged_by_hand(bug):
        def step(model, optimizer, batch):
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, "dp")
                if bug != "no_mean":
                    p.grad /= comm.size("dp")
            optimizer.step()
            optimizer.zero_grad()

        return dict(model_fn=lambda: nn.Linear(4, 1), step=step)

registers `averaged_by_hand`, which is right, and `averaged_by_hand.no_mean`, which is not.

    python -m tests.checking.user_programs          runs all, asks the checker, and prints the figures
    python -m tests.checking.user_programs NAME     shows what was found of the programs of that name
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuronx_dist import NeuronZero1Optimizer, comm, reduce_gradients, spmd
from neuronx_dist.checking.programs.played import ReadsValues, call_model, find_loss
from neuronx_dist.checking.report import Report
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.model import NxDPPModel
from neuronx_dist.spmd import R, S, Shard, ShardSpec, V, spec_of
from neuronx_dist.spmd.axes import mesh_of
from neuronx_dist.weights.partial_model import parameter_names, partial_model
from neuronx_dist.weights.shard_spec import gather_full

EQUAL = 1e-9  # relative difference of what a right program leaves behind, at most
DIFFERENT = 1e-6  # of what a buggy one leaves behind, at least
STEPS = 3
PROGRAMS: dict[str, Program] = {}
_MISTAKES = (NameError, AttributeError, SyntaxError, ImportError)  # of who wrote the program, not of what it does

Draw = Callable[[torch.Generator], torch.Tensor]  # the global value of an input, for one step


@dataclass(frozen=True)
class Program:
    """One program, right or with one bug.

    Attributes:
        name: "NAME", or "NAME.BUG".
        bug: what is wrong with it, in a line; "" if it is right.
        mesh: sizes of the axes of the ranks.
        inputs: draws the global value of each input; every step draws anew.
        model_fn: builds the model of this rank; or `(model, optimizer)`.
        step: `step(model, optimizer, inputs)`: a whole step. What it returns (a tensor, or a dict of tensors) is
            compared too. None: the loss that the model returns, `reduce_gradients`, the optimizer's step.
        optimizer: `optimizer(params)`; None: SGD.
        in_types: as for `spmd.check`. An input is cut along dp on dim 0, and as `in_types` says: S(dim), V (dim 0), R.
        sharded: `{name: (axis, dim)}` of parameters and buffers whose shards no ShardSpec states.
        final: `final(model)`: the tensors that are compared after the last step, by name, on this rank. None: all
            parameters, gathered, and the buffers of the state dict.
        fill: the harness sets the weights. False: they are as `model_fn` draws them, from a Generator of its own: the
            default one belongs to all ranks together, so that no right program draws from it.
        module: in which it is written.
    """

    name: str
    bug: str
    mesh: Mapping[str, int]
    inputs: Mapping[str, Draw]
    model_fn: Callable[[], Any]
    step: Callable[[Any, Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    in_types: Any = None
    sharded: Mapping[str, tuple[Any, int]] = field(default_factory=dict)
    final: Callable[[nn.Module], Mapping[str, torch.Tensor]] | None = None
    fill: bool = True
    module: str = ""

    @property
    def right(self) -> bool:
        return not self.bug

    @property
    def original(self) -> Program | None:
        """The right program of which this buggy one is an edit."""
        return PROGRAMS.get(self.name.partition(".")[0]) if self.bug else None


def programs(
    *,
    mesh: Mapping[str, int],
    inputs: Mapping[str, Draw],
    bugs: Mapping[str, str] | None = None,
    right: bool = True,
    **options: Any,
) -> Callable[[Callable[[str | None], Mapping[str, Any]]], Any]:
    """Registers what `make(bug)` returns, without a bug (unless `right` is False) and with each of `bugs`.

    `make` returns `model_fn` and whatever other attributes of a Program depend on the bug, as a dict.
    """

    def register(make: Callable[[str | None], Mapping[str, Any]]) -> Any:
        for bug in ([None] if right else []) + list(bugs or {}):
            name = make.__name__ + (f".{bug}" if bug else "")
            assert name not in PROGRAMS, f"there are two programs {name}"
            text = (bugs or {})[bug] if bug else ""
            PROGRAMS[name] = Program(name, text, mesh, inputs, **{**options, **make(bug)}, module=make.__module__)
        return make

    return register


# --- inputs ---


def normal(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(below: int, *shape: int, ignored: float = 0.0, ignore_index: int = -100) -> Draw:
    """Numbers below a bound; a part of them, more of it in later rows, is `ignore_index`."""

    def draw(generator: torch.Generator) -> torch.Tensor:
        value = torch.randint(below, shape, generator=generator)
        if ignored:
            rows = torch.linspace(0.0, 2 * ignored, shape[0]).view(-1, *[1] * (len(shape) - 1))
            value = value.masked_fill(torch.rand(shape, generator=generator) < rows, ignore_index)
        return value

    return draw


def _kinds(program: Program, name: str, value: torch.Tensor) -> dict[Any, Any]:
    given = program.in_types or {}
    given = given.get(name, {}) if set(given) & set(program.inputs) else given
    return {"dp": S(0) if value.dim() else R, **given}


def _own_part(program: Program, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of the global value of an input."""
    for axis, kind in _kinds(program, name, value).items():
        dim = 0 if kind is V else kind.dim if isinstance(kind, Shard) else None
        if dim is not None and comm.size(axis) > 1:
            assert value.shape[dim] % comm.size(axis) == 0, f"{name}: dim {dim} does not divide by {axis}"
            value = value.chunk(comm.size(axis), dim)[comm.rank(axis)]
    return value.clone()


def _inputs(program: Program, step: int) -> dict[str, torch.Tensor]:
    drawn = {}
    for name, draw in program.inputs.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        drawn[name] = _own_part(program, name, draw(generator))
    return drawn


def descend(loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of training, with gradients averaged over the data."""
    optimizer.zero_grad()
    loss.backward()
    reduce_gradients(model)
    optimizer.step()


# --- execution ---


def _layout(program: Program, name: str, x: torch.Tensor) -> ShardSpec:
    if name in program.sharded:
        axis, dim = program.sharded[name]
        shape = list(x.shape)
        shape[dim] *= comm.size(axis)
        return ShardSpec(axis, dim, 1, comm.size(axis), tuple(shape))
    return spec_of(x)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters, by their first names in the whole model."""
    names = parameter_names(model)
    local = partial_model(model).local_named_parameters()
    return {names[id(param)][0] if id(param) in names else name: param for name, param in local}


def _fill(program: Program, model: nn.Module) -> None:
    """The same whole weights on any mesh, of which each rank keeps its slice."""
    for name, param in _parameters(model).items():
        spec = _layout(program, name, param)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(spec.unpadded_shape, generator=generator, dtype=torch.float64)
        whole = whole * 0.4 if whole.dim() > 1 else 1 + 0.2 * whole
        with torch.no_grad():
            param.copy_(spec.local_slice(whole, comm.rank(spec.axis)) if spec.axis is not None else whole)


def _final(program: Program, model: nn.Module) -> dict[str, torch.Tensor]:
    if program.final is not None:
        return {name: x.detach().clone() for name, x in program.final(model).items()}
    tensors = dict(_parameters(model)) | {
        name: x for name, x in model.state_dict(keep_vars=True).items() if not isinstance(x, nn.Parameter)
    }
    return {name: gather_full(x, _layout(program, name, x)).clone() for name, x in tensors.items()}


def _train(program: Program) -> dict[str, torch.Tensor]:
    """A few steps on this rank; what they leave behind, whole."""
    built = program.model_fn()
    model, optimizer = built if isinstance(built, tuple) else (built, None)
    model.double()  # parallel layers are made in fp32, whatever the default
    if program.fill:
        _fill(program, model)
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.init_zero()
    if optimizer is None:
        trained = [param for param in _parameters(model).values() if param.requires_grad]
        optimizer = (program.optimizer or (lambda params: torch.optim.SGD(params, lr=0.1)))(trained)
    returned: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        result = (program.step or _default_step)(model, optimizer, _inputs(program, step))
        results = result if isinstance(result, Mapping) else {"": result}
        for name, x in results.items():
            if isinstance(x, torch.Tensor):
                returned[f"returned {name} of step {step}"] = x.detach().clone()
    return {**_final(program, model), **returned}


def _default_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    if isinstance(model, NxDPPModel):
        model.run_train(**inputs)
    else:
        find_loss(call_model(model, inputs)).backward()
        reduce_gradients(model, average_over_data=not isinstance(optimizer, NeuronZero1Optimizer))
    optimizer.step()


@contextmanager
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Execution:
    """Results of running a program on its ranks and in one process.

    Attributes:
        difference: largest relative difference of what is left behind, over tensors and ranks; inf if the ranks fail.
        what: the tensor and the rank where it is, or the error.
    """

    difference: float
    what: str

    def confirms(self, program: Program) -> bool:
        return self.difference <= EQUAL if program.right else self.difference > DIFFERENT


@cache
def execute(name: str) -> Execution:
    """Compares a program on ranks that are threads with the same code and the global batch in one process."""
    program = PROGRAMS[name]
    with _float64():
        (expected,) = comm.threads.run(Mesh(1), _train, program)
        try:
            ranks = comm.threads.run(mesh_of(program.mesh), _train, program, timeout=15.0)
        except _MISTAKES:
            raise
        except Exception as error:  # what it is depends on the bug
            return Execution(float("inf"), f"{type(error).__name__}: {error}")
    worst = Execution(0.0, "")
    for rank, held in enumerate(ranks):
        for key, x in held.items():
            value = _difference(x, expected[key])
            if value > worst.difference:
                worst = Execution(value, f"{key} on rank {rank}")
    return worst


def _difference(x: torch.Tensor, expected: torch.Tensor) -> float:
    if x.shape != expected.shape:
        return float("inf")
    difference = float((x.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return float("inf") if difference != difference else difference


# --- the checker ---


@dataclass(frozen=True)
class Verdict:
    """The answer of `spmd.check` for a program.

    Attributes:
        outcome: "accepted", "refused" or "crashed": it raised, or reports an error of a program that runs without one.
        message: the first problem, or the exception.
        assumed: assumptions and trusted declarations, as the report lists them.
    """

    outcome: str
    message: str
    assumed: tuple[str, ...]
    seconds: float
    report: Report | None

    @property
    def line(self) -> str:
        return self.message.strip().partition("\n")[0]


@cache
def verdict(name: str) -> Verdict:
    program = PROGRAMS[name]
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = spmd.check(
                program.model_fn,
                lambda: _example(program),
                mesh=program.mesh,
                step=program.step,
                optimizer=program.optimizer,
                in_types=program.in_types,
            )
    except Exception as error:  # a finding, whatever it is
        seconds = time.perf_counter() - start
        return Verdict("crashed", f"{type(error).__name__}: {error}", (), seconds, None)
    assumed = (*report.assumed, *report.trusted)
    message = report.problems[0].message if report.problems else ""
    seconds = time.perf_counter() - start
    return Verdict(_outcome(name, report), message, assumed, seconds, report)


def _outcome(name: str, report: Report) -> str:
    if report.ok:
        return "accepted"
    first = report.problems[0] if report.problems else None
    failed = first is not None and first.kind == "program" and not isinstance(first.error, ReadsValues)
    return "crashed" if failed and execute(name).difference < float("inf") else "refused"


def _example(program: Program) -> dict[str, torch.Tensor]:
    """Inputs of one rank and one step, as `spmd.check` is given them."""
    with comm.as_rank(mesh_of(program.mesh), 0):
        drawn = _inputs(program, 0)
    return {name: x.float() if x.is_floating_point() else x for name, x in drawn.items()}


def assumed_at_the_bug(program: Program) -> list[str]:
    """Lines that a reader is told to look at, and that of the right original are not: those of the bug."""
    if program.original is None or verdict(program.original.name).outcome != "accepted":
        return []
    others, here = verdict(program.original.name).assumed, str(Path(__file__).parent)
    return [text for text in verdict(program.name).assumed if text not in others and text.startswith(here)]


def refused_as_its_original(program: Program) -> bool:
    """Whether the right program is refused in the same words: then it is not the bug that was found."""
    if program.original is None:
        return False
    other, changed = verdict(program.original.name), verdict(program.name)
    return changed.outcome == other.outcome == "refused" and changed.line == other.line


def load() -> dict[str, Program]:
    """Registers the programs of all files beside this one, and returns them by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.startswith(("data_", "model_", "untuned_")):
            import_module(f"tests.checking.user_programs.{path.stem}")
    return {name: program for name, program in PROGRAMS.items() if ".user_programs." in program.module}
