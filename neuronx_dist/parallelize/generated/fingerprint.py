"""Fingerprints of the dependencies of generated code: source, values, structure. Equal texts mean equal code.

    source of a user's function   its compiled code, the globals, closure, defaults and user functions that it names
    installed code                the version of its package, and the file that it stands in
    a tensor                      dtype, shape and values; on meta without values
    any other object              its class and its attributes

Source is read from compiled code, so that moving or commenting it changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ...program.python_state import is_installed
from ...weights.host_memory import as_bytes

__all__ = ["digest", "module_entries", "package_digest", "value_entries"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_PRINTED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, Path)
# Packages whose objects have a state that is no part of the program.
_RUN_TIME = (*sys.stdlib_module_names, "torch")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Python's `hash()` of a text, which differs between processes; transformers stores it on a generation config.
_OF_THIS_PROCESS = frozenset({"_original_object_hash"})
_MEMO = functools.cached_property  # the attribute that it stores follows from the others
_CLASS_INTERNALS = ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def digest(text: str | bytes) -> str:
    """Returns the SHA-256 of a text, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def value_entries(what: str, value: Any) -> dict[str, str]:
    """Returns the text of a value under the name `what`, and a digest of each function and class that it names."""
    describer = _Describer()
    return {what: describer.of(value), **describer.source_entries()}


def module_entries(module: nn.Module) -> dict[str, str]:
    """Returns texts of everything that a module's computation depends on, except the values of its parameters.

    Classes and functions, attributes of each submodule, shapes and dtypes of parameters (tied ones under all their
    names), and values of buffers.
    """
    describer = _Describer(module)
    return {**describer.parts_of(module), **describer.source_entries()}


class _Describer:
    """Writes texts of values, and collects digests of the functions and classes that they name."""

    def __init__(self, whole: Any = None) -> None:
        """`whole`: a reference to it from inside, such as that of a wrapped forward, is written as "(itself)"."""
        self._sources: dict[str, str] = {}
        self._seen: dict[int, tuple[Any, str]] = {}  # functions and classes, with their names
        self._under_way: dict[int, Any] = {id(whole): whole}

    def source_entries(self) -> dict[str, str]:
        return {f"source of {name}": text for name, text in self._sources.items()}

    def parts_of(self, module: nn.Module) -> dict[str, str]:
        """Returns the texts of the parts of a module, by name."""
        entries = {}
        for name, child in module.named_modules(remove_duplicate=False):
            attributes = {key: value for key, value in vars(child).items() if key not in _MODULE_INTERNALS}
            hooks = {key: list(vars(child)[key].values()) for key in _HOOKS if vars(child)[key]}
            if child.training != module.training:  # the whole module is recorded in both modes
                attributes["training"] = child.training
            text = f"{self.of(type(child))} {self.of({**attributes, **hooks})}"
            entries[f"module {name or '(the whole)'}"] = text
        first: dict[int, str] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            tied = first.setdefault(id(param), name)
            text = f"{param.dtype} {tuple(param.shape)} requires_grad={param.requires_grad}"
            entries[f"parameter {name}"] = text if tied == name else f"{text} tied to {tied}"
        persistent = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            entries[f"buffer {name}"] = f"{self.of(buffer)} persistent={name in persistent}"
        return entries

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, _PRINTED):
            return f"{type(value).__name__} {value}"
        if isinstance(value, (FunctionType, type)):
            return self._of_code(value)
        if id(value) in self._under_way:
            return "(itself)"
        self._under_way[id(value)] = value
        try:
            return self._of_object(value)
        finally:
            del self._under_way[id(value)]

    def _of_object(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return _tensor_text(value)
        if isinstance(value, Mapping):
            items = [f"{self.of(key)}: {self.of(item)}" for key, item in value.items()]
            return f"{_name_of(type(value))}{{{', '.join(items)}}}"
        if isinstance(value, (tuple, list)):
            return f"{_name_of(type(value))}({', '.join(map(self.of, value))})"
        if isinstance(value, (set, frozenset)):
            return f"{_name_of(type(value))}({', '.join(sorted(map(self.of, value)))})"
        if isinstance(value, Enum):
            return f"{_name_of(type(value))}.{value.name}"
        if isinstance(value, functools.partial):
            return f"partial {self.of(value.func)} {self.of(value.args)} {self.of(value.keywords)}"
        if isinstance(value, MethodType):
            return f"{self.of(value.__func__)} of {self.of(value.__self__)}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, nn.Module):
            return digest(repr(self.parts_of(value)))
        if hasattr(value, "__qualname__"):  # of C
            return _name_of(value)
        if hasattr(value, "tobytes"):  # an array
            return f"{_name_of(type(value))} {getattr(value, 'shape', '')} {digest(value.tobytes())}"
        return self._of_instance(value)

    def _of_instance(self, value: Any) -> str:
        if type(value).__module__ == "_thread":  # whether a lock is held, and by which thread, does not count
            return _name_of(type(value))
        if type(value).__module__.partition(".")[0] in _RUN_TIME:  # locks, loggers: their state does not count
            return _ADDRESS.sub("", f"{_name_of(type(value))} {value!r}")
        instance_attributes = getattr(value, "__dict__", {})
        derived = {name for cls in type(value).__mro__ for name, x in vars(cls).items() if type(x) is _MEMO}
        attributes = {
            name: attribute
            for name, attribute in instance_attributes.items()
            if name not in _OF_THIS_PROCESS and name not in derived
        }
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name != "__weakref__":
                    attributes[name] = getattr(value, name)
        return f"{self.of(type(value))} {self.of(attributes)}"

    def _of_code(self, value: Any) -> str:
        """Returns the name of a function or class, and adds a digest of its code to the sources."""
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        name = _name_of(value)
        while name in self._sources and _library_of(value) is None:  # lambdas, and definitions inside of functions
            name += "'"
        self._seen[id(value)] = (value, name)
        self._sources[name] = ""
        text = _library_of(value)
        if text is None:
            text = self._of_function(value) if isinstance(value, FunctionType) else digest(self._of_members(value))
        self._sources[name] = text
        return name

    def _of_members(self, cls: type) -> str:
        parts = [self.of(base) for base in cls.__bases__ if base is not object]
        for name, member in vars(cls).items():
            if name in _CLASS_INTERNALS or inspect.isgetsetdescriptor(member) or inspect.ismemberdescriptor(member):
                continue
            inner = getattr(member, "__func__", getattr(member, "func", member))
            if isinstance(member, property):
                inner = (member.fget, member.fset)
            parts.append(f"{name} {self.of(inner)}")
        return "\n".join(parts)

    def _of_function(self, function: FunctionType) -> str:
        code = function.__code__
        parts = [_code_text(code), self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                parts.append(f"{name}={self.of(cell.cell_contents)}")
            except ValueError:  # the name is not set yet
                parts.append(name)
        names = dict.fromkeys(_names_in(code))
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and _library_of(value) is None:
                parts += [f"{name}.{part}={self.of(vars(value)[part])}" for part in names if part in vars(value)]
            else:
                parts.append(f"{name}={self.of(value)}")
        return digest("\n".join(parts))


def _tensor_text(tensor: torch.Tensor) -> str:
    text = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor" or tensor.layout is not torch.strided:
        return text
    content = as_bytes(tensor.detach().cpu().contiguous())
    return f"{text} {hashlib.sha256(content).hexdigest()}"


def _code_text(code: CodeType) -> str:
    """Returns the instructions, names and constants of a code object as text, without line numbers."""
    constants = [
        _code_text(const)
        if isinstance(const, CodeType)
        else repr(sorted(map(repr, const)))
        if isinstance(const, frozenset)
        else repr(const)
        for const in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount)
    return f"{code.co_name} {code.co_code.hex()} {names} {constants}"


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', value))}"


def _library_of(value: Any) -> str | None:
    """Returns the package version of an installed function, class or module, and a digest of its file.

    None: it belongs to the user.
    """
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is not None and file is None and name != "__main__" and not hasattr(module, "__path__"):
        return "built in"
    if file is None:
        return None
    return _library_file(file, name.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _library_file(file: str, package: str) -> str | None:
    this_package = Path(__file__).resolve().parents[1]
    path = Path(file).resolve()
    if package == this_package.name and path.is_relative_to(this_package):
        return "this package"
    if not is_installed(str(path)):
        return None
    return f"{package} {_version(package)} {digest(path.read_bytes()) if package != 'torch' else ''}"


@functools.lru_cache(maxsize=256)
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"python {sys.version.split()[0]}"


@functools.lru_cache(maxsize=1)
def package_digest() -> str:
    """Returns a digest of all Python files of this package: most of them determine generated code."""
    root = Path(str(sys.modules[__name__.partition(".")[0]].__file__)).parent
    return digest(b"".join(file.read_bytes() for file in sorted(root.rglob("*.py"))))
