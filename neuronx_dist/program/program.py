"""A recorded forward as a line of calls on values, and its division over ranks: the data of all steps of `parallelize`.

    record      module, dummy arguments     -> Program
    strategies  Call, size of the axis      -> the Strategies that typing rules allow
    choose      Program, constraints, cost  -> Division: one strategy per call, one type per parameter
    emit        Division                    -> Python source, one file per pipeline stage

Pure data: nothing here records, judges or chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..rules.containers import substituted
from ..rules.spec import operands
from ..spmd.types import Shard, SpmdType
from ..torch_internals.tensors import pytree
from .recording import CallFacts

__all__ = [
    "FILE_NAMES",
    "Call",
    "Division",
    "LocalCall",
    "Program",
    "Strategy",
    "Value",
    "argument_name",
    "dotted",
    "fresh",
    "local_shape",
    "operands_of",
    "run_program",
    "surroundings",
    "values_in",
]


@dataclass(eq=False, repr=False)
class Value:
    """A tensor of the program with its global shape, independent of ranks and shards.

    Attributes:
        name: a Python identifier, unique in the program; the name of the emitted variable.
        kind: "input", "parameter", "buffer", "constant" or "result" (of a call).
        path: the path of an input among forward's arguments (`x`, `data.target`), or the qualified name of a parameter
            or buffer in the module.
        producer: the call that returns it.
        varies: it depends on an input, a parameter or a buffer. Other values stay R.
        constant: the tensor itself, if it is a constant.
        outer: its types on the axes that its program is divided over already, outermost first.
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
    outer: tuple[SpmdType, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(eq=False, repr=False)
class Call(CallFacts):
    """A call of one torch function on global values.

    Attributes:
        function: the object that the rules are keyed by (`RULES`).
        args, kwargs: as in the source, with `Value`s in the place of tensors, in tuples, lists, dicts and slices too.
        results: the tensors that it returns, in order.
        several: it returns a tuple or list of its results, not one tensor.
        source: the text of the user's line.
        writes: indices of the operands that it writes in place (buffers only: other writes become values in recording).
        outer: how this call is sharded on the axes that its program is divided over already, outermost first; of a
            conversion only on the axis of the conversion and later ones, as it does not change other types.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value] = field(default_factory=list)
    several: bool = False
    source: str = ""
    writes: tuple[int, ...] = ()
    outer: tuple[OuterCall, ...] = ()

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
        arguments: the leaves of forward's arguments, values and constants; `structure`: their pytree structure.
        parameters, buffers, constants: the other values that calls read; a tied parameter is listed once.
        outputs: the leaves of the result, values and constants; `output_structure`: their pytree structure.
        training: `module.training` when the forward was recorded.
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
        """Yields every value that no call returns."""
        yield from (*self.inputs, *self.parameters, *self.buffers, *self.constants)

    def consumers(self) -> dict[Value, list[tuple[Call, int]]]:
        """Returns, by value, the calls that read it, with the index of the operand."""
        table: dict[Value, list[tuple[Call, int]]] = {value: [] for value in self.leaves}
        for call in self.calls:
            for index, value in enumerate(operands_of(call)):
                table.setdefault(value, []).append((call, index))
        return table


class OuterCall(NamedTuple):
    """Sharding of a call on an axis, in the local program of a rank of this axis, which later axes divide.

    Attributes:
        axis, size: the axis, and its number of ranks.
        operands, results: types on the axis.
        bytes_moved: bytes that a rank sends in the call itself, forward and backward, along this axis or earlier ones.
        whole: the call that the axis divides; None if the call is a conversion on this axis.
        steps: as in `Strategy`.
    """

    axis: str
    size: int
    operands: tuple[SpmdType, ...]
    results: tuple[SpmdType, ...]
    bytes_moved: tuple[int, int]
    whole: Call | None
    steps: int = 0


class LocalCall(NamedTuple):
    """The call that a rank makes: the function with the integers of a shard (views, groups, splits), or a composite."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Strategy(NamedTuple):
    """A way to run a call on the ranks of one axis.

    Attributes:
        name: "R", "I", "S(1) of operand 0", "P of 0", or a composite's name; unique among a call's strategies.
        operands: type of each tensor operand, in the order of the rules' operands.
        results: type of each result.
        local: the call that a rank makes.
        share: the fraction of the call's computation that a rank does, of ranks that do more than others the largest.
        bytes_moved: bytes that a rank sends in the call itself, forward and backward (composites).
        steps: number of messages in which a rank sends them while it computes, forward; backward has twice as many.
            0: a collective each, for whose end the rank waits.
    """

    name: str
    operands: tuple[SpmdType, ...]
    results: tuple[SpmdType, ...]
    local: LocalCall
    share: float = 1.0
    bytes_moved: tuple[int, int] = (0, 0)
    steps: int = 0


@dataclass
class Division:
    """A program divided over the ranks of a unit: `stages` pipeline stages of `size` ranks along `axis`.

    With several axes, `program` is the local program of a rank of the axes before, as the division `outer` makes it.

    Attributes:
        strategies: the strategy of each call.
        types: types of inputs, parameters, buffers and constants. The types of results follow from their calls
            (`type_of`). Where an operand's type differs from its value's type, a conversion stands between, once for
            all calls that need the same type.
        stages: index of the first call of each stage; `[0]`: one stage.
        recompute: (first, end) spans of calls whose values are computed again in backward; spans may be nested.
        schedule, microbatches: the pipeline schedule, a name of `pipeline.schedule`, and its number of microbatches.
        pipeline_ranks: stage s is on group s % pipeline_ranks of a stage's ranks.
        outer: the division over the axis before; None: this is the first axis.
        zero1: units shard the optimizer's state, if the policy chose the units.
        joined_bytes: bytes of the largest tensor that may travel with others in one collective.
        costs: computes what the division costs, by the choice that made it; None: nothing knows that.
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
    zero1: bool = False
    joined_bytes: float = 0.0
    costs: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    @property
    def levels(self) -> list[Division]:
        """The divisions over each axis, the outermost first, which divides the global program; this one is the last."""
        return [*(self.outer.levels if self.outer else ()), self]

    @property
    def whole(self) -> Program:
        """The recorded, global program."""
        return self.levels[0].program

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis that the program is divided over, the outermost first."""
        return {level.axis: level.size for level in self.levels}

    @property
    def cuts(self) -> tuple[int, ...]:
        """`Mesh.tp_replicas` for types on these axes: number of ranks inside of each axis but the last."""
        sizes = [*self.axes.values()]
        return tuple(math.prod(sizes[number:]) for number in range(1, len(sizes)))

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage."""
        return math.prod(self.axes.values())

    def type_of(self, value: Value) -> SpmdType:
        if value.producer is None:
            return self.types[value]
        return self.strategies[value.producer].results[value.producer.results.index(value)]

    def types_of(self, value: Value) -> dict[str, SpmdType]:
        """Returns the type of a value on each divided axis."""
        outer = dict(zip(self.axes, value.outer))  # without the last axis
        return {**outer, self.axis: self.type_of(value)} if self.size > 1 else outer


def operands_of(call: Call) -> list[Value]:
    """Returns the tensor operands of a call, in the order of the rules' operands."""
    return operands(call.args, call.kwargs, Value)


def values_in(x: Any) -> Iterator[Value]:
    """Yields all values in containers, slices included."""
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from values_in(item)
    elif isinstance(x, dict):
        yield from values_in(list(x.values()))
    elif isinstance(x, slice):
        yield from values_in((x.start, x.stop, x.step))


def dotted(path: Sequence[Any]) -> str:
    """Returns a pytree path as programs write it: `data.target`, `layers.0`."""
    return ".".join(str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", "")))) for entry in path)


def local_shape(shape: tuple[int, ...], spmd_type: SpmdType, size: int) -> tuple[int, ...]:
    """Returns the shape that one of `size` ranks holds of a tensor of global `shape`."""
    if not isinstance(spmd_type, Shard):
        return shape
    return *shape[: spmd_type.dim], shape[spmd_type.dim] // size, *shape[spmd_type.dim + 1 :]


# Names that an emitted file uses itself.
FILE_NAMES = frozenset(
    ("torch", "F", "spmd", "composites", "checkpoint", "ParallelModule", "Stored", "I", "P", "R", "S", "self")
)


def argument_name(name: str) -> str:
    """Returns the emitted forward's name for an argument: with "_" added if the file uses the name itself."""
    return f"{name}_" if name in FILE_NAMES else name


def fresh(name: str, used: set[str]) -> str:
    """Returns an unused name, and adds it to `used`."""
    new, number = name, 2
    while new in used:
        new, number = f"{name}_{number}", number + 1
    used.add(new)
    return new


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
