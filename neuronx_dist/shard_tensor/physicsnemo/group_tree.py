"""Groups of a job as a tree: `ProcessGroupNode`, `ProcessGroupConfig`, for `create_groups_from_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

__all__ = ["ProcessGroupConfig", "ProcessGroupNode"]


@dataclass
class ProcessGroupNode:
    """A group, by name, with its number of ranks, which `set_leaf_group_sizes` computes for groups with children."""

    name: str
    size: int | None = None


class ProcessGroupConfig:
    """A tree of groups. The ranks of a group are the product of those of its children.

    Example:
        >>> config = ProcessGroupConfig(ProcessGroupNode("world"))
        >>> config.add_node(ProcessGroupNode("model_parallel"), parent="world")
        >>> config.add_node(ProcessGroupNode("data_parallel"), parent="world")
        >>> config.set_leaf_group_sizes({"model_parallel": 2, "data_parallel": 4})
        >>> config.get_node("world").size
        8
    """

    def __init__(self, node: ProcessGroupNode) -> None:
        self.root = node
        self.root_id = node.name
        self._nodes = {node.name: node}
        self._children: dict[str, list[str]] = {node.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Adds a group below another one.

        Raises:
            ValueError: the name is taken, or there is no such parent.
        """
        above = parent.name if isinstance(parent, ProcessGroupNode) else parent
        if node.name in self._nodes or above not in self._nodes:
            raise ValueError(
                f"add_node {node.name!r} below {above!r}: the groups are {list(self._nodes)}; the name must be new, "
                "and the parent one of them"
            )
        self._nodes[node.name] = node
        self._children[node.name] = []
        self._children[above].append(node.name)

    def get_node(self, name: str) -> ProcessGroupNode:
        """Returns a group by its name."""
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """Returns the groups below another one, in the order in which they were added."""
        return [self._nodes[child] for child in self._children[name]]

    def leaf_groups(self) -> list[str]:
        """Returns the names of the groups without children, depth first."""
        return self._leaves(self.root_id)

    def _leaves(self, name: str) -> list[str]:
        below = self._children[name]
        return [leaf for child in below for leaf in self._leaves(child)] if below else [name]

    def set_leaf_group_sizes(self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True) -> None:
        """Sets the sizes of groups without children; those of the others follow, if not switched off.

        Raises:
            ValueError: a name that is none of `leaf_groups`.
        """
        for name, size in group_sizes.items():
            if self._children.get(name) != []:
                raise ValueError(f"set_leaf_group_sizes: {name!r} is none of the leaf groups {self.leaf_groups()}")
            self._nodes[name].size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Computes the sizes of groups with children; returns that of the root. `verbose` prints changes.

        Raises:
            ValueError: a leaf group has no size.
        """
        return self._update(self.root, verbose)

    def _update(self, node: ProcessGroupNode, verbose: bool) -> int:
        below = self.children(node.name)
        if below:
            size = prod(self._update(child, verbose) for child in below)
            if verbose and size != node.size:
                print(f"group {node.name!r}: size {node.size} becomes {size}")
            node.size = size
        if node.size is None:
            raise ValueError(f"leaf group {node.name!r} has no size: pass it to set_leaf_group_sizes")
        return node.size
