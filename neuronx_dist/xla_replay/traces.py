"""Traces, the result of lowering: the programs of each rank, and the values that go from one program to the next.

Every value has a number on its rank. A program takes values and computes values; others existed before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .programs import Program

__all__ = ["Array", "DeviceValue", "Launch", "LoweredStep", "RankTrace", "from_array", "to_array"]

Array = tuple[str, Any]  # dtype, and a numpy array (of 16-bit integers for bf16)


class DeviceValue(NamedTuple):
    """Placeholder of a tensor on the device, in a step's result."""

    number: int


@dataclass
class Launch:
    """A run of a program on one rank: the values that it takes as parameters, and those that its results become."""

    program: Program
    takes: list[int]
    gives: list[int]


@dataclass
class LoweredStep:
    """A call of a step, or the set-up.

    Attributes:
        output: its result, with a `DeviceValue` for each tensor on the device.
        state: the values of the state after it, by name.
        host_reads: how often it waited for the device to read a value.
        uploads: number of tensors that it copied to the device for its programs.
    """

    launches: list[Launch]
    output: Any = None
    state: dict[str, int] = field(default_factory=dict)
    host_reads: int = 0
    uploads: int = 0


@dataclass
class RankTrace:
    """The set-up and the steps of one rank; `known`: the values that no program computes."""

    known: dict[int, Array]
    setup: LoweredStep
    steps: list[LoweredStep]

    @property
    def last(self) -> LoweredStep:
        return (self.setup, *self.steps)[-1]


def to_array(tensor: torch.Tensor) -> Array:
    """Returns a CPU tensor as a dtype and a numpy array."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return "bfloat16", tensor.view(torch.int16).numpy().copy()
    return str(tensor.dtype)[6:], tensor.numpy().copy()


def from_array(value: Array) -> torch.Tensor:
    dtype, array = value
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
