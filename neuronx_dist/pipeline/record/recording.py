"""A recorded forward as data: an `fx.Graph` whose nodes know where they were called, and what must run before them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

__all__ = ["Info", "Recording", "TensorSpec", "TracingError", "describe", "info_of", "is_leaf", "pack", "part",
           "register_dataclass", "register_dataclasses"]  # fmt: skip


class TracingError(RuntimeError):
    """A forward that cannot be recorded; the message names file and line, and what to do."""


class TensorSpec(NamedTuple):
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)


@dataclass
class Info:
    """What is known about a node beside its call.

    Attributes:
        where: `file:line` of the user's call.
        kind: `input`, `parameter`, `buffer`, `constant`, `module`, `function`, `part` (of the result before) or `pack`
            (arguments put into a container).
        spec: of the result, if that is a tensor.
        storage: the memory it lies in: equal for a tensor and its views.
        after: earlier calls that changed the memory of its arguments.
        writes: whose memory it changes; a leaf module that puts another tensor in the place of a buffer changes it.
        buffers: memory of the buffers that a leaf module holds.
        repeatable: whether a leaf module's call may be made on several stages: it has no parameters, and issues no
            collective.
        random: whether it draws random numbers.
        flops: floating-point operations of its matrix products and convolutions.
        grad: whether gradients were enabled, in a forward that is run with gradients.
        autocast: `(device type, dtype, enabled)` where that differed from around the forward.
        checkpoints: the numbers of the activation checkpoints that it lies in, the outermost first.
        constant: the tensor itself, for `constant`.
        function: what was called, for `function`: the object that a `TorchFunctionMode` receives.
        module: qualified name of the module whose forward was running; known if no module is a leaf.
        items: of how many items the tuple or list is that it returns.
    """

    where: str
    kind: str
    spec: TensorSpec | None = None
    storage: int | None = None
    after: set[fx.Node] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    buffers: frozenset[int] = frozenset()
    repeatable: bool = False
    random: bool = False
    flops: int = 0
    grad: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    checkpoints: tuple[int, ...] = ()
    constant: torch.Tensor | None = None
    function: Callable[..., Any] | None = None
    module: str = ""
    items: int = 0

    @property
    def checkpoint(self) -> int | None:
        """The number of the innermost activation checkpoint that it lies in."""
        return self.checkpoints[-1] if self.checkpoints else None


@dataclass
class Recording:
    """A recorded forward.

    Attributes:
        graph: the calls.
        result: what the forward returned, with fake tensors.
        outputs: the leaves of the result: nodes and constants.
        structure: how they make up the result.
        rebound: buffers that the forward put another tensor in the place of, and those; known if no module is a leaf.
    """

    graph: fx.Graph
    result: Any
    outputs: list[Any]
    structure: pytree.TreeSpec
    rebound: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def calls(self) -> list[fx.Node]:
        """The calls of leaf modules, in order."""
        return [node for node in self.graph.nodes if node.op == "call_module"]

    def last_calls(self) -> dict[str, fx.Node]:
        """The last call of each leaf module, by its name, in order."""
        last = {str(node.target): node for node in self.calls()}
        position = {node: index for index, node in enumerate(self.graph.nodes)}
        return dict(sorted(last.items(), key=lambda item: position[item[1]]))


def info_of(node: fx.Node) -> Info:
    """What is known about a recorded node."""
    info: Info = node.meta["info"]
    return info


def is_leaf(module: nn.Module, leaf_classes: Sequence[type]) -> bool:
    """Whether a module is recorded as one call: a given class, or a single layer with parameters or of `torch.nn`.

    A childless module without parameters, such as a rotary embedding, is looked into unless it is of a given class. A
    layer of `torch.nn` with parameters of its own is single even if it has children: `nn.MultiheadAttention`.
    """
    if isinstance(module, tuple(leaf_classes)):
        return True
    of_torch = type(module).__module__.startswith("torch.nn.")
    if next(module.children(), None) is not None:
        return of_torch and next(module.parameters(recurse=False), None) is not None
    return of_torch or next(module.parameters(), None) is not None


def pack(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
    """The container that `structure` describes, around `leaves`."""
    return pytree.tree_unflatten(list(leaves), structure)


def part(container: Any, index: int) -> Any:
    """Leaf number `index` of a container of a registered class."""
    return pytree.tree_leaves(container)[index]


def register_dataclasses(x: Any) -> None:
    """Makes containers, for torch's pytrees, of the dataclasses in `x` whose class nobody has registered yet."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        register_dataclass(type(x))
    for item in pytree.tree_flatten(x, is_leaf=lambda y: y is not x)[0]:
        if item is not x:
            register_dataclasses(item)


def register_dataclass(cls: type) -> None:
    """Makes a container, for torch's pytrees, of a class of dataclasses that nobody has registered yet."""
    with _REGISTERING:  # ranks may be threads
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(cls)


_REGISTERING = threading.Lock()


def describe(x: Any) -> str:
    """Inputs or outputs for a message: their containers, with the shapes of tensors; of long ones the first items."""
    if isinstance(x, torch.Tensor):
        return f"Tensor{list(x.shape)}"
    if isinstance(x, Mapping):
        items = [f"{key!r}: {describe(value)}" for key, value in x.items()]
        return f"{'' if type(x) is dict else type(x).__name__}{{{_shortened(items)}}}"
    if isinstance(x, (tuple, list)):
        return f"({_shortened([describe(item) for item in x])})"
    return repr(x) if x is None or isinstance(x, (bool, int, float)) else type(x).__name__


def _shortened(items: list[str]) -> str:
    return ", ".join(items if len(items) <= 8 else [*items[:8], f"... {len(items)} in all"])
