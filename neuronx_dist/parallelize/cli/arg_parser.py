"""The trainer's configuration as text: a command line, variables, and dataclasses made of both.

args = yaml.safe_load(file)
merge_args(args, ["--optimizer.args.lr", "0.1", "--log.0.args.name!"])    # replaced; removed
resolve_args(args)                                                        # $(vars.dim), ${HOME}
deserialize_dataclass(args, TrainerArgs)
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import types
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ...nearest import nearest

__all__ = ["MODULES", "deserialize_dataclass", "load_type", "made", "merge_args", "parse_args", "resolve_args"]

TYPE, VALUE_TYPE, VALUE = "__type", "__value_type", "value"
_HERE = __package__.rpartition(".")[0]
# Modules of nnScaler that have another name below `neuronx_dist.parallelize`.
MODULES = {
    "cli.loggers.logger_base": "cli.loggers",
    "cli.loggers.tensorboard": "cli.loggers",
    "cli.loggers.wandb": "cli.loggers",
    "graph": "policy.graph",
    "graph.graph": "policy.graph",
    "graph.parser.register": "",
    "graph.segment": "policy.graph",
    "ir.operator": "policy.graph",
    "parallel": "",
    "runtime.f16_optimizer": "train.optimizer",
    "runtime.module": "train.parallel_module",
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_VARIABLE = re.compile(r"\$(?:\(([^)]+)\)|\{([^}]+)\})")
Data = TypeVar("Data")


def parse_args(argv: Sequence[Any]) -> dict[str, Any]:
    """Returns the options of a command line as nested dicts of text: `--a.b 1 --c-d=2 --e`, which is `--e true`.

    Raises:
        ValueError: a value has no option, or an option is both a value and a group.
    """
    args: dict[str, Any] = {}
    waiting: list[str] | None = None
    for word in argv:
        if isinstance(word, str) and word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            path = name.replace("-", "_").split(".")
            _put(args, path, value if equals else "true")
            waiting = None if equals else path
        elif waiting is None:
            raise ValueError(f"argument {word!r} has no option before it: write --name {word}, or --name={word}")
        else:
            _put(args, waiting, word)
            waiting = None
    return args


def _put(args: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        args = args.setdefault(key, {})
        if not isinstance(args, dict):
            raise ValueError(f"--{'.'.join(path)}: --{key} has a value already, so that it has no part {path[-1]!r}")
    args[path[-1]] = value


def merge_args(args: dict[str, Any], argv: Sequence[Any]) -> None:
    """Replaces values of `args` by those of a command line, in place; `--name!` removes a value, `--list.0` an item."""
    _merge(args, parse_args(argv))


def _merge(args: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    for key, value in new.items():
        old = args.get(key)
        if key.endswith("!"):
            args.pop(key[:-1], None)
        elif not isinstance(value, dict):
            args[key] = value
        elif isinstance(old, list) and all(name.removesuffix("!").isdigit() for name in value):
            items = _merge({str(index): item for index, item in enumerate(old)}, value)
            args[key] = _listed({int(index): item for index, item in items.items()})
        else:
            args[key] = _merge(old if isinstance(old, dict) else {}, value)
    return args


def _listed(items: dict[int, Any]) -> list[Any]:
    """Returns the items at their indices, and None in between."""
    return [items.get(index) for index in range(max(items, default=-1) + 1)]


def resolve_args(args: dict[str, Any]) -> None:
    r"""Replaces `$(a.b)` and `${a.b}` by the value at this path, else by the environment's variable, in place.

    A value that is one variable keeps the type of what replaces it. `$\(` and `$\{` are `$(` and `${`.

    Raises:
        ValueError: a variable depends on itself.
        KeyError: a variable is neither in `args` nor in the environment.
    """

    def resolved(value: Any, pending: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: resolved(item, pending) for key, item in value.items()}
        if isinstance(value, list):
            return [resolved(item, pending) for item in value]
        if not isinstance(value, str):
            return value
        if match := _VARIABLE.fullmatch(value):
            return of(match, pending)
        text = _VARIABLE.sub(lambda match: str(of(match, pending)), value)
        return text.replace("$\\(", "$(").replace("$\\{", "${")

    def of(match: re.Match[str], pending: tuple[str, ...]) -> Any:
        name = match[1] or match[2]
        if name in pending:
            raise ValueError(f"variable {name} depends on itself: {' -> '.join([*pending, name])}")
        return resolved(_variable(args, name), (*pending, name))

    args.update({key: resolved(value, ()) for key, value in args.items()})


def _variable(args: Any, name: str) -> Any:
    value = args
    try:
        for key in name.split("."):
            value = value[int(key) if isinstance(value, list) else key]
    except (KeyError, IndexError, TypeError, ValueError):
        if name not in os.environ:
            raise KeyError(f"variable {name} is neither in the arguments nor in the environment") from None
        return os.environ[name]
    return value


def made(value: Any) -> Any:
    """Returns what a dict with `__type` makes, called with the rest of the dict; any other value as it is."""
    if isinstance(value, dict) and TYPE in value:
        return load_type(value[TYPE])(**{key: item for key, item in value.items() if key != TYPE})
    return value


def deserialize_dataclass(value: Any, cls: type[Data]) -> Data:
    """Makes an object of a dataclass from nested dicts, whose text is converted to the types of the fields.

    Raises:
        ValueError: a member is unknown, or its value does not have its type; or the dataclass refuses the values.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{cls.__name__} is made from a dict of its members, got {value!r}")
    hints, members = get_type_hints(cls), {}
    for name, item in value.items():
        if name not in hints:
            raise ValueError(f"{cls.__name__} has no member {name!r}; nearest: {nearest(str(name), hints)}")
        try:
            members[name] = _typed(item, hints[name])
        except (TypeError, ValueError, SyntaxError) as error:
            raise ValueError(f"{cls.__name__}.{name}: {error}") from error
    return cls(**{name: item for name, item in members.items() if item is not None})


def _typed(value: Any, hint: Any) -> Any:
    """Returns a value in the type of an annotation; the type of a value under `Any` is guessed."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) in (Union, types.UnionType):
        return _typed(value, parts[0] if len(parts) == 1 else Any)
    kind = get_origin(hint) or hint
    if value is None or kind not in (list, dict, int, str, bool, float) and not is_dataclass(kind):
        return _guessed(value)
    if kind in (list, dict) and isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{value!r} is no Python {kind.__name__}") from None
    if kind is list and isinstance(value, dict):
        if named := [key for key in value if not str(key).isdigit()]:
            raise ValueError(f"it is a list, whose items have numbers from 0, and no {named[0]!r}")
        value = _listed({int(index): item for index, item in value.items()})
    if kind in (list, dict) and not isinstance(value, (list, tuple) if kind is list else dict):
        raise ValueError(f"it is a {kind.__name__}, got {value!r:.60}")
    if kind is list:
        return [_typed(item, *parts) for item in value]
    if kind is dict:
        return {str(key): _guessed(item) for key, item in dict(value).items()}
    if isinstance(value, kind):
        return value
    if is_dataclass(kind):
        return deserialize_dataclass(value, hint)
    if kind is bool and isinstance(value, str):
        if value.lower() not in _BOOLEANS:
            raise ValueError(f"{value!r} is neither true nor false")
        return _BOOLEANS[value.lower()]
    return kind(made(value))


def _guessed(value: Any) -> Any:
    """Returns text as the Python literal that it is, if it is one."""
    if isinstance(value, dict):
        is_typed = value.keys() == {VALUE, VALUE_TYPE}
        return value if is_typed else {_guessed(key): _guessed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_guessed, value))
    try:
        return {"true": True, "false": False}[value] if value in ("true", "false") else ast.literal_eval(value)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        return value  # no text, or no literal


def load_type(name: Any) -> Any:
    """Returns the class, function or module of a qualified name; names of `nnscaler` are this package's.

    Raises:
        RuntimeError: there is none.
    """
    if not isinstance(name, str):
        return name
    path = name.split(".")
    if path[0] == "nnscaler" and len(path) > 1:
        length = next((n for n in range(len(path), 1, -1) if ".".join(path[1:n]) in MODULES), 1)
        place = MODULES.get(".".join(path[1:length]), "")
        path = f"{_HERE}.{place}".strip(".").split(".") + path[length:]
    found, rest = builtins, path
    for length in range(len(path), 0, -1) if not hasattr(builtins, path[0]) else ():
        module = ".".join(path[:length])
        try:
            found, rest = importlib.import_module(module), path[length:]
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
    for attribute in rest:
        if not hasattr(found, attribute):
            raise RuntimeError(
                f"{name!r}: {getattr(found, '__name__', found)} has no {attribute!r}; nearest: "
                f"{nearest(attribute, dir(found))}. A name is that of a builtin, or the path of a module, then the "
                "name in it"
            )
        found = getattr(found, attribute)
    return found
