"""Decisions of a policy about the second of two axes: operations that were partitioned twice, sharded weights.

They are stored until the first axis is divided: the second one divides the local program of a rank of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...planning.plan import PlanError
from ...program.program import Call, Strategy, Value
from ...spmd.types import SpmdType
from ..choose.cost_tables import Constraints
from ..choose.local_program import LocalProgram
from .operations import IRFwOperation, Node

__all__ = ["SecondAxis"]

Allowed = Callable[[Strategy], bool]


@dataclass
class SecondAxis:
    """The second axis of a graph.

    Attributes:
        size: number of a stage's ranks along it; 1: a stage is one axis.
        strategies: tests that a strategy of a global call's local call must all pass.
        types: the types that a parameter may have along this axis.
        decide: functions that add constraints, called with the graph of the local program and that program.
    """

    size: int = 1
    strategies: dict[Call, list[Allowed]] = field(default_factory=dict)
    types: dict[Value, tuple[SpmdType, ...]] = field(default_factory=dict)
    decide: list[Callable[[Any, LocalProgram], Any]] = field(default_factory=list)

    def settle(self, nodes: Sequence[Node], ranks: int) -> None:
        """Infers the size of the second axis from operations that were partitioned twice, and checks that all agree.

        Raises:
            PlanError: operations have axes of different sizes, or the parts of an operation are divided differently.
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
                    f"{node!r} is divided into {has} parts, but a stage has {ranks} ranks"
                    + (f", {wanted[0]} x {wanted[1]} on two axes" if self.size > 1 else "")
                    + ": all operations of a stage must use the same axes"
                )
            if isinstance(node, IRFwOperation) and len(set(self.strategies[node.call])) > 1:
                raise PlanError(f"the parts of {node!r} are divided differently: one program runs on all ranks")

    def constrain(self, local: LocalProgram, first: Constraints, nodes: Sequence[Node], ranks: int) -> Constraints:
        """Returns the constraints on the local program of a rank of the first axis.

        An operation with as many parts as ranks is cut along the same dim, or replicated, on both axes.
        """
        constraints = Constraints()
        for call, allowed in self.strategies.items():
            constraints.strategies[local.calls[call]] = [allowed[0]]
        for node in nodes:
            if isinstance(node, IRFwOperation) and len(node.parts) == ranks and not node.parts[0].parts:
                constraints.strategies[local.calls[node.call]] = list(first.strategies.get(node.call, ()))
        constraints.types = {local.values[value]: types for value, types in self.types.items()}
        return constraints
