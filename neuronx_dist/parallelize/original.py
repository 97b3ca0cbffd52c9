"""The module that `parallelize` receives: checks of the module and its example arguments; its tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import accelerator
from ..parallel_layers.activation_checkpoint import WORDS, modules_of, transformer_layers
from ..program.program import Call, Program, Value
from ..program.record import check_arguments
from ..torch_internals.tensors import pytree
from .config import ComputeConfig
from .example import Example, synchronised_norms
from .train.parallel_module import ParallelModule, check_loss_is_first

__all__ = [
    "check_outputs",
    "current_values",
    "example_of",
    "initial_values",
    "named_tensors",
    "smaller_example_of",
    "unsynchronised_norm",
    "with_module_paths",
]


def example_of(
    given: Any,
    module_fn: Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    arguments: Any,
    config: ComputeConfig,
    origin: str = "dummy_forward_args",
) -> Example:
    """Makes the module that is parallelized, and checks it and its example arguments.

    Args:
        given: a module, or a class of modules.
        origin: the parameter of `parallelize` that the arguments come from.

    Raises:
        TypeError: `given` is no module and no class of modules, a class needs arguments, or forward does not take
            these.
        ValueError: the module has a parallel module inside, or forward has positional-only arguments.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"module_dtype must be a torch.dtype, such as torch.bfloat16, got {dtype!r}")
    module = _instance(given, module_fn) if inspect.isclass(given) else given
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module or a class of them, got {type(module).__name__}")
    if dtype is not None:
        module.to(dtype)
    for name, child in module.named_modules():
        if isinstance(child, ParallelModule):
            raise ValueError(
                f"{type(module).__name__}: submodule {name} is already parallelized, and parallel modules cannot be "
                "nested: parallelize either the outer module or its parts"
            )
        if isinstance(child, nn.SyncBatchNorm) and child.process_group is not None:
            raise ValueError(
                f"{type(module).__name__}: SyncBatchNorm {name} has a process_group, and its statistics are over all "
                "units: leave process_group=None"
            )
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if x.layout is not torch.strided:
            raise ValueError(
                f"{type(module).__name__}: {name} has layout {x.layout}, which generated files do not store: hold its "
                "to_dense(), and make it sparse in forward; or delete it, if forward does not read it"
            )
    _check_arguments(module, arguments, config)
    arguments = dict(arguments)
    if not (config.use_end2end or config.inference_only):
        arguments = pytree.tree_map_only(torch.Tensor, _with_gradient, arguments)
    return Example(module, arguments, origin)


def smaller_example_of(
    module: nn.Module, arguments: Any, dtype: torch.dtype | None, config: ComputeConfig, origin: str
) -> Example:
    """Checks the smaller module and arguments by which the values of a large program are compared.

    Raises:
        TypeError, ValueError: as `example_of`; the message says that it is about `verify_with` or `verify_args`.
    """
    try:
        return example_of(module, None, dtype, arguments, config, origin)
    except (TypeError, ValueError) as error:
        raise type(error)(f"verify_with, with the arguments of {origin}: {error}") from error


def _instance(module_class: type, module_fn: Callable[[], nn.Module] | None) -> Any:
    """Makes a module of a class, and restores random generators: only rank 0 makes it, and ranks must stay equal."""
    if module_fn is None and issubclass(module_class, nn.Module):
        parameters = inspect.signature(module_class).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        if needed:
            name = module_class.__name__
            raise TypeError(
                f"{name}'s constructor needs arguments ({', '.join(needed)}): pass module_fn, such as lambda: "
                f"{name}(...)"
            )
    with accelerator.random_state_restored():
        return (module_fn or module_class)()


def _check_arguments(module: nn.Module, arguments: Mapping[str, Any], config: ComputeConfig) -> None:
    check_arguments(module, arguments)
    name = f"{type(module).__name__}.forward"
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    alone = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]
    if alone:
        raise ValueError(
            f"{name} has positional-only arguments ({', '.join(alone)}), which dummy_forward_args cannot pass by name"
        )
    required = [p.name for p in parameters if p.default is p.empty and p.name in names]
    if config.use_end2end and len(required) > 1:
        raise TypeError(
            f"use_end2end: {name} requires {', '.join(required)}; an end2end module takes one sample, and every other "
            "argument has a default"
        )
    defaults = {p.name: p.default for p in parameters}
    for given in arguments if config.use_end2end else ():
        if given != names[0] and _differs(arguments[given], defaults.get(given)):
            raise TypeError(
                f"use_end2end: dummy_forward_args sets {given!r}, but train_step passes {name} only its first argument "
                f"({names[0]}): leave {given!r} at its default"
            )


def _differs(given: Any, default: Any) -> bool:
    return given is not default and (isinstance(given, torch.Tensor) or bool(given != default))


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns an input with a gradient, since the module may be in the middle of a graph."""
    if x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.detach().requires_grad_()


def check_outputs(module: nn.Module, program: Program, config: ComputeConfig) -> None:
    """Checks the results of forward.

    Raises:
        ValueError: no result is a computed tensor, or the first result of an end2end module is no loss.
    """
    if not any(isinstance(output, Value) for output in program.outputs):
        raise ValueError(f"{type(module).__name__}.forward returns no computed tensor: there is nothing to parallelize")
    first = program.outputs[0]
    if config.use_end2end and not (isinstance(first, Value) and math.prod(first.shape) == 1):
        returns = f"a tensor of shape {list(first.shape)}" if isinstance(first, Value) else repr(first)
        raise ValueError(
            f"use_end2end: {type(module).__name__}.forward returns {returns} first; an end2end module returns its loss "
            "first, a tensor of one element: return its mean or sum, or compile with use_end2end=False"
        )
    if config.use_end2end:
        check_loss_is_first(pytree.tree_unflatten(program.outputs, program.output_structure))


def unsynchronised_norm(module: nn.Module, program: Program) -> Call | None:
    """Returns the first batch norm of a program that takes its statistics of the batch of one unit."""
    synchronised = synchronised_norms(module)
    for call in program.calls if program.training else ():
        training = call.args[5] if len(call.args) > 5 else call.kwargs.get("training", False)
        if call.function in (torch.batch_norm, F.batch_norm) and training and call.module not in synchronised:
            return call
    return None


def with_module_paths(config: ComputeConfig, module: nn.Module) -> ComputeConfig:
    """Returns the configuration with paths of modules in place of ends of paths, class names and words.

    `recompute_modules` and `pipeline_pivots` name modules; only the former has words.

    Raises:
        ValueError: the word "attention", which names functions and no modules.
    """
    options = {name: config.pas_config.get(name) for name in ("recompute_modules", "pipeline_pivots")}
    paths = {name: _paths(module, str(names), name) for name, names in options.items() if names}
    return replace(config, pas_config={**config.pas_config, **paths}) if paths else config


def _paths(module: nn.Module, names: str, option: str) -> str:
    """Returns the paths of the modules that an option names, separated by commas."""
    modules = {path: type(child) for path, child in module.named_modules() if path}
    paths: list[str] = []
    for name in map(str.strip, names.split(",")):
        ended = [
            path
            for path, cls in modules.items()
            if any(f".{text}".endswith(f".{name}") for text in (path, f"{cls.__module__}.{cls.__qualname__}"))
        ]
        if name in WORDS and not ended and option == "recompute_modules":
            if name == "attention":
                raise ValueError(
                    "recompute_modules: 'attention' names functions inside of modules: call "
                    "neuronx_dist.recompute(module, 'attention') before parallelize, whose spans every policy takes"
                )
            ended = transformer_layers(module) if name == "full" else [*modules_of(module, name)]
        paths += [name] if name in modules or not ended else ended
    return ",".join(dict.fromkeys(paths))


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by all their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def current_values(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns parameters and buffers by all their names; None: one of them is on meta."""
    tensors = named_tensors(module)
    return None if any(tensor.is_meta for tensor in tensors.values()) else tensors


def initial_values(name: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
    """Returns the initial values; None: all tensors are on meta.

    Raises:
        ValueError: some of the tensors are on meta.
    """
    missing = [path for path, tensor in tensors.items() if tensor.is_meta]
    if missing and len(missing) < len(tensors):
        raise ValueError(
            f"{name}: {missing[0]} has no value (it is on meta), and {len(tensors) - len(missing)} other tensors have "
            "one: initialise all of them, or build the whole module on meta"
        )
    return None if missing else tensors
