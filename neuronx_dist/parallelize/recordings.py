"""Recorded programs as JSON, which `ReuseType.GRAPH` reads in the place of recording them again.

Functions and classes are written by their names, and are looked up among what is imported; nothing is unpickled. Values
of constants are in a file of their own (`constants.py`); arguments that are no tensors are those of the call that
reads. A program with something that has no name (a container of a class that torch's pytrees cannot name, a generator)
has no text: it is recorded again.
"""

from __future__ import annotations

import builtins
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from .fingerprint import own_sources
from .program import Call, Program, Value

__all__ = ["programs_from_text", "programs_text"]

_OWNERS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "Tensor": torch.Tensor,
    "operator": operator,
    "builtins": builtins,
    "torch._C._nn": torch._C._nn,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_FIELDS = ("several", "where", "source", "module", "flops", "random", "grad")
_KINDS = ("inputs", "parameters", "buffers", "constants")


class _Unnamed(Exception):
    """Something cannot be written."""


def programs_text(programs: Sequence[Program], names: Mapping[Value, str]) -> str | None:
    """The text of the programs of a module; None: they have none.

    Args:
        names: of their constants.
    """
    try:
        return json.dumps({"written by": own_sources(), "programs": [_program(each, names) for each in programs]})
    except _Unnamed:
        return None


def programs_from_text(
    text: str, arguments: Mapping[str, Any], constants: Mapping[str, torch.Tensor]
) -> list[Program] | None:
    """The inverse of `programs_text`.

    Args:
        arguments: of forward, equal to those of the recording.
        constants: by the names that were given.

    Returns:
        The programs; None: they were written by other sources of this package, or name what is not imported here.
    """
    content = json.loads(text)
    if content["written by"] != own_sources():
        return None
    leaves, structure = pytree.tree_flatten(dict(arguments))
    try:
        return [_Reader(each, leaves, constants).program(structure) for each in content["programs"]]
    except (AttributeError, KeyError, NotImplementedError):  # of a module or container that is not imported
        return None


# --- writing ----------------------------------------------------------------------------------------------------------


def _program(program: Program, names: Mapping[Value, str]) -> dict[str, Any]:
    try:
        structure = pytree.treespec_dumps(program.output_structure)
    except NotImplementedError as error:
        raise _Unnamed from error
    return {
        **{kind: [_value(value, names) for value in getattr(program, kind)] for kind in _KINDS},
        "arguments": [leaf.name if isinstance(leaf, Value) else None for leaf in program.arguments],
        "calls": [_call(call, names) for call in program.calls],
        "outputs": [_text(leaf) for leaf in program.outputs],
        "output_structure": structure,
        "training": program.training,
    }


def _value(value: Value, names: Mapping[Value, str]) -> list[Any]:
    own = [value.name, value.kind, value.shape, _text(value.dtype), value.requires_grad, value.path, value.varies]
    return [*own, names.get(value)]


def _call(call: Call, names: Mapping[Value, str]) -> dict[str, Any]:
    return {
        "function": _name(call.function),
        "args": _text(call.args),
        "kwargs": _text(call.kwargs),
        "results": [_value(value, names) for value in call.results],
        "autocast": _text(call.autocast),
        "checkpoints": call.checkpoints,
        "writes": call.writes,
        **{field: getattr(call, field) for field in _FIELDS},
    }


def _name(function: Callable[..., Any]) -> list[str]:
    """Where a function is: `["F", "linear"]`, `["get", "T"]` (an attribute of tensors), `["", module, name]`."""
    name = getattr(function, "__name__", "")
    candidates = [["get", getattr(getattr(function, "__self__", None), "__name__", "")]] if name == "__get__" else []
    candidates += [[owner, name] for owner in _OWNERS]
    if isinstance(function, torch._ops.OpOverload):
        candidates = [["op", *str(function).split(".")]]
    candidates.append(["", str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))])
    for name_parts in candidates:
        try:
            if _function(name_parts) == function:
                return name_parts
        except (AttributeError, KeyError):
            continue
    raise _Unnamed


def _function(name_parts: Sequence[str]) -> Any:
    owner, *names = name_parts
    if owner == "get":
        return getattr(torch.Tensor, names[0]).__get__
    function: Any = torch.ops if owner == "op" else _OWNERS[owner] if owner else sys.modules[names.pop(0)]
    for name in ".".join(names).split("."):
        function = getattr(function, name)
    return function


def _text(x: Any) -> Any:
    """An argument: plain values as they are, all else as `{class: content}`."""
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return {"float": repr(x)}
    if type(x) is complex:
        return {"complex": repr(x)}
    if isinstance(x, Value):
        return {"value": x.name}
    if type(x) is list:
        return [_text(item) for item in x]
    if type(x) in (tuple, torch.Size):
        return {"tuple": [_text(item) for item in x]}
    if type(x) is dict:
        return {"dict": [[_text(key), _text(item)] for key, item in x.items()]}
    if type(x) is slice:
        return {"slice": [_text(bound) for bound in (x.start, x.stop, x.step)]}
    if x is ...:
        return {"ellipsis": None}
    if isinstance(x, _OF_TORCH):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    raise _Unnamed


# --- reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """Makes a program of its text."""

    def __init__(self, content: dict[str, Any], leaves: list[Any], constants: Mapping[str, torch.Tensor]) -> None:
        self.content, self.leaves, self.constants = content, leaves, constants
        self.values: dict[str, Value] = {}

    def program(self, structure: pytree.TreeSpec) -> Program:
        content = self.content
        kinds = {kind: [self.value(each) for each in content[kind]] for kind in _KINDS}
        calls = [self.call(each) for each in content["calls"]]
        given = zip(content["arguments"], self.leaves, strict=True)
        return Program(
            **kinds,
            structure=structure,
            arguments=[leaf if name is None else self.values[name] for name, leaf in given],
            calls=calls,
            outputs=[self.read(leaf) for leaf in content["outputs"]],
            output_structure=pytree.treespec_loads(content["output_structure"]),
            training=content["training"],
        )

    def value(self, content: list[Any], producer: Call | None = None) -> Value:
        name, kind, shape, dtype, requires_grad, path, varies, constant = content
        value = Value(name, kind, tuple(shape), self.read(dtype), requires_grad, path, producer, varies)
        value.constant = None if constant is None else self.constants[constant]
        self.values[name] = value
        return value

    def call(self, content: dict[str, Any]) -> Call:
        fields = {field: content[field] for field in _FIELDS}
        fields |= {field: tuple(content[field]) for field in ("checkpoints", "writes")}
        fields["autocast"] = self.read(content["autocast"])
        call = Call(_function(content["function"]), self.read(content["args"]), self.read(content["kwargs"]), **fields)
        call.results += [self.value(each, call) for each in content["results"]]
        return call

    def read(self, x: Any) -> Any:
        """The inverse of `_text`."""
        if isinstance(x, list):
            return [self.read(item) for item in x]
        if isinstance(x, str):
            return sys.intern(x)  # emitted calls leave out what is the default, the same object
        if not isinstance(x, dict):
            return x
        ((kind, content),) = x.items()
        return _READ[kind](self, content)


_READ: dict[str, Callable[[_Reader, Any], Any]] = {
    "float": lambda reader, text: float(text),
    "complex": lambda reader, text: complex(text),
    "value": lambda reader, name: reader.values[name],
    "tuple": lambda reader, items: tuple(reader.read(items)),
    "dict": lambda reader, items: {reader.read(key): reader.read(item) for key, item in items},
    "slice": lambda reader, bounds: slice(*reader.read(bounds)),
    "ellipsis": lambda reader, _: ...,
    "torch": lambda reader, name: getattr(torch, name),
    "device": lambda reader, name: torch.device(name),
}
