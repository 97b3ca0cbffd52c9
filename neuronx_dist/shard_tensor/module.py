"""Modules whose parameters are ShardTensors: `distribute_module`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .construct import distribute_tensor
from .device_mesh import DeviceMesh, as_mesh
from .tensor import ShardTensor

__all__ = ["distribute_module", "ties_kept"]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[..., Any] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Makes every parameter and buffer of a module a ShardTensor, and returns the module.

    Each function is called with as many arguments as it takes, of those named here.

    Args:
        device_mesh: None: that of the innermost `with mesh:`, else one dim over the world.
        partition_fn: `(name, module, mesh)`, called for every submodule; it replaces parameters by ShardTensors. What
            it leaves is replicated. What was one tensor in several places stays one.
        input_fn: `(inputs, mesh)` or `(module, inputs, mesh)`: what the module is to be called with.
        output_fn: `(outputs, mesh)` or `(module, outputs, mesh)`: what it is to return.

    Raises:
        TypeError: a function takes another number of arguments.
        ValueError: `partition_fn` gave two layouts to parameters that were one tensor.
    """
    mesh = as_mesh(device_mesh)
    with torch.no_grad():
        if partition_fn is not None:
            with ties_kept(module, "distribute_module"):
                for name, child in module.named_modules():
                    _call(partition_fn, {2: (name, child), 3: (name, child, mesh)}, "partition_fn")
        replicated: dict[torch.Tensor, torch.Tensor] = {}  # by identity
        for child in module.modules():
            _replicate(child, mesh, replicated)
    if input_fn is not None:
        function = input_fn

        def before(mod: nn.Module, inputs: Any) -> Any:
            first = inputs[0] if len(inputs) == 1 else inputs
            return _call(function, {1: (first,), 2: (inputs, mesh), 3: (mod, inputs, mesh)}, "input_fn")

        module.register_forward_pre_hook(before)
    if output_fn is not None:
        last = output_fn

        def behind(mod: nn.Module, inputs: Any, outputs: Any) -> Any:
            return _call(last, {1: (outputs,), 2: (outputs, mesh), 3: (mod, outputs, mesh)}, "output_fn")

        module.register_forward_hook(behind)
    return module


def _call(function: Callable[..., Any], arguments: dict[int, tuple[Any, ...]], name: str) -> Any:
    """Calls `function` with the arguments for the number of parameters that it has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin says nothing
        return function(*arguments[max(arguments)])
    needed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return function(*arguments[max(arguments)])
    if len(needed) not in arguments:
        raise TypeError(
            f"{name} takes {len(needed)} arguments, but it is called with {' or '.join(map(str, arguments))}"
        )
    return function(*arguments[len(needed)])


_Place = tuple[dict[str, Any], str, str]  # a module's parameters or buffers, the name there, and that in the whole


@contextmanager
def ties_kept(module: nn.Module, function: str) -> Iterator[None]:
    """Makes tensors that were one tensor in several places one again, where they were replaced inside.

    Raises:
        ValueError: they have different layouts.
    """
    ties = _ties(module)
    yield
    for tie in ties:
        _tie_again(*tie, function)


def _ties(module: nn.Module) -> list[tuple[torch.Tensor, list[_Place]]]:
    """Returns each tensor that is registered in several places, with these places."""
    places: dict[int, tuple[torch.Tensor, list[_Place]]] = {}
    for prefix, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            for name, x in table.items():
                if x is not None:
                    full_name = f"{prefix}.{name}" if prefix else name
                    places.setdefault(id(x), (x, []))[1].append((table, name, full_name))
    return [place for place in places.values() if len(place[1]) > 1]


def _tie_again(old: torch.Tensor, places: list[_Place], function: str) -> None:
    """Puts the replacement of `old`, which one of its places has, into all of them."""
    new = {full_name: table[name] for table, name, full_name in places if table.get(name) is not None}
    replaced = {full_name: x for full_name, x in new.items() if x is not old}
    if not replaced:
        return
    layouts = {full_name: (getattr(x, "_spec", None), x.shape) for full_name, x in replaced.items()}
    if len(set(layouts.values())) > 1:
        layouts_text = ", ".join(
            f"{full_name} {getattr(x, 'placements', 'plain')}" for full_name, x in replaced.items()
        )
        raise ValueError(
            f"{function}: {', '.join(new)} are tied, but got different layouts ({layouts_text}): use one layout, or "
            "untie them first"
        )
    first = next(iter(replaced.values()))
    for table, name, full_name in places:
        if full_name in new:
            table[name] = first


def _replicate(module: nn.Module, mesh: DeviceMesh, replicated: dict[torch.Tensor, torch.Tensor]) -> None:
    """Makes plain parameters and buffers Replicate; a shared tensor stays shared."""
    for table in (module._parameters, module._buffers):
        for name, x in table.items():
            if x is None or isinstance(x, ShardTensor):
                continue
            if x not in replicated:
                whole = distribute_tensor(x.detach(), mesh, src=None if x.is_meta else 0)
                is_parameter = isinstance(x, nn.Parameter)
                replicated[x] = nn.Parameter(whole, requires_grad=x.requires_grad) if is_parameter else whole
            table[name] = replicated[x]  # type: ignore[assignment]
