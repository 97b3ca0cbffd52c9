"""Modules whose parameters are ShardTensors: `distribute_module`, and equal parameters on all ranks of a mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import comm
from .construct import distribute_tensor
from .device_mesh import DeviceMesh, current_mesh
from .tensor import ShardTensor

__all__ = ["distribute_module", "sync_module_over_mesh"]


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
            it leaves is replicated.
        input_fn: `(inputs, mesh)` or `(module, inputs, mesh)`: what the module is to be called with.
        output_fn: `(outputs, mesh)` or `(module, outputs, mesh)`: what it is to return.

    Raises:
        TypeError: a function takes another number of arguments.
    """
    mesh = device_mesh or current_mesh()
    with torch.no_grad():
        for name, child in module.named_modules():
            if partition_fn is not None:
                _call(partition_fn, {2: (name, child), 3: (name, child, mesh)}, "partition_fn")
            _replicate(child, mesh)
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
        raise TypeError(f"{name} takes {len(needed)} arguments; it is called with {' or '.join(map(str, arguments))}")
    return function(*arguments[len(needed)])


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters and buffers that are plain become Replicate."""
    for name, param in module._parameters.items():
        if param is not None and not isinstance(param, ShardTensor):
            whole = distribute_tensor(param.detach(), mesh, src=None if param.is_meta else 0)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=param.requires_grad))
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, ShardTensor):
            module._buffers[name] = distribute_tensor(buffer.detach(), mesh, src=None if buffer.is_meta else 0)


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src: int = 0) -> None:
    """Gives plain parameters and buffers the values that rank `mesh.mesh.flatten()[src]` has, in place."""
    coordinate = [int(each) for each in torch.unravel_index(torch.tensor(src), mesh.shape)]
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            local = x._local if isinstance(x, ShardTensor) else x
            if isinstance(x, ShardTensor) and x._spec.sharded:
                continue
            for m, index in enumerate(coordinate):
                local.copy_(comm.broadcast(local.detach(), mesh.communicator(m), src=index))
