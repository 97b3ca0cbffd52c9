"""An emitted program beside its module in one process: results, gradients and buffers of both, run for real.

Types say nothing of constant factors: a loss that is divided by the number of ranks twice has the right type. So the
program runs on threads, and its results are compared with those of the module itself, run eagerly in one process: a
wrong recording shows too. Both draw equal random numbers, and dropout lets everything pass. A program of coarser
dtypes runs a second time, beside its recording, with all floating point numbers in float64, where rounding hides no
wrong factor.

Errors are relative to a tensor's norm. A tensor that is zero but for rounding, such as the running mean of a linear
layer behind batch norm, has no digit in common with itself in another order of additions: its error is compared with
what rounding errors at every call of the recording make of it. So is that of a program that amplifies rounding, such
as batch norms over two nearly equal values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from ...comm.backends import threads
from ...mesh import Mesh
from ...program.isolation import restored, without_synchronised_norms
from ...program.program import Division, Program, Value, operands_of, run_program
from ...program.repeated import check_repeated
from ...torch_internals.tensors import pytree
from ...weights.shard_spec import gather_full, spec_of
from ..example import Example
from ..train.parallel_module import ParallelModule
from .emitted import imported
from .modes import InDouble, checkpoint_in, deterministic, in_double, wide_dtype, without_checkpoints

__all__ = ["EmittedProgramError", "OriginalError", "RecordingError", "check_original", "check_values"]

# Relative, by the coarsest dtype of a program.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Of changes by one rounding error a call, as many an emitted program may differ by: other sums round several times.
_ROUNDINGS = 10

_INFINITE = 1e30  # numbers above stand for infinity in masks


class EmittedProgramError(RuntimeError):
    """An emitted program is wrong: its types, its values, or its text. This is a bug of this package."""


class RecordingError(EmittedProgramError):
    """A recording computes something else than the module: forward differs from call to call, or recording is wrong."""


class OriginalError(RuntimeError):
    """The module of `example` fails on its arguments, in `direction` (forward, backward); the cause says how."""

    def __init__(self, example: Example, cause: Exception, direction: str) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.example, self.direction = example, direction


def check_values(
    source: str, division: Division, example: Example, constants: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Runs the source on threads and the module in one process, and compares.

    Args:
        example: the module whose recorded program is divided, and its arguments.
        constants: of its programs, by the names that the emitted module has for them.

    Returns the largest relative error, and what was not compared ("": nothing): the module, if it is on meta and does
    not run with values in the place of its tensors; float64, where a function is not for that.

    Raises:
        EmittedProgramError: they differ; the message names the tensors.
        RecordingError: they differ, and the recorded program differs from the module too.
        TracingError: so do two recordings.
        OriginalError: the module fails.
    """
    program = division.whole
    tensors = _values(program, example)
    tolerance = _tolerance(program)
    wanted, note = _reference(example, program, tensors)
    with imported(source, division.ranks, constants=constants) as emitted:
        noise = _Noise(program, tensors, tolerance)
        try:
            largest = _compared(emitted, division, tensors, wanted, noise)
        except EmittedProgramError as error:
            wrong = _wrong(_errors(_run_program(program, tensors), wanted, noise))
            if not wrong:
                raise
            check_repeated(program, example.program(training=program.training), example.name)
            raise RecordingError(
                f"the recording of {example.name}.forward computes other values than forward: {wrong}"
            ) from error
        if tolerance <= TOLERANCES[torch.float64]:
            return largest, note
        largest_in_double, coarse = _in_double(emitted, division, constants, tensors)
        return max(largest, largest_in_double), "; ".join(filter(None, [note, coarse]))


def check_original(example: Example, program: Program) -> None:
    """Runs the module in one process, forward and backward.

    Raises:
        OriginalError: it fails.
    """
    _reference(example, program, _values(program, example))


def _reference(
    example: Example, program: Program, tensors: Mapping[Value, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], str]:
    """Returns results, gradients and buffers of the module, or of its program and why, if it is on meta and fails.

    Raises:
        OriginalError: a module that is not on meta fails.
    """
    try:
        wanted = _run_original(example, program, tensors)
        computed_on_meta = [name for name, x in wanted.items() if x.is_meta]
        reason = f"{computed_on_meta[0]} is on meta" if computed_on_meta else ""
    except OriginalError as error:
        if not example.is_on_meta:
            raise
        reason = _first_line(error)
    if not reason:
        return wanted, ""
    return _run_program(
        program, tensors
    ), f"compared with the recording, because the module on meta does not run: {reason}"


def _in_double(
    emitted: type[ParallelModule],
    division: Division,
    constants: Mapping[str, torch.Tensor],
    tensors: Mapping[Value, torch.Tensor],
) -> tuple[float, str]:
    """Returns the largest relative error with all numbers in float64, and the reason if there is none ("")."""
    tensors = {value: _copy(in_double(x.detach()).requires_grad_(x.requires_grad)) for value, x in tensors.items()}
    with InDouble():
        try:
            wanted = _run_program(division.whole, tensors)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # a function that is not for float64
            return 0.0, f"not compared in float64: {type(error).__name__}: {_first_line(error)}"
    emitted.CONSTANTS = {name: in_double(x) for name, x in constants.items()}
    emitted.INPUTS = {path: (shape, wide_dtype(dtype)) for path, (shape, dtype) in emitted.INPUTS.items()}
    noise = _Noise(division.whole, tensors, TOLERANCES[torch.float64], InDouble)
    return _compared(emitted, division, tensors, wanted, noise, InDouble), ""


class _Noise:
    """Changes that rounding makes, by name, in a program's results, gradients and buffers.

    Attributes:
        tolerance: relative, of a tensor with digits that rounding leaves.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[Value, torch.Tensor],
        tolerance: float,
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.tolerance = tolerance
        self._program, self._tensors, self._mode = program, tensors, mode

    @cached_property
    def norms(self) -> dict[str, float]:
        """Norms of changes by a rounding error in each call's result.

        Numbers that stand for infinity in masks, such as `torch.finfo(dtype).min`, stay as they are: so do their sums
        with scores.
        """
        generator = torch.Generator().manual_seed(0)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            if not (x.is_floating_point() or x.is_complex()):
                return x
            signs = (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x.dtype)
            return x * torch.where(x.abs() < _INFINITE, 1 + signs * torch.finfo(x.dtype).eps, 1)

        with self._mode():
            exact = _run_program(self._program, self._tensors)
            other = _run_program(self._program, self._tensors, rounded)
        return {name: float((x.double() - other[name].double()).norm()) for name, x in exact.items()}

    @property
    def scale(self) -> float:
        """Tolerance over the precision of its dtype."""
        (coarsest,) = (dtype for dtype, tolerance in TOLERANCES.items() if tolerance == self.tolerance)
        return self.tolerance / torch.finfo(coarsest).eps


def _tolerance(program: Program) -> float:
    """Returns the relative tolerance of the coarsest dtype of a program."""
    dtypes = {x.dtype for call in program.calls for x in (*call.results, *operands_of(call))}
    return max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _compared(
    emitted: type[ParallelModule],
    division: Division,
    tensors: Mapping[Value, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    noise: _Noise,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Runs an emitted class on threads, and returns its largest error over what rounding explains."""
    program = division.whole
    inputs = _inputs(program, tensors)

    def rank() -> dict[str, torch.Tensor]:
        module = emitted()
        module.train(program.training)
        copies = [_copy(x) for x in inputs]
        with torch.set_grad_enabled(program.training), mode(), deterministic():
            result = module.run(**pytree.tree_unflatten(copies, program.structure))
            return _outcome(result, copies, module, program.training)

    names = vars(sys.modules[emitted.__module__])
    if "checkpoint" in names:
        names["checkpoint"] = partial(checkpoint_in, mode)
    zeros = {name: torch.zeros(stored.shape, dtype=stored.dtype) for name, stored in emitted.STORED.items()}
    weights = {**zeros, **_stored(program, tensors)}
    emitted.WEIGHTS = staticmethod(lambda: weights)
    try:
        with torch.random.fork_rng(devices=[]):  # ranks share one generator, and restore its state
            ranks = threads.run(Mesh(division.ranks, tp=division.ranks), rank)
    except Exception as error:
        raise EmittedProgramError(f"an emitted program fails: {type(error).__name__}: {error}") from error
    errors = {
        f"{name} on rank {number}": error
        for number, has in enumerate(ranks)
        for name, error in _errors(has, wanted, noise).items()
    }
    wrong = _wrong(errors)
    if wrong:
        raise EmittedProgramError(f"an emitted program computes other values than one process; {wrong}")
    return max(errors.values(), default=0.0)


def _wrong(errors: Mapping[str, float]) -> str:
    """Lists the tensors whose errors rounding does not explain; "": there are none."""
    wrong = [f"{name}: {error:.2g}" for name, error in errors.items() if not error <= 1]
    more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    return f"errors larger than rounding explains: {', '.join(wrong[:8])}{more}" if wrong else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# --- values -----------------------------------------------------------------------------------------------------------


def _values(program: Program, example: Example) -> dict[Value, torch.Tensor]:
    """Returns a tensor for each leaf of the program: that of the example, or a random one if that is on meta."""
    generator = torch.Generator().manual_seed(0)
    given = _given_tensors(program, example)
    tensors: dict[Value, torch.Tensor] = {}
    for value in program.leaves:
        x = given[value].to("cpu", copy=True) if value in given else _drawn(value, generator)
        tensors[value] = x.requires_grad_(value.requires_grad)
    return tensors


def _given_tensors(program: Program, example: Example) -> dict[Value, torch.Tensor]:
    """Returns the leaves of the program that have values: constants, arguments and state that are not on meta."""
    state = {**dict(example.module.named_parameters()), **dict(example.module.named_buffers())}
    passed = dict(zip(program.arguments, example.flat[0], strict=True) if program.arguments else ())
    tensors: dict[Value, torch.Tensor] = {}
    for value in program.leaves:
        x = value.constant if value.kind == "constant" else passed.get(value, state.get(value.path))
        if x is not None and not x.is_meta:
            tensors[value] = x.detach()
    return tensors


def _drawn(value: Value, generator: torch.Generator) -> torch.Tensor:
    """Draws random numbers for a leaf, weights around 0; integers are zeros, because they may be positions."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.zeros(value.shape, dtype=value.dtype)
    x = torch.rand(value.shape, generator=generator, dtype=torch.float32)
    scale = max(1, math.prod(value.shape[1:])) ** -0.5
    return ((x - 0.5) * scale if value.kind == "parameter" else x).to(value.dtype)


def _inputs(program: Program, tensors: Mapping[Value, torch.Tensor]) -> list[Any]:
    return [tensors[leaf] if isinstance(leaf, Value) else leaf for leaf in program.arguments]


def _stored(program: Program, tensors: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {value.path: tensors[value] for value in (*program.parameters, *program.buffers)}


def _run_program(
    program: Program,
    tensors: Mapping[Value, torch.Tensor],
    changed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> dict[str, torch.Tensor]:
    """Returns results, gradients and buffers of the program in one process, by name."""
    tensors = {value: _copy(x) for value, x in tensors.items()}
    with torch.set_grad_enabled(program.training), deterministic():
        result = run_program(program, tensors, changed)
        results = _results(result)
        _backward(result, program.training)
    leaves = {value.path: x for value, x in tensors.items() if value.kind in ("parameter", "input")}
    buffers = {value.path: tensors[value] for value in program.buffers}
    return {**results, **_gradients(leaves, program.training), **_buffers(buffers)}


def _run_original(example: Example, program: Program, tensors: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns results, gradients and buffers of the module itself, by name; the module does not change.

    Raises:
        OriginalError: it fails.
    """
    module = example.module
    state = {name: _copy(x) for name, x in _stored(program, tensors).items()}
    copies = [_copy(x) for x in _inputs(program, tensors)]
    with (
        restored(module),
        without_synchronised_norms,
        without_checkpoints(),
        torch.set_grad_enabled(program.training),
        deterministic(),
    ):
        module.train(program.training)
        arguments = pytree.tree_unflatten(copies, program.structure)
        direction = "forward"
        try:
            result = torch.func.functional_call(module, state, (), arguments)
            results = _results(result)
            direction = "backward"
            _backward(result, program.training)
        except Exception as error:
            raise OriginalError(example, error, direction) from error
    leaves = {value.path: state[value.path] for value in program.parameters}
    leaves |= {leaf.path: x for leaf, x in zip(program.arguments, copies) if isinstance(leaf, Value)}
    buffers = {value.path: state[value.path] for value in program.buffers}
    return {**results, **_gradients(leaves, program.training), **_buffers(buffers)}


def _gradients(leaves: Mapping[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
    return {f"the gradient of {name}": _grad(x) for name, x in leaves.items() if x.requires_grad and training}


def _buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"buffer {name}": x.detach() for name, x in buffers.items()}


def _outcome(result: Any, inputs: list[Any], module: ParallelModule, training: bool) -> dict[str, torch.Tensor]:
    """Returns results, gradients and buffers of an emitted module, by name; gradients are gathered from the ranks."""
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
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]  # a program leaves out a cache
    return {f"result {n}": x.detach() for n, x in enumerate(tensors)}


def _backward(result: Any, training: bool) -> None:
    """Runs backward from all results, with different weights: a plain sum has no gradient behind a softmax."""
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    if training and results:
        weights = []
        for number, x in enumerate(results):
            positions = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
            weights.append((torch.sin(positions * 0.7 + number) + 1.5).to(x.dtype))
        torch.autograd.backward(results, weights)


def _errors(has: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], noise: _Noise) -> dict[str, float]:
    """Returns each tensor's relative error over the tolerance; tiny gradients are measured against the largest.

    A result that only one side has, or that has another shape or dtype, has an infinite error.
    """
    norms = {name: float(x.double().norm()) for name, x in wanted.items()}
    largest = max((norms[name] for name in norms if name.startswith("the gradient")), default=0.0)
    errors = {name: math.inf for name in has if name.startswith("result ") and name not in wanted}
    for name, x in wanted.items():
        computed = has.get(name)
        if computed is None or computed.shape != x.shape or computed.dtype != x.dtype:
            errors[name] = math.inf
            continue
        floor = 1e-4 * largest if name.startswith("the gradient") else 1e-30
        same = bool(((computed == x) | ((computed != computed) & (x != x))).all())  # nan is equal to nan alone
        distance = 0.0 if same else float((computed.double() - x.double()).norm())
        errors[name] = distance / (max(norms[name], floor) * noise.tolerance) if distance else 0.0
        if errors[name] > 1:
            change = noise.norms.get(name, 0.0)
            if norms[name] <= change * noise.scale:  # it is zero but for rounding
                errors[name] = distance / max(change * noise.scale, floor)
            else:
                errors[name] = min(errors[name], distance / max(_ROUNDINGS * change, 1e-30))
    return errors


def _grad(x: torch.Tensor) -> torch.Tensor:
    if x.grad is None:
        return torch.zeros_like(x)
    return x.grad.detach().to_dense() if x.grad.is_sparse else x.grad.detach()


def _copy(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
