"""Functions and modules that `torch.jit` compiled: typed by running their graph node by node, by torch's functions.

No mode sees what TorchScript's interpreter calls. Its graph has the same functions under the names of `aten`; called
from here they arrive in the mode as if the program had called them, with the types of the module's parameters, too. A
graph with a node that this file does not know runs as it is, and is judged as a function without a rule is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ....spmd.tensor_type import tensors_in
from ....spmd.watching import active
from ..rules import RULES, Rule
from ..session import Session

__all__ = ["install", "remove"]

_DTYPES = {
    number: getattr(torch, name)
    for number, name in enumerate(
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool".split()
    )
} | {15: torch.bfloat16}
_ATTRIBUTES = ("dtype", "device", "shape", "requires_grad", "is_cuda", "ndim")
_PLUMBING = {f"prim::{name}" for name in (*_ATTRIBUTES, *"Constant ListConstruct TupleConstruct ListUnpack TupleUnpack "
             "If Loop GetAttr RaiseException unchecked_cast NumToTensor Uninitialized".split())}  # fmt: skip


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if not isinstance(x, Tensor):
        return x[dim:start:end] if end is not None else x[dim:start]
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


_OWN: dict[str, Callable[..., Any]] = {
    "slice": _slice,
    "len": len,
    "Int": int,
    "Float": float,
    "Bool": bool,
    "__getitem__": operator.getitem,
    "append": _append,
}
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
_OPTIONS = ("layout", "memory_format")  # of memory, not of values; numbers, which torch does not take


class _Graph:
    """One run of a graph: the values of its nodes by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def run(self, block: Any, arguments: Sequence[Any]) -> list[Any]:
        """The outputs of a graph, or of a block of one."""
        self.bind(block.inputs(), arguments)
        for node in block.nodes():
            self.bind(node.outputs(), self.call(node, self.read(node.inputs())))
        return self.read(block.outputs())

    def bind(self, names: Any, values: Sequence[Any]) -> None:
        self.values.update((name.debugName(), value) for name, value in zip(names, values))

    def read(self, names: Any) -> list[Any]:
        return [self.values[name.debugName()] for name in names]

    def call(self, node: Any, inputs: list[Any]) -> Sequence[Any]:
        """The outputs of a node."""
        kind, name = node.kind(), node.kind().partition("::")[2]
        if kind.startswith("aten::"):
            result = _call(node, name, inputs)
            return [result] if node.outputsSize() == 1 else result
        if name == "Constant":
            return [None if node.output().type().kind() == "FunctionType" else node.output().toIValue()]
        if name in ("ListConstruct", "TupleConstruct"):
            return [inputs if name == "ListConstruct" else tuple(inputs)]
        if name in ("ListUnpack", "TupleUnpack"):
            return list(inputs[0])
        if name == "If":
            branches = [*node.blocks()]
            return self.run(branches[0] if inputs[0] else branches[1], [])
        if name == "Loop":
            (body,) = node.blocks()
            count, going, *carried = inputs
            number = 0
            while number < count and going:
                going, *carried = self.run(body, [number, *carried])
                number += 1
            return carried
        if name == "GetAttr":
            return [inputs[0].getattr(node.s("name"))]
        if name == "RaiseException":
            raise RuntimeError(str(inputs[0]))
        if name in ("unchecked_cast", "NumToTensor"):
            return inputs
        return [None if name == "Uninitialized" else getattr(inputs[0], name)]


def _function(name: str) -> Callable[..., Any] | None:
    """The function of torch that has a rule, of those which `aten::name` may be; else any."""
    if name in _OWN:
        return _OWN[name]
    namespaces = (Tensor, torch) if name.endswith("_") else (torch, torch._C._nn, Tensor)
    candidates = [getattr(namespace, name, None) for namespace in namespaces]
    functions = [function for function in candidates if callable(function)]
    return next((function for function in functions if function in RULES), functions[0] if functions else None)


def _call(node: Any, name: str, inputs: list[Any]) -> Any:
    schema = torch._C.parse_schema(node.schema())
    function = _function(name)
    if name not in _OWN and not _takes_tensors(schema):
        return torch._C._jit_get_operation(f"aten::{name}")[0](*inputs)  # arithmetic of numbers, lists and strings
    assert function is not None
    args, kwargs = [], {}
    given = [*zip(schema.arguments, inputs)]
    while given and _is_default(*given[-1]):  # torch's functions have older signatures, too, which are shorter
        given.pop()
    for argument, value in given:
        if argument.name in _OPTIONS:
            continue
        if argument.name == "dtype" and value.__class__ is int:
            value = _DTYPES[value]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    result = function(*args, **kwargs)
    return list(result) if isinstance(result, torch.Size) else result


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, Tensor) and value == argument.default_value


def _takes_tensors(schema: Any) -> bool:
    """Whether a function is one of tensors, and not of numbers, lists or strings."""
    return any(str(item.type) in _TENSORS for item in (*schema.arguments, *schema.returns))


def _writes_lists(schema: Any) -> bool:
    return any(
        item.alias_info is not None and item.alias_info.is_write and str(item.type) not in _TENSORS
        for item in schema.arguments
    )


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_known(graph: Any) -> bool:
    """Whether each of its nodes is one that `_Graph` can run."""
    for node in _nodes(graph):
        kind, _, name = node.kind().partition("::")
        if node.kind() in _PLUMBING:
            continue
        if kind != "aten" or node.schema() == "(no schema)":
            return False
        schema = torch._C.parse_schema(node.schema())
        if name not in _OWN and (_writes_lists(schema) or (_takes_tensors(schema) and _function(name) is None)):
            return False
    return True


def _run(function: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a scripted function or method, under the checker if there is one."""
    mode = cast("Session | None", active())
    if mode is None:
        return original(function, *args, **kwargs)
    graph = function.inlined_graph
    owner = [function.owner] if hasattr(function, "owner") else []
    if not _is_known(graph):
        return _unknown(mode, function, original, owner, args, kwargs)
    names = list(function.schema.arguments)[len(owner) :]
    given = dict(zip((argument.name for argument in names), args)) | kwargs
    values = [given.get(argument.name, argument.default_value) for argument in names]
    outputs = _Graph().run(graph, [*owner, *values])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _unknown(
    mode: Session,
    function: Any,
    original: Callable[..., Any],
    owner: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    name = f"scripted {function.name}"
    weights = [torch.jit._recursive.wrap_cpp_module(module).parameters() for module in owner]
    operands = (*args, *kwargs.values(), [param for params in weights for param in params])
    with torch._C.DisableTorchFunction():
        notes = [mode.note(x, name) for x in tensors_in(operands)]
    known = [note for note in notes if note is not None]
    judgement = mode.judge(Rule(name, None), function, operands, {}, tensors_in(operands), known)
    mode.assume(f"{name}: its graph cannot be followed, and what it does to dims and between elements is not known")
    result = original(function, *args, **kwargs)
    for x in tensors_in(result):
        mode.stamp(x, judgement.types[0], mode.origins(judgement, known))
    return result


# --- what is changed in torch while a mode is entered -----------------------------------------------------------------

_CLASSES = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_originals = {cls: cls.__call__ for cls in _CLASSES}


def install() -> None:
    """From now on, in threads that check types, scripted functions are followed."""
    for cls, original in _originals.items():

        def call(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            return _run(self, original, args, kwargs)

        cls.__call__ = call  # type: ignore[method-assign]


def remove() -> None:
    """Gives torch its own functions back."""
    for cls, original in _originals.items():
        cls.__call__ = original  # type: ignore[method-assign]
