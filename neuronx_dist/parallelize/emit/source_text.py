"""Python source of the parts of a call: functions, arguments, paths of parameters, containers, constants."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import EllipsisType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spmd
from ...program.program import FILE_NAMES, Program, Value
from ...spmd.types import LocalType, Shard
from ...torch_internals.operators import OpOverload, OpOverloadPacket
from ...torch_internals.tensors import native_nn, pytree
from ...weights.host_memory import as_bytes
from .. import composites
from ..choose.conversions import OPERATORS
from ..train.parallel_module import ParallelModule

__all__ = ["Imports", "attribute", "call_text", "constants_from_text", "constants_text", "literal", "program_text"]

# The namespaces in which a function is looked up, and their names in the emitted file.
_NAMESPACES: tuple[tuple[Any, str], ...] = (
    (torch, "torch"),
    (F, "F"),
    (spmd, "spmd"),
    (torch.special, "torch.special"),
    (torch.linalg, "torch.linalg"),
    (torch.fft, "torch.fft"),
    (native_nn, "torch._C._nn"),
)

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}
# Methods that are an operator too: `x.mul(y)` reads `x * y`, if it has no more arguments.
_METHODS = {"add", "sub", "mul", "matmul", "eq", "ne", "lt", "le", "gt", "ge"}

_OF_NAMES = str.maketrans("", "", "_.[]\0\1")  # marks of `lines.py` among them

_EMITTED_METHOD = re.compile(r"(train_|eval_)(forward|stage_\d+)|stage_\d+")


class Imports:
    """The names that an emitted file imports, beside the names that every file imports."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: names of the program's values."""
        self.lines: dict[str, str] = {}  # name -> line
        self.used = {*names, *FILE_NAMES, "layer", "numbered"}

    def name(self, target: Any) -> str:
        """Imports a class or function of a module's top level, or a member of one, and returns its name in the file.

        Raises:
            ValueError: it cannot be found by its name.
        """
        if isinstance(owner := getattr(target, "__self__", None), type):  # a class method, which a base may define
            return f"{self.name(owner)}.{target.__name__}"
        module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
        name, *inner = path.split(".")  # `Function.apply`
        if not module or not all(part.isidentifier() for part in (name, *inner)) or module == "__main__":
            raise ValueError(
                f"{target!r} cannot be imported by an emitted file: define it at the top level of a module"
                + (" other than the script that runs" if module == "__main__" else "")
            )
        alias, line, number = name, f"from {module} import {name}", 2
        while alias in self.used or self.lines.get(alias, line) != line:
            alias, line = f"{name}_{number}", f"from {module} import {name} as {name}_{number}"
            number += 1
        self.lines[alias] = line
        return ".".join([alias, *inner])


def attribute(path: str, root: str = "self") -> str:
    """Returns the expression that reads a parameter or buffer: `layers.0.weight` is `self.layers[0].weight`.

    A name that parallel modules have a method or attribute for is read as an item: `self["run"].weight`.
    """
    text = root
    for part in path.split("."):
        if part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier() and not _is_own(part):
            text += f".{part}"
        else:
            text += f"[{json.dumps(part)}]"
    return text


def _is_own(name: str) -> bool:
    is_attribute = hasattr(ParallelModule, name) or name in ParallelModule.__annotations__  # those without a value yet
    return name.startswith("_") or is_attribute or _EMITTED_METHOD.fullmatch(name) is not None


def literal(x: Any, imports: Imports, variable: Callable[[Any], str | None] = lambda x: None) -> str:
    """Returns the source of a value: a number, dtype, slice, container, or the name that `variable` returns for it.

    Raises:
        ValueError: its class is unknown.
    """
    named = variable(x)
    if named is not None:
        return named
    if isinstance(x, Enum):
        class_name = imports.name(type(x))
        is_member = x.name in type(x).__members__
        return f"{class_name}.{x.name}" if is_member else f"{class_name}({literal(x.value, imports)})"
    if isinstance(x, torch.device):
        return "self.device"
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    if isinstance(x, str):
        return json.dumps(x)
    for base in (bool, int, float, complex, bytes):
        if isinstance(x, base):  # an enum or a NumPy scalar is written as its number
            return base.__repr__(x)
    if x is None:
        return "None"
    if isinstance(x, EllipsisType):
        return "..."
    if isinstance(x, (LocalType, Shard)):
        return repr(x)
    if isinstance(x, FunctionType) and x in OPERATORS.values():
        return f"spmd.{getattr(x, '__name__', '')}"
    if isinstance(x, slice):
        parts = ("None" if part is None else literal(part, imports, variable) for part in (x.start, x.stop, x.step))
        return f"slice({', '.join(parts)})"
    return _container(x, imports, lambda item: literal(item, imports, variable))


def _container(x: Any, imports: Imports, text: Callable[[Any], str]) -> str:
    kind = type(x)
    if kind in (tuple, torch.Size):
        return f"({', '.join(map(text, x))}{',' if len(x) == 1 else ''})"
    if kind is list:
        return f"[{', '.join(map(text, x))}]"
    if kind is dict:
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in x.items()) + "}"
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return f"{imports.name(kind)}({', '.join(f'{name}={text(getattr(x, name))}' for name in x._fields)})"
    if isinstance(x, Mapping):  # Hugging Face's outputs among them
        if all(isinstance(key, str) and key.isidentifier() for key in x) and dataclasses.is_dataclass(x):
            return f"{imports.name(kind)}({', '.join(f'{key}={text(item)}' for key, item in x.items())})"
        inside = ", ".join(f"{text(key)}: {text(item)}" for key, item in x.items())
        return f"{imports.name(kind)}({{{inside}}})"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [field for field in dataclasses.fields(x) if field.init]
        return f"{imports.name(kind)}({', '.join(f'{f.name}={text(getattr(x, f.name))}' for f in fields)})"
    advice = "draw without generator=, or pass the numbers as an argument"
    if kind is not torch.Generator:
        advice = "wrap the module in one that takes and returns tensors, numbers, strings and containers of them"
    raise ValueError(f"a {kind.__name__} cannot be written into a program: {x!r}: {advice}")


def call_text(
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    imports: Imports,
    variable: Callable[[Any], str | None],
    where: str = "",
) -> str:
    """Returns the source of a call: `F.linear(x, w)`, `x + y`, `x.view(2, 3)`, `x[:, 0]`, `x.T`.

    Raises:
        ValueError: the function or an argument cannot be written; the message begins with `where`.
    """
    try:
        return _call_text(function, args, kwargs, imports, lambda x: literal(x, imports, variable))
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _call_text(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], imports: Imports, text: Callable[[Any], str]
) -> str:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return f"{text(args[0])}.{function.__self__.__name__}"
    if function is getattr or name == "getattr":
        return f"{text(args[0])}.{args[1]}"
    if name in ("__getitem__", "getitem"):
        return f"{text(args[0])}[{_index(args[1], text)}]"
    if not kwargs:
        written = _operator(function, name, args, text)
        if written is not None:
            return written
    defaults = {} if getattr(spmd, name, None) is function else _defaults(function)  # types are always written
    keywords = {key: item for key, item in kwargs.items() if key not in defaults or defaults[key] is not item}
    arguments = [*map(text, args), *(f"{key}={text(item)}" for key, item in keywords.items())]
    if _method(function, name) and args:
        return f"{_grouped(arguments[0])}.{name}({', '.join(arguments[1:])})"
    return f"{_function(function, name, imports)}({', '.join(arguments)})"


def program_text(program: Program) -> str:
    """Returns a program as text: two programs with the same text compute the same."""
    imports = Imports()

    def variable(x: Any) -> str | None:
        return x.name if isinstance(x, Value) else None

    constants = {value.name: value.constant for value in program.constants if value.constant is not None}
    lines = [*(f"{value!r} {value.path}" for value in program.leaves), constants_text(constants)]
    for call in program.calls:
        results = ", ".join(map(repr, call.results))
        context = f"{call.grad} {call.autocast} {call.checkpoints}"
        lines.append(
            f"{results} = {call_text(call.function, call.args, call.kwargs, imports, variable, call.where)}  {context}"
        )
    outputs = pytree.tree_unflatten(program.outputs, program.output_structure)
    return "\n".join([*lines, literal(outputs, imports, variable), *imports.lines.values()])


def _defaults(function: Any) -> dict[str, Any]:
    """Returns the default values of a function that is written in Python; {} of any other."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()  # may wrap a built-in function
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _method(function: Any, name: str) -> bool:
    return bool(name) and getattr(Tensor, name, None) == function


def _grouped(text: str) -> str:
    return text if text.translate(_OF_NAMES).isalnum() else f"({text})"


def _operator(function: Any, name: str, args: tuple[Any, ...], text: Callable[[Any], str]) -> str | None:
    if getattr(Tensor, f"__{name}__", None) == function:  # `Tensor.__pow__` is named `pow`
        name = f"__{name}__"
    if not (_method(function, name) or getattr(operator, name, None) is function):
        return None
    bare = name[2:-2] if name.startswith("__") else name
    dunder = name != bare or not _method(function, name)
    if len(args) == 2 and (dunder or bare in _METHODS):
        if bare in _BINARY:
            return f"{text(args[0])} {_BINARY[bare]} {text(args[1])}"
        if bare[:1] == "r" and bare[1:] in _BINARY:
            return f"{text(args[1])} {_BINARY[bare[1:]]} {text(args[0])}"
    if len(args) == 1 and dunder and bare in _UNARY:
        return f"{_UNARY[bare]}{text(args[0])}"
    return None


def _index(index: Any, text: Callable[[Any], str]) -> str:
    if isinstance(index, slice):
        start, stop, step = ("" if part is None else text(part) for part in (index.start, index.stop, index.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")
    if type(index) is tuple and index:
        return ", ".join(_index(part, text) for part in index) + ("," if len(index) == 1 else "")
    return text(index)


def _function(function: Any, name: str, imports: Imports) -> str:
    if name in composites.__all__ and getattr(composites, name) is function:
        return f"composites.{name}"
    for owner, text in _NAMESPACES:
        if name and getattr(owner, name, None) is function:
            return f"{text}.{name}"
    if getattr(function, "__self__", None) is not None and _method(function, name):
        return f"torch.Tensor.{name}"
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{function}"  # of torch.library
    return imports.name(function)


def constants_text(constants: Mapping[str, torch.Tensor]) -> str:
    """Returns constants by name as JSON."""
    entries = {}
    for name, tensor in constants.items():
        data = base64.b64encode(bytes(as_bytes(tensor.detach().cpu().contiguous()))).decode()
        entries[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}
    return json.dumps(entries)


def constants_from_text(text: str) -> dict[str, torch.Tensor]:
    """Returns the constants of a text that `constants_text` made, by name."""
    return {name: _tensor(**entry) for name, entry in json.loads(text).items()}


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch_dtype).reshape(shape)
