"""What every step of `parallelize` works on: a recorded forward as a line of calls on values, and how it is divided.

    record      module, dummy arguments     -> Program
    strategies  Call, size of the axis      -> the Strategies that typing rules allow
    choose      Program, constraints, cost  -> Division: one strategy a call, one type a parameter
    emit        Division                    -> Python source, one file a pipeline stage

Pure data: nothing here records, judges or chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from ..checking.types.rules.spec import operands
from ..spmd.types import Shard, SpmdType

__all__ = [
    "Call",
    "Division",
    "LocalCall",
    "Program",
    "Strategy",
    "Value",
    "dotted",
    "local_shape",
    "operands_of",
    "substituted",
    "values_in",
]


@dataclass(eq=False, repr=False)
class Value:
    """A tensor of the program, as the whole program has it: no rank, no shard.

    Attributes:
        name: a Python identifier, unique in the program; the emitted variable's.
        kind: "input", "parameter", "buffer", "constant" or "result" (of a call).
        path: of an input the path among forward's arguments (`x`, `data.target`); of a parameter or buffer its
            qualified name in the module.
        producer: the call that it is a result of.
        varies: it depends on an input, a parameter or a buffer. What does not is left R.
        constant: the tensor itself, of a constant.
        outer: of a rank's program, which is to be divided over a second axis, its type on the first one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    path: str = ""
    producer: Call | None = None
    varies: bool = True
    constant: torch.Tensor | None = None
    outer: SpmdType | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(eq=False, repr=False)
class Call:
    """A call of one torch function, on whole values.

    Attributes:
        function: the object that the rules are keyed by (`spmd`'s `RULES`).
        args, kwargs: as in the source, with `Value`s in the place of tensors, in tuples, lists, dicts and slices too.
        results: the tensors that it returns, in order.
        several: it returns a tuple or list of its results, not one tensor.
        where: `file:line` of the user's code; `source`: the text of that line.
        module: qualified name of the module whose forward was running.
        flops: floating-point operations of its matrix products and convolutions, forward.
        random: it draws random numbers.
        grad: gradients were enabled.
        autocast: `(device type, dtype, enabled)` where that differed from around the forward.
        checkpoints: numbers of the activation checkpoints that the user's code put around it, the outermost first.
        writes: operands that it writes in place (buffers only: all else is made a value when it is recorded).
        outer: of a rank's program, which is to be divided over a second axis, what it is on the first one.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value] = field(default_factory=list)
    several: bool = False
    where: str = ""
    source: str = ""
    module: str = ""
    flops: int = 0
    random: bool = False
    grad: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    checkpoints: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    outer: OuterCall | None = None

    @property
    def name(self) -> str:
        """The function's name, for messages and for `select(name=)`."""
        return str(getattr(self.function, "__name__", self.function))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(value.name for value in values_in((self.args, self.kwargs)))}) at {self.where}"


@dataclass
class Program:
    """A forward, recorded once for one set of shapes.

    Attributes:
        inputs: the tensors among forward's arguments, in order.
        arguments: the leaves of forward's arguments, values and constants; `structure`: how they make up the arguments.
        parameters, buffers, constants: what the calls read beside; a tied parameter once.
        outputs: the leaves of the result, values and constants; `output_structure`: how they make up the result.
        training: `module.training` when it was recorded.
    """

    inputs: list[Value]
    structure: pytree.TreeSpec
    parameters: list[Value]
    buffers: list[Value]
    constants: list[Value]
    calls: list[Call]
    outputs: list[Any]
    output_structure: pytree.TreeSpec
    training: bool = True
    arguments: list[Any] = field(default_factory=list)

    @property
    def leaves(self) -> Iterator[Value]:
        """Every value that no call makes."""
        yield from (*self.inputs, *self.parameters, *self.buffers, *self.constants)

    def consumers(self) -> dict[Value, list[tuple[Call, int]]]:
        """Of each value the calls that read it, and as which of their tensor operands."""
        table: dict[Value, list[tuple[Call, int]]] = {value: [] for value in self.leaves}
        for call in self.calls:
            for index, value in enumerate(operands_of(call)):
                table.setdefault(value, []).append((call, index))
        return table


class OuterCall(NamedTuple):
    """What a call of a rank's program is on the axis that is divided already.

    Attributes:
        operands, results: their types there.
        bytes_moved: what a rank sends over it in the call itself, forward and backward.
        whole: the call of the whole program; None: a conversion stands here.
    """

    axis: str
    operands: tuple[SpmdType, ...]
    results: tuple[SpmdType, ...]
    bytes_moved: tuple[int, int]
    whole: Call | None


class LocalCall(NamedTuple):
    """What one rank calls: the function with the integers of its shard (views, groups, splits), or a composite's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Strategy(NamedTuple):
    """One way to run a call on the ranks of one axis.

    Attributes:
        name: "R", "I", "S(1) of operand 0", "P of 0", or a composite's name; unique among a call's strategies.
        operands: type of each tensor operand, in the order of the rules' operands.
        results: type of each result.
        local: what a rank calls.
        share: which part of the call's computation a rank does: 1 or 1 / size.
        bytes_moved: what a rank sends in the call itself, forward and backward (composites).
    """

    name: str
    operands: tuple[SpmdType, ...]
    results: tuple[SpmdType, ...]
    local: LocalCall
    share: float = 1.0
    bytes_moved: tuple[int, int] = (0, 0)


@dataclass
class Division:
    """A program divided over the ranks of a unit: `stages` pipeline stages of `size` ranks along `axis`.

    Over two axes: the program is that of a rank of the first one, which `outer` makes of the whole program.

    Attributes:
        strategies: of each call.
        types: of inputs, parameters, buffers and constants. Those of results are their calls' (`type_of`). Where an
            operand's type differs from its value's, a conversion stands between, once for all who want it.
        stages: number of the first call of each stage; `[0]`: one stage.
        recompute: spans of calls, from and to, whose values are computed again in backward; one may lie in another.
        schedule, microbatches: how stages take turns; a name of `pipeline.schedule`.
        pipeline_ranks: stage s is on group s % pipeline_ranks of a stage's ranks.
        outer: how the whole program is divided over the first of two axes; None: there is one.
    """

    program: Program
    axis: str
    size: int
    strategies: dict[Call, Strategy]
    types: dict[Value, SpmdType]
    stages: list[int] = field(default_factory=lambda: [0])
    recompute: list[tuple[int, int]] = field(default_factory=list)
    schedule: str = "1f1b"
    microbatches: int = 1
    pipeline_ranks: int = 1
    outer: Division | None = None

    @property
    def whole(self) -> Program:
        """The program as it was recorded."""
        return self.program if self.outer is None else self.outer.program

    @property
    def axes(self) -> dict[str, int]:
        """The axes that it is divided over, with the number of ranks along each."""
        return {**({} if self.outer is None else self.outer.axes), self.axis: self.size}

    @property
    def ranks(self) -> int:
        """How many ranks a stage has."""
        return math.prod(self.axes.values())

    def type_of(self, value: Value) -> SpmdType:
        if value.producer is None:
            return self.types[value]
        return self.strategies[value.producer].results[value.producer.results.index(value)]

    def types_of(self, value: Value) -> dict[str, SpmdType]:
        """The types of a value on each axis that is divided."""
        outer = {} if self.outer is None or value.outer is None else {self.outer.axis: value.outer}
        return {**outer, self.axis: self.type_of(value)} if self.size > 1 else outer


def operands_of(call: Call) -> list[Value]:
    """The tensor operands of a call, in the order of the rules' operands."""
    return operands(call.args, call.kwargs, Value)


def values_in(x: Any) -> Iterator[Value]:
    """All values in containers, slices included."""
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from values_in(item)
    elif isinstance(x, dict):
        yield from values_in(list(x.values()))
    elif isinstance(x, slice):
        yield from values_in((x.start, x.stop, x.step))


def substituted(x: Any, of: type[Any], convert: Callable[[Any], Any]) -> Any:
    """A copy of containers, slices included, with `convert(item)` in the place of each item of class `of`."""
    if isinstance(x, of):
        return convert(x)
    if isinstance(x, slice):
        return slice(*(substituted(bound, of, convert) for bound in (x.start, x.stop, x.step)))
    if type(x) in (tuple, torch.Size):
        return tuple([substituted(item, of, convert) for item in x])
    if type(x) is list:
        return [substituted(item, of, convert) for item in x]
    if type(x) is dict:
        return {key: substituted(item, of, convert) for key, item in x.items()}
    if x is None or isinstance(x, (int, float, str, torch.dtype)):
        return x
    leaves, structure = pytree.tree_flatten(x)
    return x if structure.is_leaf() else structure.unflatten([substituted(leaf, of, convert) for leaf in leaves])


def dotted(path: Sequence[Any]) -> str:
    """A path of pytree as programs write it: `data.target`, `layers.0`."""
    return ".".join(str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", "")))) for entry in path)


def local_shape(shape: tuple[int, ...], spmd_type: SpmdType, size: int) -> tuple[int, ...]:
    """The shape of what one of `size` ranks has of a tensor of `shape`."""
    if not isinstance(spmd_type, Shard):
        return shape
    return *shape[: spmd_type.dim], shape[spmd_type.dim] // size, *shape[spmd_type.dim + 1 :]
