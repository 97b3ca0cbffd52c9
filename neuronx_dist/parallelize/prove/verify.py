"""The proof of an emitted source before it is loaded: types on the whole mesh, values beside the module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ... import comm
from ...checking.api import check
from ...mesh import Mesh
from ...program.program import Division, Program, Value, values_in
from ...spmd.declarations import get_local_type
from ...spmd.errors import SpmdTypeError
from ...spmd.types import R, SpmdType, V
from ...torch_internals.tensors import pytree
from ..emit.emitted_class import EmittedProgram
from .boundaries import compare_stages
from .emitted import imported
from .value_comparison import EmittedProgramError, check_original, check_values

__all__ = ["HOW", "NOT_COMPARED", "Verdict", "check_types", "too_large", "verify"]

MOST_FLOPS = 2e10  # of a forward that is run for real
MOST_ELEMENTS = 1e8  # of its parameters
NOT_COMPARED = "values were not compared at this size"
HOW = (
    "to compare them, pass verify_with, a smaller module of the same class (fewer or narrower layers), and verify_args,"
    " arguments of its forward"
)


class Verdict(NamedTuple):
    """The result of the proof of one program.

    Attributes:
        types: the report of the type check, as text.
        not_run: why the program was not run for real; "": it was, or a smaller one in its place.
        largest_error: of all results, gradients and buffers, over what rounding explains; nan: it was not run.
        notes: what was not compared of its values, and why; "": nothing.
        is_smaller: the values are those of a smaller module.
    """

    types: str
    not_run: str = ""
    largest_error: float = math.nan
    notes: str = ""
    is_smaller: bool = False

    def __str__(self) -> str:
        if self.not_run:
            return f"types: {self.types}\n{NOT_COMPARED}: {self.not_run}; {HOW}"
        where = " by the module of verify_with" if self.is_smaller else ""
        values = f"equal to one process{where}; largest error {self.largest_error:.2g} of what rounding explains"
        return f"types: {self.types}\nvalues: " + "; ".join(filter(None, [values, self.notes]))


def verify(emitted: EmittedProgram, smaller: EmittedProgram | None = None) -> list[Verdict]:
    """Checks the types of an emitted source, then its values, in each mode in which its programs were recorded.

    Args:
        smaller: a smaller module of the same class, divided in the same way; its values stand for those of a program
            that is too large to run.

    Raises:
        EmittedProgramError: one of them is wrong; the message says what, and which.
        OriginalError: the original fails.
    """
    verdicts = []
    for number, division in enumerate(emitted.divisions):
        reason = too_large(division.whole)
        try:
            report = check_types(emitted.source, division, emitted.example.arguments, emitted.constants)
        except Exception:
            if not reason:
                check_original(emitted.example, division.whole)
            raise
        if reason and smaller is None:
            verdicts.append(Verdict(report, reason))
            continue
        run = smaller if reason and smaller is not None else emitted
        if run is smaller:
            check_types(run.source, run.divisions[number], run.example.arguments, run.constants)
        error, notes = check_values(run.source, run.divisions[number], run.example, run.constants)
        verdicts.append(Verdict(report, "", error, notes, run is smaller))
    return verdicts


def too_large(program: Program) -> str:
    """Returns why a program is not run for real here; "": it is."""
    flops = sum(call.flops for call in program.calls)
    elements = sum(math.prod(value.shape) for value in program.parameters)
    if flops <= MOST_FLOPS and elements <= MOST_ELEMENTS:
        return ""
    return (
        f"forward has {flops:.2g} operations on {elements:.2g} elements of parameters; values are compared up to "
        f"{MOST_FLOPS:.0g} and {MOST_ELEMENTS:.0g} are run for that"
    )


def check_types(
    source: str,
    division: Division,
    arguments: Mapping[str, Any],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Checks the types of a source on all ranks of a division, and returns the report of `spmd.check`.

    A line that reads the weight of another layer has the right types, and a smaller module may have fewer layers: so
    forward must also read each parameter and buffer that its program reads. A source that communicates over the units
    (batch norm) is checked on two of them, too, up to the gradients of parameters, which the job sums.

    Raises:
        EmittedProgramError: it found a problem.
    """
    training = division.whole.training
    read = {value for call in division.program.calls for value in values_in((call.args, call.kwargs))}
    missing = {value.path for value in read if value.kind in ("parameter", "buffer")}

    def step(model: torch.nn.Module, optimizer: Any, inputs: Any) -> None:
        model.train(training)
        with _reads(model) as paths:
            result = model(**inputs)
        missing.difference_update(paths)
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        for axis, size in division.axes.items():
            for number, x in enumerate(tensors if size > 1 else ()):
                _check_whole(x, f"result {number}", axis)
        results = [x for x in tensors if x.requires_grad]
        if training and results:
            sum(x.sum() for x in results).backward()  # type: ignore[union-attr]
            if optimizer is not None and comm.size("dp") == 1:  # something is trained
                optimizer.step()

    def in_types(**units: SpmdType) -> Any:
        program = division.program
        leaves = [{**division.types_of(x), **units} if isinstance(x, Value) else None for x in program.arguments]
        return pytree.tree_unflatten(leaves, program.structure)

    with imported(source, division.ranks, constants=constants) as emitted:
        compare_stages(emitted, division)
        mesh = Mesh(division.ranks, tp=division.ranks, tp_replicas=division.cuts)
        meshes = [(mesh, in_types())]
        if 'units="dp"' in source:
            meshes.append((replace(mesh, world_size=2 * division.ranks), in_types(dp=V)))
        reports = []
        for on, types in meshes:
            report = check(lambda: emitted(init_params=False), dict(arguments), on, step=step, in_types=types)
            if not report.ok:
                raise EmittedProgramError(f"the types of an emitted program are wrong:\n{report}")
            reports.append(str(report))
    if missing:
        paths = ", ".join(sorted(missing))
        raise EmittedProgramError(f"an emitted program does not read {paths}, but the module's forward does")
    return "; ".join(reports)


class _Noted(dict[str, Any]):
    """A table of a module's tensors that notes the paths of those that are read."""

    def __init__(self, table: Mapping[str, Any], path: str, read: set[str]) -> None:
        super().__init__(table)
        self.path, self.read = path, read

    def __getitem__(self, name: str) -> Any:
        self.read.add(f"{self.path}.{name}" if self.path else name)
        return super().__getitem__(name)


@contextmanager
def _reads(model: torch.nn.Module) -> Iterator[set[str]]:
    """Yields the paths of the parameters and buffers that are read inside the context."""
    read: set[str] = set()
    before = []
    for path, module in model.named_modules():
        for name in ("_parameters", "_buffers"):
            before.append((module, name, vars(module)[name]))
            vars(module)[name] = _Noted(vars(module)[name], path, read)
    try:
        yield read
    finally:
        for module, name, table in before:
            table.update(vars(module)[name])  # forward may write a buffer
            vars(module)[name] = table


def _check_whole(x: torch.Tensor, name: str, axis: str) -> None:
    """Raises SpmdTypeError unless a result is whole on every rank; one with a gradient must be I, as ranks share it."""
    spmd_type = get_local_type(x).get(axis, R)
    if spmd_type.letter != "I" and (spmd_type.letter != "R" or x.requires_grad):
        wanted = "I" if x.requires_grad else "R or I"
        raise SpmdTypeError(f"{name} {list(x.shape)}", f"it is {spmd_type} on {axis}, but results must be {wanted}")
