"""Recorded programs as JSON: `ReuseType.GRAPH` reads them and does not record again.

Functions and classes are written by their names, and are looked up in the imported modules; nothing is unpickled. The
values of constants are in another file (`constants.py`); arguments that are no tensors are taken from the call that
reads. A program with an object that has no name (a container of a class that torch's pytrees cannot name, a generator)
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

from ...program.program import Call, Program, Value
from ...torch_internals.operators import OpOverload
from ...torch_internals.tensors import native_nn, pytree
from ..example import Example
from .fingerprint import package_digest

__all__ = ["programs_from_text", "programs_text"]

_OWNERS: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "Tensor": torch.Tensor,
    "operator": operator,
    "builtins": builtins,
    "torch._C._nn": native_nn,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_FIELDS = ("several", "where", "source", "module", "flops", "random", "grad")
_KINDS = ("inputs", "parameters", "buffers", "constants")


class _Unnamed(Exception):
    """An object has no name to be written by."""


def programs_text(programs: Sequence[Program], names: Mapping[Value, str]) -> str | None:
    """Returns the text of the programs of a module; None: an object in them has no name.

    Args:
        names: the names of their constants.
    """
    try:
        return json.dumps(
            {"written by": package_digest(), "programs": [_program(program, names) for program in programs]}
        )
    except _Unnamed:
        return None


def programs_from_text(text: str, example: Example, constants: Mapping[str, torch.Tensor]) -> list[Program] | None:
    """Reads the programs from a text of `programs_text`.

    Args:
        example: has arguments equal to those of the recording.
        constants: by the names that were passed to `programs_text`.

    Returns:
        The programs; None: another version of this package wrote them, or they name something that is not imported.
    """
    content = json.loads(text)
    if content["written by"] != package_digest():
        return None
    leaves, structure = example.flat
    try:
        return [_Reader(saved, leaves, constants).program(structure) for saved in content["programs"]]
    except (AttributeError, KeyError, NotImplementedError):  # a module or container is not imported
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
    fields = [value.name, value.kind, value.shape, _text(value.dtype), value.requires_grad, value.path, value.varies]
    return [*fields, names.get(value)]


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
    """Returns the path of a function: `["F", "linear"]`, `["get", "T"]` (a tensor attribute), `["", module, name]`."""
    name = getattr(function, "__name__", "")
    candidates = [["get", getattr(getattr(function, "__self__", None), "__name__", "")]] if name == "__get__" else []
    candidates += [[owner, name] for owner in _OWNERS]
    candidates += [["Tensor", f"__{name}__"]]  # `Tensor.__pow__` is named `pow`
    if isinstance(function, OpOverload):
        candidates = [["op", *str(function).split(".")]]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):  # a class method, which a base may define
        candidates.append(["", owner.__module__, f"{owner.__qualname__}.{name}"])
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
    """Returns an argument as JSON: plain values as they are, all others as `{class: content}`."""
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
    """Reads a program from its JSON."""

    def __init__(self, content: dict[str, Any], leaves: list[Any], constants: Mapping[str, torch.Tensor]) -> None:
        self.content, self.leaves, self.constants = content, leaves, constants
        self.values: dict[str, Value] = {}

    def program(self, structure: pytree.TreeSpec) -> Program:
        content = self.content
        kinds = {kind: [self.value(saved) for saved in content[kind]] for kind in _KINDS}
        calls = [self.call(saved) for saved in content["calls"]]
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
        call.results += [self.value(saved, call) for saved in content["results"]]
        return call

    def read(self, x: Any) -> Any:
        """Returns the argument of a text that `_text` made."""
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
