"""A module's forward as a `Program`: recorded once on fake tensors, function by function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import comm
from ..mesh import Mesh
from ..nearest import nearest
from ..rules.bodies import BODIES
from ..torch_internals.tensors import pytree
from .isolation import restored, without_loops_over_experts, without_synchronised_norms
from .program import Program
from .python_state import RandomState
from .recorder import record
from .recording import Recording, TracingError, describe
from .repeated import check_repeated, first_difference
from .translate import translate

__all__ = ["check_arguments", "record_program"]


def record_program(module: nn.Module, arguments: Mapping[str, Any], *, training: bool) -> Program:
    """Records `module(**arguments)` as a program. The module stays unchanged, and no random number is drawn.

    Args:
        module: may be on meta.
        arguments: forward's arguments by name: tensors (only shape, strides and dtype count) in any containers, and
            other objects. Tensors are assumed to be on the module's device.
        training: the mode to record in. Submodules that `module.train(training)` leaves unchanged (frozen ones) keep
            their mode; a module that is in the mode already is recorded in its present state.

    Raises:
        TracingError: the forward branches on values of tensors, or writes a tensor that it may not write; or its calls
            depend on what an earlier call left in Python's state, on Python's random numbers or on `requires_grad`.
        TypeError: forward does not accept these arguments.
    """
    check_arguments(module, arguments)
    forward = _Forward(module, arguments)
    with (
        without_loops_over_experts(module),
        without_synchronised_norms,
        restored(module) as state,
        comm.as_rank(Mesh(1), 0),
    ):
        if module.training != training:
            module.train(training)
        before = RandomState()
        try:
            program, recording = forward.recorded()
            _check_generators(forward, program, before)
            _check_state(forward, program, recording)
            _check_requires_grad(forward, program, recording)
            if _CLOCKS & state.names:
                check_repeated(program, forward.recorded()[0], type(module).__name__)
            if not training and "is_grad_enabled" in state.names:
                _check_without_gradients(forward, program)
        finally:
            before.restore()
    return program


class _Forward:
    """The forward of a module, with arguments, to record as often as necessary."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.module, self.arguments = module, dict(arguments)
        self.order = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        weights = (x.device for x in (*module.parameters(), *module.buffers()) if not x.is_meta)
        self.device = next(weights, None)

    def recorded(self, arguments: dict[str, Any] | None = None, grad: bool = True) -> tuple[Program, Recording]:
        """Records forward; `arguments`: others than its arguments, `grad`: gradients are enabled."""
        arguments = self.arguments if arguments is None else arguments
        recording = record(self.module, dict(arguments), device=self.device, leaves=False, bodies=BODIES, grad=grad)
        names = inspect.signature(self.module.forward).parameters
        return translate(recording, dict(arguments), names, self.order, self.module.training), recording


def _check_generators(forward: _Forward, program: Program, before: RandomState) -> None:
    """Raises TracingError if a global generator of Python or numpy decides what forward calls, or forward seeds torch.

    A forward that seeds the generator is recorded again with another seed, and its calls must be the same.
    """
    changed, name = before.changed(), type(forward.module).__name__
    if "torch" in changed:
        raise TracingError(
            f"{name}.forward seeds the random numbers of torch, as torch.manual_seed does, which the "
            "program would not do: seed before forward"
        )
    if not changed:
        return
    after = RandomState()
    before.seed_otherwise()
    other, _ = forward.recorded()
    drawn = [generator for generator in after.changed() if generator in changed]
    different = first_difference(program, other)
    if drawn or different:
        raise TracingError(
            f"{name}.forward draws from the generator of {' and '.join(drawn or changed)}, and the program would "
            f"repeat the outcome of one draw{f' ({different})' if different else ''}: draw tensors, such as "
            "torch.rand(()), and choose by torch.where"
        )


def _check_state(forward: _Forward, program: Program, recording: Recording) -> None:
    """Raises TracingError if forward's calls change in a second run, from the state of Python after the first run."""
    if not recording.left:
        return
    for change in recording.left:
        change.apply()
    shown = "; ".join(change.text for change in recording.left[:_SHOWN])
    more = f", and {len(recording.left) - _SHOWN} more" if len(recording.left) > _SHOWN else ""
    what = f"{type(forward.module).__name__}.forward depends on state that its last call left ({shown}{more})"
    advice = "Keep the state in a buffer (module.register_buffer), which is a tensor, or pass it as an argument"
    try:
        different = first_difference(program, forward.recorded()[0])
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).partition('. ')[0]}"  # its advice is for a first call
        raise TracingError(
            f"{what}: the second call fails, {failure}.\nCompute in each call what the last one left: override the "
            f"method that stores it, and return the tensor. {advice}."
        ) from error
    if different:
        raise TracingError(f"{what}: calls differ at {different}. {advice}.")


def _check_requires_grad(forward: _Forward, program: Program, recording: Recording) -> None:
    """Raises TracingError if forward reads `requires_grad` of its arguments, and its calls depend on that."""
    if not recording.reads_requires_grad:
        return
    leaves = pytree.tree_leaves(forward.arguments)
    wanted = not any(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))

    def converted(x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_(wanted and (x.is_floating_point() or x.is_complex()))

    arguments = pytree.tree_map_only(torch.Tensor, converted, forward.arguments)
    try:
        different = first_difference(program, forward.recorded(arguments)[0])
    except TracingError:  # such as a reentrant checkpoint of arguments without gradients
        return
    if different:
        raise TracingError(
            f"{recording.reads_requires_grad}: forward reads requires_grad of a tensor that depends on its arguments, "
            f"and its calls differ by it, at {different}. Branch on self.training, or on an argument."
        )


def _check_without_gradients(forward: _Forward, program: Program) -> None:
    """Raises TracingError if the calls of forward in evaluation mode change where gradients are off."""
    different = first_difference(program, forward.recorded(grad=False)[0])
    if different:
        raise TracingError(
            f"{type(forward.module).__name__}.forward reads torch.is_grad_enabled(), and its calls in evaluation mode "
            f"differ by it, at {different}. Branch on self.training, or on an argument."
        )


# Functions of clocks and of generators without a global state; code of the user that names one is recorded twice.
_CLOCKS = frozenset(
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time now utcnow today "
    "urandom default_rng SystemRandom uuid1 uuid4 token_bytes token_hex randbelow".split()
)
_SHOWN = 3  # changes of Python's state that a message lists


def check_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises a TypeError if forward does not accept these arguments; the message has its signature."""
    what = f"forward of {type(module).__name__}"
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(
            f"the dummy arguments of {what} must be a dict from names to values, such as {{'x': tensor}}; got "
            f"{describe(arguments)}"
        )
    parameters = inspect.signature(module.forward).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind not in _VARIADIC]
    signature = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters.values()]
    takes = f"It takes {', '.join(signature) or 'no arguments'}."
    for name in arguments:
        if name in named:
            continue
        if name in parameters and parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(
                f"{what} takes *{name}, which dummy arguments cannot pass by name: replace it by named arguments."
            )
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            near = f" Did you mean {nearest(name, named)}?" if named else ""
            raise TypeError(f"{what} takes no argument {name!r}.{near} {takes}")
    missing = [name for name in named if name not in arguments and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise TypeError(f"{what} needs {', '.join(missing)}, missing in the dummy arguments. {takes}")
    for name, argument in arguments.items():
        annotation = parameters[name].annotation if name in named else None
        if annotation in (torch.Tensor, "torch.Tensor", "Tensor") and not isinstance(
            argument, (torch.Tensor, type(None))
        ):
            raise TypeError(f"dummy argument {name} of {what} is {describe(argument)}, but forward takes a tensor.")
        for path, leaf in pytree.tree_flatten_with_path(argument)[0]:
            if type(leaf).__module__ == "numpy":
                raise TypeError(
                    f"dummy argument {name}{pytree.keystr(path)} of {what} is a {type(leaf).__name__}: "
                    f"convert it by torch.from_numpy."
                )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
