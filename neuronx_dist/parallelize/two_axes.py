"""What a policy says of the second of two axes: operations in parts that are in parts again, weights in shards.

It is kept until there is a program to be divided over that axis: that of a rank of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..planning.plan import PlanError
from ..spmd.types import SpmdType
from .local_program import LocalProgram
from .nodes import IRFwOperation, Node
from .program import Call, Strategy, Value
from .tables import Constraints

__all__ = ["SecondAxis"]

Allowed = Callable[[Strategy], bool]


@dataclass
class SecondAxis:
    """The second axis of a graph.

    Attributes:
        size: ranks of a stage along it; 1: a stage is one axis.
        strategies: of a call of the whole program whether a strategy of what stands for it is allowed, every one.
        types: of a parameter the types that it may have there.
        decide: each gets the graph of what a rank of the first axis runs, and that program, and decides more.
    """

    size: int = 1
    strategies: dict[Call, list[Allowed]] = field(default_factory=dict)
    types: dict[Value, tuple[SpmdType, ...]] = field(default_factory=dict)
    decide: list[Callable[[Any, LocalProgram], Any]] = field(default_factory=list)

    def settle(self, nodes: Sequence[Node], ranks: int) -> None:
        """Its size, from operations whose parts are in parts, and what that means for those that are not.

        Raises:
            PlanError: operations are over axes of different sizes, or the parts of one in different parts.
        """
        divided = [node for node in nodes if any(part.parts for part in node.parts)]
        for node in divided:
            sizes = len(node.parts), len(node.parts[0].parts)
            wanted = ranks // self.size, self.size
            if self.size == 1 and sizes[0] * sizes[1] == ranks:
                self.size, wanted = sizes[1], sizes
            if sizes != wanted or any(len(part.parts) != sizes[1] for part in node.parts):
                has = " + ".join(str(len(part.ends)) for part in node.parts)
                raise PlanError(
                    f"{node!r} is in {has} parts, and a stage has {ranks} ranks"
                    + (f", {wanted[0]} x {wanted[1]} on two axes" if self.size > 1 else "")
                    + ": all operations of a stage are over the same axes"
                )
            if isinstance(node, IRFwOperation) and len(set(self.strategies[node.call])) > 1:
                raise PlanError(f"the parts of {node!r} are divided differently: one program runs on all ranks")

    def constrain(self, local: LocalProgram, first: Constraints, nodes: Sequence[Node], ranks: int) -> Constraints:
        """The constraints on the program of a rank of the first axis.

        An operation that is in as many parts as there are ranks is cut along the same dim, or whole, on both axes.
        """
        constraints = Constraints()
        for call, allowed in self.strategies.items():
            constraints.strategies[local.calls[call]] = [allowed[0]]
        for node in nodes:
            if isinstance(node, IRFwOperation) and len(node.parts) == ranks and not node.parts[0].parts:
                constraints.strategies[local.calls[node.call]] = list(first.strategies.get(node.call, ()))
        constraints.types = {local.values[value]: types for value, types in self.types.items()}
        return constraints
