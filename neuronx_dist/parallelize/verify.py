"""Emitted source, proven before it is loaded: its types on the whole mesh, and its values beside one process.

Types say nothing of constant factors: a loss that is divided by the number of ranks twice has the right type. So the
program also runs for real, on threads, and its results, gradients and buffers are compared with those of the recorded
program in one process. Random numbers are left out of both: dropout lets everything pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ..checking.api import check
from ..comm.backends import threads
from ..mesh import Mesh
from ..weights.shard_spec import gather_full, spec_of
from .emitted import imported
from .interpret import run_program
from .module import ParallelModule
from .program import Division, Program, Value

__all__ = ["EmittedProgramError", "Verdict", "check_types", "check_values", "verify"]

MOST_FLOPS = 2e10  # of a forward that is run for real
MOST_ELEMENTS = 1e8  # of its parameters
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class EmittedProgramError(RuntimeError):
    """An emitted program is not what was recorded. This is a bug of this package."""


class Verdict(NamedTuple):
    """What was looked at.

    Attributes:
        types: the report of the type check, as text.
        values: whether the program ran for real; else why not.
        largest_error: of all results, gradients and buffers, relative.
    """

    types: str
    values: str
    largest_error: float


def verify(source: str, division: Division, state: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> Verdict:
    """Checks the types of an emitted source, then its values, in the mode in which its program was recorded.

    Args:
        state: parameters and buffers of the original, by name; those on meta are drawn.
        arguments: of forward, by name.

    Raises:
        EmittedProgramError: one of them is wrong; the message says what, and which.
    """
    report = check_types(source, division, arguments)
    reason = too_large(division.program)
    error = math.nan if reason else check_values(source, division, state, arguments)
    return Verdict(report, reason, error)


def too_large(program: Program) -> str:
    """Why a program is not run for real here; "": it is."""
    flops = sum(call.flops for call in program.calls)
    elements = sum(math.prod(value.shape) for value in program.parameters)
    if flops <= MOST_FLOPS and elements <= MOST_ELEMENTS:
        return ""
    return f"a forward of {flops:.2g} operations on {elements:.2g} elements of parameters was not run for real"


def check_types(source: str, division: Division, arguments: Mapping[str, Any]) -> str:
    """The report of `spmd.check` over all ranks of the division.

    Raises:
        EmittedProgramError: it found a problem.
    """
    training = division.program.training

    def step(model: torch.nn.Module, optimizer: Any, inputs: Any) -> None:
        model.train(training)
        results = [x for x in pytree.tree_leaves(model(**inputs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        if training and results:
            sum(x.sum() for x in results).backward()  # type: ignore[union-attr]
            optimizer.step()

    with imported(source, division.size) as emitted:
        report = check(lambda: emitted(init_params=False), dict(arguments), {division.axis: division.size}, step=step)
    if not report.ok:
        raise EmittedProgramError(f"the types of an emitted program are wrong:\n{report}")
    return str(report)


def check_values(
    source: str, division: Division, state: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]
) -> float:
    """Runs the source on threads and the program in one process, and compares. Returns the largest relative error.

    Raises:
        EmittedProgramError: they differ; the message names the tensors.
    """
    program = division.program
    tensors = _values(program, state, arguments)
    inputs = [tensors[leaf] if isinstance(leaf, Value) else leaf for leaf in program.arguments]
    stored = {value.path: tensors[value] for value in (*program.parameters, *program.buffers)}
    wanted = _run_whole(program, tensors)

    def rank() -> dict[str, torch.Tensor]:
        module = emitted(init_params=False)
        _fill(module, stored)
        module.train(program.training)
        own = [_copy(x) for x in inputs]
        with torch.set_grad_enabled(program.training), _Deterministic():
            result = module.run(**pytree.tree_unflatten(own, program.structure))
            return _outcome(result, own, module, program.training)

    with imported(source, division.size, constants=_constants(program)) as emitted:
        try:
            ranks = threads.run(Mesh(division.size, tp=division.size), rank)
        except Exception as error:
            raise EmittedProgramError(f"an emitted program fails: {type(error).__name__}: {error}") from error
    errors = {(number, name): error for number, has in enumerate(ranks) for name, error in _errors(has, wanted).items()}
    wrong = [f"{name} on rank {number}: {error:.2g}" for (number, name), error in errors.items() if not error <= 1]
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise EmittedProgramError(
            "an emitted program computes something else than one process; errors over what rounding explains: "
            + ", ".join(wrong[:8])
            + more
        )
    return max(errors.values(), default=0.0)
