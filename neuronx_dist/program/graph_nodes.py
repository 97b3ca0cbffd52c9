"""A recording's graph under construction: the node that stands for each tensor."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ..comm.backends.shapes import ShapesCommunicator
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import pytree
from .effects import has_tensors, storage_of, tensors_in
from .recording import Info, TensorSpec, TracingError, pack, part

__all__ = ["Nodes", "refuse_hidden"]

_OPAQUE = (
    bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
)  # fmt: skip


class Nodes:
    """The nodes of a graph, by the tensors that they stand for.

    Attributes:
        graph: the graph that is built.
        attributes: (kind, name, stand-in) of each parameter and buffer, by its id and by that of its stand-in.
        storages: storage ids of all tensors that nodes stand for, and of attributes.
    """

    def __init__(self, advice: str) -> None:
        """`advice`: the remedy that the error about an unrecordable call names."""
        self.graph = fx.Graph()
        self._advice = advice
        self.attributes: dict[int, tuple[str, str, torch.Tensor]] = {}
        self.storages: set[int] = set()
        self._originals: dict[int, int] = {}  # storage id of a fake stand-in -> storage id of the real tensor
        self._nodes: dict[int, fx.Node] = {}  # by id of the tensor
        self._alive: list[torch.Tensor] = []  # tensors whose ids are in use, kept alive so that no id is reused

    def add_attribute(self, kind: str, name: str, original: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Registers a tensor and its stand-in as the parameter or buffer `name`."""
        self.attributes[id(stand_in)] = self.attributes[id(original)] = (kind, name, stand_in)
        self._alive += [original, stand_in]
        self.storages.add(storage_of(stand_in))

    def memory_of(self, x: torch.Tensor) -> int:
        """Storage id; a fake stand-in reports the storage of the tensor it replaces."""
        storage = storage_of(x)
        return self._originals.get(storage, storage)

    def add_view(self, storage: int, original: int) -> None:
        """Registers that `storage`, of a fake stand-in for a real tensor, stands for the storage `original`."""
        self._originals[storage] = self._originals.get(original, original)

    def bind(self, node: fx.Node, result: Any, info: Info) -> None:
        """Makes `node` stand for `result`, and adds nodes for the tensors inside of it."""
        node.meta["info"] = info
        if isinstance(result, torch.Tensor):
            info.spec, info.storage = TensorSpec.of(result), self.memory_of(result)
            self._nodes[id(result)] = node
            self._alive.append(result)
            self.storages.add(info.storage)
            return
        if not has_tensors(result):
            return
        if isinstance(result, (list, tuple)):
            info.items = len(result)
            items: list[tuple[Any, Any, Any]] = [(operator.getitem, i, item) for i, item in enumerate(result)]
        elif type(result) is dict:
            items = [(operator.getitem, key, item) for key, item in result.items()]
        else:
            items = [(part, i, leaf) for i, leaf in enumerate(pytree.tree_leaves(result))]
        for take, key, item in items:
            if has_tensors(item):
                child = self.graph.create_node("call_function", take, (node, key))
                self.bind(child, item, Info("part", where=info.where))

    def argument(self, x: Any, where: str) -> Any:
        """Returns a node's argument for `x`: tensors become nodes, other objects stay."""
        if isinstance(x, torch.Tensor):
            return self._node(x, where)
        if isinstance(x, _OPAQUE):
            return x
        if isinstance(x, slice):
            return slice(*(self.argument(bound, where) for bound in (x.start, x.stop, x.step)))
        if type(x) in (list, tuple):
            return type(x)(self.argument(item, where) for item in x)
        if type(x) is dict:
            return {key: self.argument(item, where) for key, item in x.items()}
        if isinstance(x, ShapesCommunicator):  # a stand-in that sends nothing; its axis names the real communicator
            axes = tuple(x.axis.split(","))
            return axes[0] if len(axes) == 1 else axes
        leaves, structure = pytree.tree_flatten(x)
        if not structure.is_leaf():
            if not has_tensors(leaves):
                return x
            items = self.argument(leaves, where)
            node = self.graph.create_node("call_function", pack, (items, structure))  # type: ignore[arg-type]
            node.meta["info"] = Info("pack", where=where)
            return node
        refuse_hidden(x, "an argument", where)
        return x

    def _node(self, x: torch.Tensor, where: str) -> fx.Node:
        node = self._nodes.get(id(x))
        if node is None:
            kind, name, stand_in = self.attributes.get(id(x), ("", "", x))
            if not kind:
                if isinstance(x, FakeTensor):
                    raise TracingError(
                        f"{where}: a tensor of shape {tuple(x.shape)} comes from a call that cannot be recorded. "
                        f"{self._advice}"
                    )
                kind, name = "constant", f"_constant_{len(self._alive)}"
            node = self.graph.create_node("get_attr", name)
            self.bind(node, stand_in, Info(kind, where=where, constant=x if kind == "constant" else None))
            self._nodes[id(x)] = node
            self._alive.append(x)
        info = node.meta["info"]
        if x.requires_grad and not info.spec.requires_grad:  # set since; of no leaf: by a write to a view of it
            info.spec, info.grad_by_write = info.spec._replace(requires_grad=True), not x.is_leaf
        return node


def refuse_hidden(x: Any, what: str, where: str) -> None:
    """Raises a TracingError if an opaque object holds fake tensors, which the recorder would not follow."""
    if isinstance(x, (nn.Module, type)) or callable(x):
        return
    attributes = getattr(x, "__dict__", {})
    if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(list(attributes.values()))):
        raise TracingError(
            f"{where}: {what} is a {type(x).__name__} that holds tensors. Register the class with "
            f"torch.utils._pytree.register_pytree_node, or pass its tensors in a tuple or dict."
        )
