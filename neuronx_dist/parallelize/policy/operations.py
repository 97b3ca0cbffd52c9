"""The nodes that a policy works on: the operations of a recorded program, under nnScaler's names.

IRFwOperation    one call; `IRDataOperation`: the inputs; `IRSegment`: the operations of one pipeline stage
SubNode          the part of an operation that one rank of a stage computes, to be assigned to a device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from ...planning.plan import PlanError
from ...program.program import Call, Strategy, Value, operands_of
from ...spmd.types import Shard
from ..choose.conversions import WholeOnRank

__all__ = ["Algorithm", "IRDataOperation", "IRFwOperation", "IRSegment", "Node", "SubNode", "cuts_operand"]


class Strategies(Protocol):
    """A function that returns the strategies of a call over `size` ranks; None: over the ranks of a stage."""

    def __call__(self, call: Call, size: int | None = None) -> Sequence[Strategy]: ...


@dataclass(eq=False)
class SubNode:
    """Part `index` of `count` of an operation; the parts of a replicated operation all compute the same.

    Attributes:
        device: the rank in the unit that it is assigned to; None: not assigned yet.
        axis: number of the axis that it is a part along; 0: the first one.
        parts: its parts along the next axis; empty: it is not divided again.
    """

    node: Node
    index: int
    count: int
    axis: int = 0
    device: int | None = None
    parts: list[SubNode] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.node.name

    def algorithm(self, name: str) -> Algorithm:
        """Returns the partitioning algorithm of this name, over the next axis; "dim" is the only one."""
        if not isinstance(self.node, IRFwOperation):
            raise PlanError(f"{self!r} cannot be partitioned: every rank of a unit gets the whole inputs")
        return self.node.algorithm(name)

    algorithms = algorithm

    @property
    def ends(self) -> list[SubNode]:
        """The smallest parts of this part, or the part itself if it has none."""
        return [end for part in self.parts for end in part.ends] or [self]

    def __repr__(self) -> str:
        return f"part {self.index} of {self.count} of {self.node!r}"


@dataclass(eq=False)
class Node:
    """An operation of the graph.

    Attributes:
        name: name of the function: "linear".
        module: qualified name of the module whose forward makes the call.
        parts: its parts, made by `partition`, `replicate` or `assign`; empty: left to the solver.
    """

    name: str
    module: str
    parts: list[SubNode] = field(default_factory=list)

    @property
    def device(self) -> list[int]:
        """The devices that its parts are assigned to."""
        return [part.device for part in self.ends if part.device is not None]

    @property
    def ends(self) -> list[SubNode]:
        """The smallest parts: parts that are divided again are replaced by their parts."""
        return [end for part in self.parts for end in part.ends]

    def inputs(self) -> list[Value]:
        """The tensors that it reads."""
        return []

    def outputs(self) -> list[Value]:
        """The tensors that it returns."""
        return []

    def input(self, index: int) -> Value:
        return self.inputs()[index]

    def output(self, index: int) -> Value:
        return self.outputs()[index]

    def isfw(self) -> bool:
        """Returns True: all operations belong to the forward."""
        return True


@dataclass(eq=False, repr=False)
class IRDataOperation(Node):
    """The inputs of the program, which every rank of a unit has in full."""

    values: list[Value] = field(default_factory=list)

    def outputs(self) -> list[Value]:
        return self.values

    def __repr__(self) -> str:
        return f"inputs {', '.join(value.path for value in self.values)}"


@dataclass(eq=False, repr=False)
class Algorithm:
    """Partitioning along a dim of a tensor operand."""

    node: IRFwOperation
    name: str = "dim"

    def satisfy(self, *, idx: int, dim: int, num: int) -> bool:
        """Returns whether the operation can be cut along dim `dim` of its tensor operand `idx` over `num` ranks."""
        return any(cuts_operand(idx, dim)(strategy) for strategy in self.node.strategies(self.node.call, num))


@dataclass(eq=False, repr=False)
class IRFwOperation(Node):
    """A call of the program.

    Attributes:
        recompute: it is computed again in backward, by `graph.recompute` or the module's activation checkpoints.
        span: a number, negative, of the operations that a policy has recomputed together.
    """

    call: Call = field(kw_only=True)
    strategies: Strategies = field(kw_only=True)
    recompute: bool = False
    span: int = 0

    def inputs(self) -> list[Value]:
        return operands_of(self.call)

    def outputs(self) -> list[Value]:
        return self.call.results

    @property
    def signature(self) -> str:
        """Qualified name of the function: `torch.nn.functional.linear`."""
        return f"{getattr(self.call.function, '__module__', None) or 'torch.Tensor'}.{self.name}"

    def transform_space(self) -> list[tuple[int, int]]:
        """Returns `(index of a tensor operand, dim)` for all dims that can be cut over the ranks of a stage."""
        cuts = [
            (index, type_.dim)
            for strategy in self.strategies(self.call)
            for index, type_ in enumerate(strategy.operands)
            if isinstance(type_, Shard) and cuts_operand(index, type_.dim)(strategy)
        ]
        return sorted(set(cuts))

    def algorithm(self, name: str) -> Algorithm:
        """Returns the partitioning algorithm of this name; "dim" is the only one.

        Raises:
            PlanError: there is no such algorithm.
        """
        if name != "dim":
            raise PlanError(f'{self!r} has no algorithm {name!r}; there is "dim"')
        return Algorithm(self)

    algorithms = algorithm

    def __repr__(self) -> str:
        return repr(self.call)


@dataclass(eq=False, repr=False)
class IRSegment(Node):
    """The operations of one pipeline stage."""

    operations: list[IRFwOperation] = field(default_factory=list)

    def nodes(self) -> list[IRFwOperation]:
        return list(self.operations)

    def __repr__(self) -> str:
        return f"{self.name} ({len(self.operations)} operations)"


@cache
def cuts_operand(index: int, dim: int) -> Callable[[Strategy], bool]:
    """Returns a test whether a strategy cuts this dim of this operand, in blocks or not."""

    def cuts(strategy: Strategy) -> bool:
        type_ = strategy.operands[index] if 0 <= index < len(strategy.operands) else None
        return isinstance(type_, Shard) and type_.dim == dim and not isinstance(type_, WholeOnRank)

    return cuts
