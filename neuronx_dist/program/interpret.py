"""Runs a program call by call on plain tensors in one process: the reference for emitted files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..rules.containers import substituted
from ..torch_internals.tensors import pytree
from .program import Call, Program, Value

__all__ = ["run_program", "surroundings"]


def run_program(
    program: Program,
    tensors: Mapping[Value, torch.Tensor],
    changed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Any:
    """Returns the recorded forward's result, computed with `tensors` in the place of `program.leaves`.

    Args:
        changed: returns the tensor that later calls read in the place of a call's result.
    """
    known = dict(tensors)
    for call in program.calls:
        args, kwargs = substituted((call.args, call.kwargs), Value, known.__getitem__)
        with surroundings(call):
            result = call.function(*args, **kwargs)
        for value, tensor in zip(call.results, result if call.several else [result]):
            known[value] = changed(tensor)
    outputs = [known[leaf] if isinstance(leaf, Value) else leaf for leaf in program.outputs]
    return pytree.tree_unflatten(outputs, program.output_structure)


@contextmanager
def surroundings(call: Call) -> Iterator[None]:
    """Enters the autograd and autocast modes that the call was recorded in."""
    with torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
        if call.autocast is None:
            yield
        else:
            device, dtype, enabled = call.autocast
            with torch.autocast(device, dtype=dtype, enabled=enabled):
                yield
