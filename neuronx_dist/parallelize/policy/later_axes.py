"""Decisions of a policy about the axes after the first one: operations that were partitioned again, sharded weights.

They are stored until the axis before is divided: each axis divides the local program of a rank of the axis before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...planning.plan import PlanError
from ...program.program import Call, Strategy
from ..choose.cost_tables import Constraints
from ..choose.local_program import LocalProgram
from .operations import IRFwOperation, Node, SubNode

__all__ = ["Decision", "LaterAxes", "axes_wanted"]

Allowed = Callable[[Strategy], bool]
Decision = Callable[[Any, LocalProgram], Any]


@dataclass
class LaterAxes:
    """The axes of a graph after its first one.

    Attributes:
        sizes: number of a stage's ranks along each, outermost first; (): a stage is one axis.
        strategies: by number of the axis, from 0, tests that a strategy of a call's local call must all pass.
        decide: functions that add constraints about the next axis, called with the graph of the local program, whose
            `later` has the axes after that one, and that program.
    """

    sizes: tuple[int, ...] = ()
    strategies: defaultdict[int, dict[Call, list[Allowed]]] = field(default_factory=lambda: defaultdict(dict))
    decide: list[Decision] = field(default_factory=list)

    def decide_each(self, sizes: Sequence[int], decisions: Sequence[Decision]) -> None:
        """Sets the sizes of the axes, and adds a decision about each, called as those of `decide`."""
        self.sizes = tuple(sizes)
        if not decisions:
            return
        first, *others = decisions

        def on_first(inner: Any, local: LocalProgram) -> None:
            inner.later.decide_each(sizes[1:], others)
            first(inner, local)

        self.decide.append(on_first)

    def settle(self, nodes: Sequence[Node], first: Constraints, ranks: int) -> None:
        """Infers the sizes from operations that were partitioned again, and checks that all agree.

        An operation with as many parts as ranks is cut along the same dim, or replicated, on all axes.

        Raises:
            PlanError: operations have axes of different sizes, or the parts of an operation are divided differently.
        """
        for node in nodes:
            if not any(part.parts for part in node.parts):
                continue
            sizes = _sizes_of(node.parts)
            if not self.sizes and sizes and prod(sizes) == ranks:
                self.sizes = sizes[1:]
            wanted = ranks // prod(self.sizes), *self.sizes
            if sizes != wanted:
                has = " + ".join(str(len(part.ends)) for part in node.parts)
                raise PlanError(
                    f"{node!r} is divided into {has} parts, but a stage has {ranks} ranks"
                    + (f", {' x '.join(map(str, wanted))} on {len(wanted)} axes" if self.sizes else "")
                    + ": all operations of a stage must use the same axes"
                )
            tables = [self.strategies[number] for number in range(len(self.sizes))]
            if isinstance(node, IRFwOperation) and any(len(set(table[node.call])) > 1 for table in tables):
                raise PlanError(f"the parts of {node!r} are divided differently: one program runs on all ranks")
        for node in nodes:
            if isinstance(node, IRFwOperation) and len(node.parts) == ranks and not node.parts[0].parts:
                for number in range(len(self.sizes)):
                    self.strategies[number][node.call] = list(first.strategies.get(node.call, ()))

    def after(self, local: LocalProgram) -> tuple[Constraints, LaterAxes]:
        """Returns the constraints on the local program of a rank of the first axis, and the axes after the next one."""
        constraints, later = Constraints(), LaterAxes(self.sizes[1:])
        for number, table in self.strategies.items():
            strategies = later.strategies[number - 1] if number else constraints.strategies
            strategies.update((local.calls[call], list(allowed)) for call, allowed in table.items())
        return constraints, later


def axes_wanted(option: Any, ranks: int) -> list[tuple[int, ...]]:
    """Returns the axes of a stage of so many ranks that `explore_axes` names, outermost first, `(ranks,)` for one axis.

    True: one axis, and two of any sizes; a list: axes of these sizes, if they have so many ranks.
    """
    if isinstance(option, (list, tuple)):
        listed = tuple(size for size in option if size > 1) or (1,)
        return [listed] if prod(listed) == ranks else []
    return [(ranks,), *((ranks // size, size) for size in range(2, ranks) if ranks % size == 0 and option)]


def _sizes_of(parts: Sequence[SubNode]) -> tuple[int, ...] | None:
    """Returns the number of parts on each axis; None: parts are divided into different numbers of parts."""
    if not parts:
        return ()
    inside = {_sizes_of(part.parts) for part in parts}
    rest = inside.pop()
    return None if inside or rest is None else (len(parts), *rest)
