"""The module that `parallelize` is given: whether it can be divided, on these arguments; its tensors."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..pipeline.record.recording import describe
from .config import ComputeConfig
from .module import ParallelModule
from .program import Program, Value
from .record import check_arguments

__all__ = [
    "check_outputs",
    "checked_module",
    "forward_failed",
    "current_values",
    "named_tensors",
    "initial_values",
    "with_gradient",
]


def checked_module(
    given: Any,
    module_fn: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    arguments: Mapping[str, Any],
    config: ComputeConfig,
) -> nn.Module:
    """The module that is parallelized, and whether it can be."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"module_dtype is a torch.dtype, such as torch.bfloat16, got {dtype!r}")
    module = _instance(given, module_fn) if inspect.isclass(given) else given
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module or a class of them, got {type(module).__name__}")
    if dtype is not None:
        module.to(dtype)
    for name, child in module.named_modules():
        if isinstance(child, ParallelModule):
            raise ValueError(
                f"{type(module).__name__}: {name} is parallel already, and a parallel module has none inside: "
                "parallelize the whole or the parts"
            )
    _check_arguments(module, arguments, config)
    return module


def _instance(module_class: type, module_fn: Callable[[], nn.Module] | None) -> Any:
    """A module of the class. No random number is drawn: rank 0 alone makes one, and the others are to draw the same."""
    if module_fn is None and issubclass(module_class, nn.Module):
        parameters = inspect.signature(module_class).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
        if needed:
            name = module_class.__name__
            raise TypeError(
                f"{name} is made with arguments ({', '.join(needed)}): pass module_fn, such as lambda: {name}(...)"
            )
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        return (module_fn or module_class)()


def _check_arguments(module: nn.Module, arguments: Mapping[str, Any], config: ComputeConfig) -> None:
    check_arguments(module, arguments)
    name = f"{type(module).__name__}.forward"
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    alone = [each.name for each in parameters if each.kind == each.POSITIONAL_ONLY]
    if alone:
        raise ValueError(f"{name} has positional-only arguments ({', '.join(alone)}): dummy_forward_args names them")
    required = [each.name for each in parameters if each.default is each.empty and each.name in names]
    if config.use_end2end and len(required) > 1:
        raise TypeError(
            f"use_end2end: {name} requires {', '.join(required)}; an end2end module takes one sample, and every other "
            "argument has a default"
        )
    defaults = {each.name: each.default for each in parameters}
    for given in arguments if config.use_end2end else ():
        if given != names[0] and _differs(arguments[given], defaults.get(given)):
            raise TypeError(
                f"use_end2end: dummy_forward_args has {given!r}, and train_step gives {name} its first argument alone "
                f"({names[0]}): leave {given!r} at its default"
            )


def _differs(given: Any, default: Any) -> bool:
    return given is not default and (isinstance(given, torch.Tensor) or bool(given != default))


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    """An input of a module that may be in the middle of a graph: its gradient is whole on every rank."""
    if x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.detach().requires_grad_()


def check_outputs(module: nn.Module, program: Program, config: ComputeConfig) -> None:
    """What forward returns.

    Raises:
        ValueError: it is no tensor, or an end2end module's is no loss.
    """
    if not any(isinstance(each, Value) for each in program.outputs):
        raise ValueError(
            f"{type(module).__name__}.forward returns no tensor that it computes: nothing is to be divided"
        )
    first = program.outputs[0]
    if config.use_end2end and not (isinstance(first, Value) and math.prod(first.shape) == 1):
        returns = f"a tensor of shape {list(first.shape)}" if isinstance(first, Value) else repr(first)
        raise ValueError(
            f"use_end2end: {type(module).__name__}.forward returns {returns} first; an end2end module returns its loss "
            "first, a tensor of one element: return its mean or sum, or compile with use_end2end=False"
        )


def forward_failed(module: nn.Module, arguments: Mapping[str, Any], error: Exception) -> ValueError:
    """Says where forward failed, and on what."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    lines = [f" at {frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(libraries)]
    given = describe(arguments)
    return ValueError(
        f"{type(module).__name__}.forward fails on dummy_forward_args {given}{lines[-1] if lines else ''}: "
        f"{type(error).__name__}: {error}"
    )


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def current_values(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Parameters and buffers by all their names; None: one of them is on meta."""
    tensors = named_tensors(module)
    return None if any(tensor.is_meta for tensor in tensors.values()) else tensors


def initial_values(name: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
    """The initial values; None: there are none."""
    missing = [each for each, tensor in tensors.items() if tensor.is_meta]
    if missing and len(missing) < len(tensors):
        raise ValueError(
            f"{name}: {missing[0]} has no value (it is on meta), and {len(tensors) - len(missing)} other tensors have "
            "one: initialise all of them, or build the whole module on meta"
        )
    return None if missing else tensors
