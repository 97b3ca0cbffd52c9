"""Runs a program call by call on plain tensors, in one process: what an emitted file is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .program import Call, Program, Value, substituted

__all__ = ["run_program", "tensors_of"]


def tensors_of(program: Program, module: nn.Module, arguments: Mapping[str, Any]) -> dict[Value, torch.Tensor]:
    """The tensor of each value that no call makes: of the module, and among the arguments."""
    leaves = pytree.tree_leaves(dict(arguments))
    of_module = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {value: leaf for value, leaf in zip(program.arguments, leaves) if isinstance(value, Value)}
    tensors |= {value: of_module[value.path] for value in (*program.parameters, *program.buffers)}
    return tensors | {value: value.constant for value in program.constants if value.constant is not None}


def run_program(program: Program, tensors: Mapping[Value, torch.Tensor]) -> Any:
    """What the recorded forward returns, for these tensors in the place of `program.leaves`."""
    known = dict(tensors)
    for call in program.calls:
        args, kwargs = substituted((call.args, call.kwargs), Value, known.__getitem__)
        with _surroundings(call):
            result = call.function(*args, **kwargs)
        for value, tensor in zip(call.results, result if call.several else [result]):
            known[value] = tensor
    outputs = [known[leaf] if isinstance(leaf, Value) else leaf for leaf in program.outputs]
    return pytree.tree_unflatten(outputs, program.output_structure)


@contextmanager
def _surroundings(call: Call) -> Iterator[None]:
    """The autograd and autocast modes that it was recorded in."""
    with torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
        if call.autocast is None:
            yield
        else:
            device, dtype, enabled = call.autocast
            with torch.autocast(device, dtype=dtype, enabled=enabled):
                yield
