"""Emitted source, proven before it is loaded: its types on the whole mesh, and its values beside one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..checking.api import check
from ..mesh import Mesh
from ..spmd.declarations import get_local_type
from ..spmd.errors import SpmdTypeError
from ..spmd.types import R
from .boundaries import compare_stages
from .compare import EmittedProgramError, check_values
from .emitted import imported
from .program import Division, Program, Value
from .toy import NotShrunk, check_toy, toy_of

__all__ = ["Verdict", "check_types", "verify"]

MOST_FLOPS = 2e10  # of a forward that is run for real
MOST_ELEMENTS = 1e8  # of its parameters


class Verdict(NamedTuple):
    """What was looked at.

    Attributes:
        types: the report of the type check, as text.
        not_run: why the program did not run for real; "": it did.
        largest_error: of all results, gradients and buffers, over what rounding explains; nan: it did not run.
        coarse: why it was not compared in float64 too, where it is of coarser dtypes; "": it was.
        sizes: the toy sizes at which it was compared, in words; "": at its own.
    """

    types: str
    not_run: str
    largest_error: float
    coarse: str
    sizes: str = ""

    def __str__(self) -> str:
        values = (
            self.not_run or f"equal to one process; largest error {self.largest_error:.2g} of what rounding explains"
        )
        notes = [values, self.coarse, f"at toy sizes: {self.sizes}" if self.sizes else ""]
        return f"types: {self.types}\nvalues: " + "; ".join(filter(None, notes))


def verify(
    source: str,
    division: Division,
    module: nn.Module,
    constants: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any],
) -> Verdict:
    """Checks the types of an emitted source, then its values, in the mode in which its program was recorded.

    Args:
        module: the original. One on meta is not run: the program stands for it, with values that are drawn.
        constants: of its programs, by the names that the emitted module has for them.
        arguments: of forward, by name.

    Raises:
        EmittedProgramError: one of them is wrong; the message says what, and which.
        OriginalError: the original fails.
    """
    report = check_types(source, division, arguments, constants)
    reason = _too_large(division.whole)
    if not reason:
        return Verdict(report, "", *check_values(source, division, module, constants, arguments))
    try:
        toy = toy_of(division, module, arguments)
    except NotShrunk as error:
        return Verdict(report, f"{reason}; nor at toy sizes: {error}", math.nan, "")
    if _too_large(toy.division.whole):
        return Verdict(report, f"{reason}; nor at toy sizes, which are too large: {toy.sizes}", math.nan, "")
    return Verdict(report, "", *check_toy(source, toy), toy.sizes)


def _too_large(program: Program) -> str:
    """Why a program is not run for real here; "": it is."""
    flops = sum(call.flops for call in program.calls)
    elements = sum(math.prod(value.shape) for value in program.parameters)
    if flops <= MOST_FLOPS and elements <= MOST_ELEMENTS:
        return ""
    return (
        f"not compared with one process: its forward has {flops:.2g} operations on {elements:.2g} elements of "
        f"parameters, and programs of up to {MOST_FLOPS:.0g} and {MOST_ELEMENTS:.0g} are run for that"
    )


def check_types(
    source: str,
    division: Division,
    arguments: Mapping[str, Any],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """The report of `spmd.check` over all ranks of the division.

    Raises:
        EmittedProgramError: it found a problem.
    """
    training = division.whole.training

    def step(model: torch.nn.Module, optimizer: Any, inputs: Any) -> None:
        model.train(training)
        tensors = [x for x in pytree.tree_leaves(model(**inputs)) if isinstance(x, torch.Tensor)]
        for axis, size in division.axes.items():
            for number, x in enumerate(tensors if size > 1 else ()):
                _check_whole(x, f"result {number}", axis)
        results = [x for x in tensors if x.requires_grad]
        if training and results:
            sum(x.sum() for x in results).backward()  # type: ignore[union-attr]
            if optimizer is not None:  # nothing is trained
                optimizer.step()

    leaves = [division.types_of(x) if isinstance(x, Value) else None for x in division.program.arguments]
    in_types = pytree.tree_unflatten(leaves, division.program.structure)
    with imported(source, division.ranks, constants=constants) as emitted:
        compare_stages(emitted, division)
        mesh = Mesh(division.ranks, tp=division.ranks, tp_replicas=division.size if division.outer else 1)
        report = check(lambda: emitted(init_params=False), dict(arguments), mesh, step=step, in_types=in_types)
    if not report.ok:
        raise EmittedProgramError(f"the types of an emitted program are wrong:\n{report}")
    return str(report)


def _check_whole(x: torch.Tensor, name: str, axis: str) -> None:
    """Results are whole on every rank; those with a gradient are one value, I, for each rank computes on with it."""
    spmd_type = get_local_type(x).get(axis, R)
    if spmd_type.letter != "I" and (spmd_type.letter != "R" or x.requires_grad):
        wanted = "I" if x.requires_grad else "R or I"
        raise SpmdTypeError(f"{name} {list(x.shape)}", f"it is {spmd_type} on {axis}, and results are {wanted}")
