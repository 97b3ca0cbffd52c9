"""What lowering tells the rest: the programs that each rank would run, and how values go from one to the next.

Every value is a number on its rank. A program takes some and gives some; what no program gives was there before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .programs import Program

__all__ = ["Array", "Launch", "Step", "Trace", "Value", "from_array", "to_array"]

Array = tuple[str, Any]  # dtype, and a numpy array (of 16-bit integers for bf16)


class Value(NamedTuple):
    """Stands for a tensor on the device, in what a step returns."""

    number: int


@dataclass
class Launch:
    """One program as one rank runs it: the values of its parameters, and those that its results become."""

    program: Program
    takes: list[int]
    gives: list[int]


@dataclass
class Step:
    """One call of a step, or the set-up.

    Attributes:
        output: what it returned, with a `Value` for each tensor on the device.
        state: after it, by name.
        host_reads: how often it waited for the device to read a value.
        uploads: how many tensors came to the device, of those that its programs take.
    """

    launches: list[Launch]
    output: Any = None
    state: dict[str, int] = field(default_factory=dict)
    host_reads: int = 0
    uploads: int = 0


@dataclass
class Trace:
    """All that one rank would do; `known` are the values that no program gives."""

    known: dict[int, Array]
    setup: Step
    steps: list[Step]

    @property
    def last(self) -> Step:
        return (self.setup, *self.steps)[-1]


def to_array(tensor: torch.Tensor) -> Array:
    """A CPU tensor as numpy has it."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return "bfloat16", tensor.view(torch.int16).numpy().copy()
    return str(tensor.dtype)[6:], tensor.numpy().copy()


def from_array(value: Array) -> torch.Tensor:
    dtype, array = value
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
