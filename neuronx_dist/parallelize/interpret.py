"""Runs a program call by call on plain tensors, in one process: what an emitted file is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree

from .program import Call, Program, Value, substituted

__all__ = ["run_program", "running"]


def run_program(program: Program, tensors: Mapping[Value, torch.Tensor]) -> Any:
    """What the recorded forward returns, for these tensors in the place of `program.leaves`."""
    known = dict(tensors)
    for _ in running(program, known):
        pass
    outputs = [known[leaf] if isinstance(leaf, Value) else leaf for leaf in program.outputs]
    return pytree.tree_unflatten(outputs, program.output_structure)


def running(program: Program, known: dict[Value, torch.Tensor]) -> Iterator[Call]:
    """Runs a program on what is known, to which it adds every result; each call is yielded before it is run."""
    for call in program.calls:
        yield call
        args, kwargs = substituted((call.args, call.kwargs), Value, known.__getitem__)
        with _surroundings(call):
            result = call.function(*args, **kwargs)
        for value, tensor in zip(call.results, result if call.several else [result]):
            known[value] = tensor


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
