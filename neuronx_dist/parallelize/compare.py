"""An emitted program beside one process: results, gradients and buffers of both, run for real.

Types say nothing of constant factors: a loss that is divided by the number of ranks twice has the right type. So the
program runs on threads, and what it computes is compared with the recorded program in one process. Random numbers are
left out of both: dropout lets everything pass. A program of coarser dtypes runs twice: as it is, and with all its
floating point numbers in float64, where rounding hides no wrong factor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..comm.backends import threads
from ..mesh import Mesh
from ..pipeline.record.surroundings import restored
from ..weights.shard_spec import gather_full, spec_of
from .emitted import imported
from .interpret import run_program
from .modes import Deterministic, InDouble, checkpoint_in, in_double, wide_dtype, without_checkpoints
from .module import ParallelModule
from .program import Division, Program, Value, operands_of

__all__ = ["EmittedProgramError", "OriginalError", "check_program", "check_values", "drawn", "given_tensors"]

# Of the coarsest dtype of a program.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class EmittedProgramError(RuntimeError):
    """An emitted program is not what was recorded. This is a bug of this package."""


class OriginalError(RuntimeError):
    """The original module fails on its arguments; the cause says how."""


def check_values(
    source: str,
    division: Division,
    module: nn.Module,
    constants: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any],
) -> tuple[float, str]:
    """Runs the source on threads and the original in one process, and compares.

    Returns the largest relative error, and why it was not compared in float64 too ("": it was, or is of float64).

    Raises:
        EmittedProgramError: they differ; the message names the tensors.
        OriginalError: the original fails.
    """
    program = division.whole
    tensors = _values(program, module, arguments)
    tolerance = _tolerance(program)
    on_meta = any(x.is_meta for x in (*module.parameters(), *module.buffers()))
    wanted = _run_program(program, tensors) if on_meta else _run_original(module, program, tensors)
    with imported(source, division.ranks, constants=constants) as emitted:
        largest = _compared(emitted, division, tensors, wanted, tolerance)
        if tolerance <= TOLERANCES[torch.float64]:
            return largest, ""
        error, coarse = _in_double(emitted, division, constants, tensors)
        return max(largest, error), coarse


def check_program(
    source: str, division: Division, constants: Mapping[str, torch.Tensor], tensors: Mapping[Value, torch.Tensor]
) -> tuple[float, str]:
    """Runs the source on threads and its program in one process on these tensors, in float64 if it can be.

    Returns the largest relative error, and why it was not compared in float64 ("": it was).

    Raises:
        EmittedProgramError: they differ; the message names the tensors.
    """
    program = division.whole
    with imported(source, division.ranks, constants=constants) as emitted:
        error, coarse = _in_double(emitted, division, constants, tensors)
        if coarse:
            error = _compared(emitted, division, tensors, _run_program(program, tensors), _tolerance(program))
        return error, coarse


def _in_double(
    emitted: type[ParallelModule],
    division: Division,
    constants: Mapping[str, torch.Tensor],
    tensors: Mapping[Value, torch.Tensor],
) -> tuple[float, str]:
    """The largest relative error with all floating point numbers in float64, and why there is none ("": there is)."""
    tensors = {value: _copy(in_double(x.detach()).requires_grad_(x.requires_grad)) for value, x in tensors.items()}
    with InDouble():
        try:
            wanted = _run_program(division.whole, tensors)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # a function that is not for float64
            line = str(error).strip().partition("\n")[0]
            return 0.0, f"not compared in float64: {type(error).__name__}: {line}"
    emitted.CONSTANTS = {name: in_double(x) for name, x in constants.items()}
    emitted.INPUTS = {path: (shape, wide_dtype(dtype)) for path, (shape, dtype) in emitted.INPUTS.items()}
    return _compared(emitted, division, tensors, wanted, TOLERANCES[torch.float64], InDouble), ""


def _tolerance(program: Program) -> float:
    """That of its coarsest dtype."""
    dtypes = {x.dtype for call in program.calls for x in (*call.results, *operands_of(call))}
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _compared(
    emitted: type[ParallelModule],
    division: Division,
    tensors: Mapping[Value, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    tolerance: float,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Runs an emitted class on threads. Returns its largest relative error over `tolerance`."""
    program = division.whole
    inputs = _inputs(program, tensors)

    def rank() -> dict[str, torch.Tensor]:
        module = emitted()
        module.train(program.training)
        copies = [_copy(x) for x in inputs]
        with torch.set_grad_enabled(program.training), mode(), Deterministic():
            result = module.run(**pytree.tree_unflatten(copies, program.structure))
            return _outcome(result, copies, module, program.training)

    names = vars(sys.modules[emitted.__module__])
    if "checkpoint" in names:
        names["checkpoint"] = partial(checkpoint_in, mode)
    zeros = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in emitted.STORED.items()}
    weights = {**zeros, **_stored(program, tensors)}
    emitted.WEIGHTS = staticmethod(lambda: weights)
    try:
        with torch.random.fork_rng(devices=[]):  # the ranks have one generator, and each puts back what it met
            ranks = threads.run(Mesh(division.ranks, tp=division.ranks), rank)
    except Exception as error:
        raise EmittedProgramError(f"an emitted program fails: {type(error).__name__}: {error}") from error
    errors = {
        (number, name): error
        for number, has in enumerate(ranks)
        for name, error in _errors(has, wanted, tolerance).items()
    }
    wrong = [f"{name} on rank {number}: {error:.2g}" for (number, name), error in errors.items() if not error <= 1]
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise EmittedProgramError(
            "an emitted program computes something else than one process; errors over what rounding explains: "
            + ", ".join(wrong[:8])
            + more
        )
    return max(errors.values(), default=0.0)


# --- values -----------------------------------------------------------------------------------------------------------


def _values(program: Program, module: nn.Module, arguments: Mapping[str, Any]) -> dict[Value, torch.Tensor]:
    """A tensor for each leaf of the program: the one that there is; for one on meta it is drawn."""
    generator = torch.Generator().manual_seed(0)
    given = given_tensors(program, module, arguments)
    tensors: dict[Value, torch.Tensor] = {}
    for value in program.leaves:
        x = given[value].to("cpu", copy=True) if value in given else drawn(value, generator)
        tensors[value] = x.requires_grad_(value.requires_grad)
    return tensors


def given_tensors(program: Program, module: nn.Module, arguments: Mapping[str, Any]) -> dict[Value, torch.Tensor]:
    """The tensors that there are of the program's leaves: constants, arguments, what the module has; none on meta."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves = pytree.tree_leaves(dict(arguments))
    passed = dict(zip(program.arguments, leaves, strict=True) if program.arguments else ())
    tensors: dict[Value, torch.Tensor] = {}
    for value in program.leaves:
        x = value.constant if value.kind == "constant" else passed.get(value, state.get(value.path))
        if x is not None and not x.is_meta:
            tensors[value] = x.detach()
    return tensors


def drawn(value: Value, generator: torch.Generator) -> torch.Tensor:
    """Random numbers for a leaf, weights around 0; zeros where it is of integers, for they may be positions."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.zeros(value.shape, dtype=value.dtype)
    x = torch.rand(value.shape, generator=generator, dtype=torch.float32)
    scale = max(1, math.prod(value.shape[1:])) ** -0.5
    return ((x - 0.5) * scale if value.kind == "parameter" else x).to(value.dtype)


def _inputs(program: Program, tensors: Mapping[Value, torch.Tensor]) -> list[Any]:
    return [tensors[leaf] if isinstance(leaf, Value) else leaf for leaf in program.arguments]


def _stored(program: Program, tensors: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {value.path: tensors[value] for value in (*program.parameters, *program.buffers)}


def _run_program(program: Program, tensors: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results, gradients and buffers of the program in one process, by name."""
    tensors = {value: _copy(x) for value, x in tensors.items()}
    with torch.set_grad_enabled(program.training), Deterministic():
        result = run_program(program, tensors)
        results = _results(result)
        _backward(result, program.training)
    leaves = {value.path: x for value, x in tensors.items() if value.kind in ("parameter", "input")}
    buffers = {value.path: tensors[value] for value in program.buffers}
    return {**results, **_gradients(leaves, program.training), **_buffers(buffers)}


def _run_original(
    module: nn.Module, program: Program, tensors: Mapping[Value, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same of the original, which is not changed."""
    state = {name: _copy(x) for name, x in _stored(program, tensors).items()}
    own = [_copy(x) for x in _inputs(program, tensors)]
    with restored(module), without_checkpoints(), torch.set_grad_enabled(program.training), Deterministic():
        module.train(program.training)
        arguments = pytree.tree_unflatten(own, program.structure)
        try:
            result = torch.func.functional_call(module, state, (), arguments)
            results = _results(result)
            _backward(result, program.training)
        except Exception as error:
            raise OriginalError(f"{type(error).__name__}: {error}") from error
    leaves = {value.path: state[value.path] for value in program.parameters}
    leaves |= {leaf.path: x for leaf, x in zip(program.arguments, own) if isinstance(leaf, Value)}
    buffers = {value.path: state[value.path] for value in program.buffers}
    return {**results, **_gradients(leaves, program.training), **_buffers(buffers)}


def _gradients(leaves: Mapping[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
    return {f"the gradient of {name}": _grad(x) for name, x in leaves.items() if x.requires_grad and training}


def _buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"buffer {name}": x.detach() for name, x in buffers.items()}


def _outcome(result: Any, inputs: list[Any], module: ParallelModule, training: bool) -> dict[str, torch.Tensor]:
    """The same of an emitted module, from this rank's parts."""
    results = _results(result)
    _backward(result, training)
    gradients = {}
    if training:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradients[f"the gradient of {name}"] = gather_full(_grad(parameter), spec_of(parameter))
    given = [x for x in inputs if isinstance(x, torch.Tensor)]
    gradients |= _gradients(dict(zip(module.INPUTS, given)), training)
    return {**results, **gradients, **_buffers(dict(module.named_buffers()))}


def _results(result: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(result)
    return {f"result {n}": x.detach() for n, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


def _backward(result: Any, training: bool) -> None:
    """From all results at once, each with weights of its own: a sum alone has no gradient behind a softmax."""
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if training and results:
        weights = []
        for number, x in enumerate(results):
            positions = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
            weights.append((torch.sin(positions * 0.7 + number) + 1.5).to(x.dtype))
        torch.autograd.backward(results, weights)


def _errors(has: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float) -> dict[str, float]:
    """For each tensor its relative error over the tolerance; a tiny gradient's against the largest of all."""
    norms = {name: float(x.double().norm()) for name, x in wanted.items()}
    largest = max((norms[name] for name in norms if name.startswith("the gradient")), default=0.0)
    errors = {}
    for name, x in wanted.items():
        own = has.get(name)
        if own is None or own.shape != x.shape or own.dtype != x.dtype:
            errors[name] = math.inf
            continue
        floor = 1e-4 * largest if name.startswith("the gradient") else 1e-30
        same = bool(((own == x) | ((own != own) & (x != x))).all())  # nan is equal to nan alone
        distance = 0.0 if same else float((own.double() - x.double()).norm())
        errors[name] = distance / (max(norms[name], floor) * tolerance) if distance else 0.0
    return errors


def _grad(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.detach()


def _copy(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
