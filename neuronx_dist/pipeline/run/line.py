"""The line of an autograd graph, from its roots to a stage's inputs, and the edges that leave the line.

root ── n3 ─── n2 ─── n1 ─── input       the line
        │      │      │
        w3     T ─ w2  w1                n3, n2 and n1 branch: edges leave the line there, to parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.autograd.graph import GradientEdge, Node

from ...torch_internals.autograd import FunctionNode, function_class

__all__ = ["Branch", "Line", "below", "follow", "is_custom"]

_COMPILED = "CompiledFunctionBackward"


class Branch(NamedTuple):
    """A node on the line that leads to parameters.

    Attributes:
        edges: `(index, edge)` of the edges that leave the line.
        once: the node cannot be run in halves.
    """

    node: Any
    edges: list[tuple[int, GradientEdge]]
    once: bool


class Line(NamedTuple):
    """Nodes of a graph between its roots and inputs, as `follow` sorts them.

    Attributes:
        branches: from the roots to the inputs.
        others: nodes on the line that do not branch.
        beside: indices of roots that lead to no input.
        shares: a node beside the line is reached in two ways, such as a parameter that is used twice.
        compiled: names of nodes that `torch.compile` made.
    """

    branches: list[Branch]
    others: list[Any]
    beside: set[int]
    shares: bool
    compiled: list[str]


def follow(roots: Sequence[Node], inputs: set[Node]) -> Line:
    """Sorts the nodes between the roots and the inputs, and finds the edges that leave the line."""
    # Plain loops: this runs for each microbatch, and generators take as long as all the rest.
    edges_of: dict[Node, tuple[tuple[Node | None, int], ...]] = dict.fromkeys(inputs, ())
    leads: dict[Node, bool] = dict.fromkeys(inputs, True)
    for root in roots:
        stack = [root]
        while stack:
            node = stack[-1]
            edges = edges_of.get(node)
            if edges is None:
                edges = edges_of[node] = node.next_functions
                for child, _ in edges:
                    if child is not None and child not in edges_of:
                        stack.append(child)
            else:
                stack.pop()
                if node not in leads:
                    leads[node] = False
                    for child, _ in edges:
                        if child is not None and leads[child]:
                            leads[node] = True
                            break
    branches, others = [], []
    beside = {index for index, root in enumerate(roots) if not leads[root]}
    reached = [roots[index] for index in beside]
    for node, on_line in reversed(leads.items()):  # a node comes before the nodes that it leads to
        edges = edges_of[node]
        if not edges:  # an input, or a leaf
            continue
        leaving = []
        for index, (child, number) in enumerate(edges):
            if child is not None and not leads[child]:
                reached.append(child)
                if on_line:
                    leaving.append((index, GradientEdge(child, number)))
        if leaving:
            branches.append(Branch(node, leaving, is_custom(node) and not splits(node)))
        elif on_line:
            others.append(node)
    compiled = [name for node in (*others, *(b.node for b in branches)) if (name := type(node).__name__) == _COMPILED]
    return Line(branches, others, beside, len(set(reached)) < len(reached), compiled)


def below(nodes: list[Node], seen: set[Node]) -> list[Node]:
    """Nodes reachable from `nodes`, without those in `seen`, which are added to it. Empties the list `nodes`."""
    reached: list[Node] = []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            reached.append(node)
            nodes += [child for child, _ in node.next_functions if child is not None]
    return reached


def is_custom(node: Any) -> bool:
    return isinstance(node, FunctionNode)


def splits(node: Any) -> bool:
    return bool(getattr(function_class(node), "splits_backward", False))
