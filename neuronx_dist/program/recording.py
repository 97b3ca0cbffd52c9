"""A recorded forward as data: an `fx.Graph` whose nodes have source lines, effects and the calls they must follow."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..torch_internals.tensors import pytree

__all__ = ["CallFacts", "Info", "Recording", "TensorSpec", "TracingError", "describe", "info_of", "is_leaf", "pack",
           "part", "register_dataclass", "register_dataclasses"]  # fmt: skip


class TracingError(RuntimeError):
    """A forward that cannot be recorded; the message names file and line, and what to do."""


class TensorSpec(NamedTuple):
    """Shape, strides, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)


@dataclass(kw_only=True, eq=False)
class CallFacts:
    """Facts about a call that a recording and a program have in common.

    Attributes:
        where: `file:line` of the user's call.
        module: qualified name of the module whose forward was running, or of the called leaf module.
        flops: floating-point operations of its matrix products and convolutions, in forward.
        random: it draws random numbers.
        grad: gradients were enabled, in a forward that is run with gradients.
        autocast: `(device type, dtype, enabled)` where that differed from the state around the forward.
        checkpoints: numbers of the activation checkpoints that the user's code put around it, the outermost first.
    """

    where: str = ""
    module: str = ""
    flops: int = 0
    random: bool = False
    grad: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    checkpoints: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Returns these facts by name."""
        return {fact.name: getattr(self, fact.name) for fact in dataclasses.fields(CallFacts)}


@dataclass
class Info(CallFacts):
    """Facts about a recorded node.

    Attributes:
        kind: `input`, `parameter`, `buffer`, `constant`, `module`, `function`, `part` (of the result before) or `pack`
            (arguments put into a container).
        spec: shape, strides and dtype of the result, if that is a tensor.
        storage: id of the result's storage: equal for a tensor and its views.
        after: earlier calls that changed the memory of its arguments.
        writes: storage ids of the memory that it changes; a leaf module that replaces a buffer changes the buffer.
        buffers: storage ids of the buffers that a leaf module holds.
        repeatable: whether several stages may make a leaf module's call: the module has no parameters, and issues no
            collective.
        constant: the tensor itself, for `constant`.
        function: the called object, as a `TorchFunctionMode` receives it, for `function`.
        items: length of the tuple or list that it returns.
        grad_by_write: its result required no gradient until a view of it was written.
    """

    kind: str
    spec: TensorSpec | None = None
    storage: int | None = None
    after: set[fx.Node] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    buffers: frozenset[int] = frozenset()
    repeatable: bool = False
    constant: torch.Tensor | None = None
    function: Callable[..., Any] | None = None
    items: int = 0
    grad_by_write: bool = False

    @property
    def checkpoint(self) -> int | None:
        """Number of the innermost activation checkpoint around it."""
        return self.checkpoints[-1] if self.checkpoints else None


@dataclass
class Recording:
    """A recorded forward.

    Attributes:
        graph: the calls.
        result: the forward's result, with fake tensors.
        outputs: the leaves of the result: nodes and constants.
        structure: the pytree structure of the result.
        rebound: (buffer, new tensor) for each buffer that the forward replaced; known only if no module is a leaf.
        left: each `Change` of Python's state that the forward left, which is rolled back.
        reads_requires_grad: the first line that reads `requires_grad` of a tensor that depends on the inputs; "": none.
    """

    graph: fx.Graph
    result: Any
    outputs: list[Any]
    structure: pytree.TreeSpec
    rebound: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    reads_requires_grad: str = ""

    def calls(self) -> list[fx.Node]:
        """Returns the calls of leaf modules, in order."""
        return [node for node in self.graph.nodes if node.op == "call_module"]

    def last_calls(self) -> dict[str, fx.Node]:
        """Returns the last call of each leaf module, by the module's name, in the order of these calls."""
        last = {str(node.target): node for node in self.calls()}
        position = {node: index for index, node in enumerate(self.graph.nodes)}
        return dict(sorted(last.items(), key=lambda item: position[item[1]]))


def info_of(node: fx.Node) -> Info:
    """Returns the facts about a recorded node."""
    info: Info = node.meta["info"]
    return info


def is_leaf(module: nn.Module, leaf_classes: Sequence[type]) -> bool:
    """Returns whether a module is recorded as one call: of a leaf class, or one layer with parameters or of `torch.nn`.

    The inside of a childless module without parameters, such as a rotary embedding, is recorded unless it is of a leaf
    class. A layer of `torch.nn` with direct parameters is single even if it has children: `nn.MultiheadAttention`. So
    is one that says `recorded_as_one_call`, since the calls inside it depend on values.
    """
    if isinstance(module, tuple(leaf_classes)) or getattr(module, "recorded_as_one_call", False):
        return True
    of_torch = type(module).__module__.startswith("torch.nn.")
    if next(module.children(), None) is not None:
        return of_torch and next(module.parameters(recurse=False), None) is not None
    return of_torch or next(module.parameters(), None) is not None


def pack(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
    """Returns the container that `structure` describes, around `leaves`."""
    return pytree.tree_unflatten(list(leaves), structure)


def part(container: Any, index: int) -> Any:
    """Returns leaf number `index` of a container of a registered class."""
    return pytree.tree_leaves(container)[index]


def register_dataclasses(x: Any) -> None:
    """Registers the unregistered dataclasses among the objects in `x` as containers of torch's pytrees."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        register_dataclass(type(x))
    for item in pytree.tree_flatten(x, is_leaf=lambda y: y is not x)[0]:
        if item is not x:
            register_dataclasses(item)


def register_dataclass(cls: type) -> None:
    """Registers a dataclass as a container of torch's pytrees, unless it is registered."""
    with _REGISTERING:  # ranks may be threads
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(cls)


_REGISTERING = threading.Lock()


def describe(x: Any) -> str:
    """Describes inputs or outputs for a message: containers with the shapes of tensors, long ones shortened."""
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
