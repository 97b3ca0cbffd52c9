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
from .isolation import restored
from .program import Program
from .recorder import record
from .recording import describe
from .translate import translate

__all__ = ["check_arguments", "record_program"]


def record_program(module: nn.Module, arguments: Mapping[str, Any], *, training: bool) -> Program:
    """Records `module(**arguments)` as a program. The module stays unchanged, and no random number is drawn.

    Args:
        module: may be on meta.
        arguments: forward's arguments by name: tensors (only shape, strides and dtype count) in any containers, and
            other objects. Tensors are taken to be on the module's device.
        training: the mode to record in. Submodules that `module.train(training)` leaves unchanged (frozen ones) stay
            so; a module that is in that mode already is recorded as it is.

    Raises:
        TracingError: the forward branches on values of tensors, or writes a tensor that it may not write.
        TypeError: forward does not accept these arguments.
    """
    check_arguments(module, arguments)
    with restored(module), comm.as_rank(Mesh(1), 0):
        if module.training != training:
            module.train(training)
        weights = (x.device for x in (*module.parameters(), *module.buffers()) if not x.is_meta)
        recording = record(module, dict(arguments), device=next(weights, None), leaves=False, bodies=BODIES)
    order = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = inspect.signature(module.forward).parameters
    return translate(recording, dict(arguments), names, order, training)


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
