"""Checks of the arguments of `NxDPPModel` and its `trace`; warnings of arguments without effect."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from torch import nn

from ..call_site import USER, frames
from ..nearest import nearest

__all__ = [
    "check_counts",
    "check_manual",
    "checked_auto_partition",
    "checked_input_names",
    "inputs_by_name",
    "module_classes",
    "names",
    "warn_of_stages_without_parameters",
    "warn_of_tracing",
    "warn_of_unused",
]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def module_classes(module: nn.Module, classes: Any, option: str, *, parts_of_names: bool = False) -> list[type]:
    """Returns classes of a model's layers, from a class, the name of a class, or several of these.

    Args:
        option: name of the argument, for error messages.
        parts_of_names: a name stands for each class whose name contains it, as in NxD.

    Raises:
        ValueError: a value of another kind, or a class of which the model has no layer; the message names near classes.
    """
    if classes is None:
        return []
    present = dict.fromkeys(type(m) for m in module.modules())
    result: list[type] = []
    for item in classes if isinstance(classes, (list, tuple, set, frozenset)) else [classes]:
        if isinstance(item, str):
            matching = [c for c in present if c.__name__ == item or (parts_of_names and item and item in c.__name__)]
        elif isinstance(item, type) and issubclass(item, nn.Module):
            matching = [item] if any(issubclass(c, item) for c in present) else []
        else:
            raise ValueError(f"{option}: expected a module class or the name of one, got {item!r}")
        if not matching:
            name = item if isinstance(item, str) else item.__name__
            raise ValueError(
                f"{option}: this {type(module).__name__} has no layer of class {name!r}; nearest classes: "
                f"{nearest(name, sorted(c.__name__ for c in present))}"
            )
        result += matching
    return result


def names(value: Sequence[str] | None, option: str) -> list[str]:
    """Returns a list of names.

    Raises:
        ValueError: a single string, or an item that is no string.
    """
    listed = list(value or [])
    if isinstance(value, str) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{option} is a list of names, got {value!r}")
    return listed


def checked_input_names(module: nn.Module, input_names: Sequence[str] | None) -> list[str] | None:
    """Returns the names of a model's inputs; None: any.

    Raises:
        ValueError: the model's forward takes no argument of one of these names.
    """
    if input_names is None:
        return None
    listed = names(input_names, "input_names")
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return listed
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in listed:
        if name not in accepted:
            raise ValueError(
                f"input_names: {type(module).__name__}.forward takes no argument {name!r}; nearest: "
                f"{nearest(name, accepted)}"
            )
    return listed


def checked_auto_partition(value: Any) -> Literal["layers", "balanced"] | None:
    """Returns how a model is cut automatically; None: by `pipeline_cuts`.

    Raises:
        ValueError: no value of `auto_partition`.
    """
    if value is None or value is False:
        return None
    if value is True:
        return "layers"
    if value in ("layers", "balanced"):
        return value
    raise ValueError(
        f'auto_partition={value!r}: True or "layers" cuts evenly between transformer layers, "balanced" by FLOPs and '
        "parameters, False leaves it to pipeline_cuts"
    )


def check_counts(**counts: Any) -> None:
    """Raises ValueError for an argument that is not an integer of at least 1."""
    for option, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} must be an integer of at least 1, got {value!r}")


def inputs_by_name(method: _Method) -> _Method:
    """Decorates a method that takes inputs by name: positional inputs raise a TypeError that says so."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            example = ", ".join(f"{name}=..." for name in (self.input_names or ["input_ids", "labels"]))
            raise TypeError(
                f"{method.__name__} got {len(args)} positional arguments: pass inputs by the names in the model's "
                f"forward: {method.__name__}({example})"
            )
        return method(self, **kwargs)

    return cast(_Method, call)


def check_manual(module: Any, manual_pp_partition: bool, cuts: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Checks that `manual_pp_partition`, and the options that belong to it, come with a list of layers.

    Args:
        cuts: other options that cut the model.
        functions: options that belong to `manual_pp_partition`.

    Raises:
        ValueError: an option does not go with the others, or `module` is neither a module nor a list.
    """
    if module is None or isinstance(module, type):
        example = "Model" if module is None else module.__name__
        raise ValueError(f"module is {module!r}: pass an instance: {example}()")
    if not manual_pp_partition:
        given = next((option for option, value in functions.items() if value is not None), None)
        if given or not isinstance(module, nn.Module):
            what = given or f"module is a {type(module).__name__}, and"
            raise ValueError(f"{what} belongs to manual_pp_partition=True, with a list of layers as the module")
        return
    for option, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{option} must be a function, got {value!r}")
    given = next((option for option, value in cuts.items() if value), None)
    if given:
        raise ValueError(
            f"{given} does not go with manual_pp_partition: pass manual_pp_stage_partition_fn to cut by hand"
        )


def warn_of_unused(**options: tuple[Any, str]) -> None:
    """Warns of options that are set but have no effect; each is passed as `(value, reason)`."""
    for option, (value, why) in options.items():
        if value:
            _warn(f"{option}={value!r} has no effect: {why}")


def warn_of_tracing(tracer_cls: Any, autowrap_functions: Any, autowrap_modules: Any, autowrap_obj_methods: Any) -> None:
    """Checks options of symbolic tracing, and warns of any that is set: nothing is traced here.

    Raises:
        ValueError: a value that symbolic tracing could not use either; the message says what is allowed.
    """
    if not (tracer_cls in (None, "hf", "torch") or isinstance(tracer_cls, type)):
        raise ValueError(f'tracer_cls={tracer_cls!r}: allowed are "hf", "torch", a class, or None')
    for option, items in (("autowrap_functions", autowrap_functions), ("autowrap_modules", autowrap_modules)):
        for item in items if isinstance(items, (list, tuple, set, frozenset)) else [] if items is None else [items]:
            if not (isinstance(item, ModuleType) or callable(item)) or _is_layer(item):
                raise ValueError(
                    f"{option}: expected Python functions or modules (`math`), got {item!r}; classes of layers, and "
                    f"their names, belong in leaf_module_cls"
                )
    if not isinstance(autowrap_obj_methods, Mapping) and autowrap_obj_methods is not None:
        raise ValueError(f"autowrap_obj_methods: expected {{object: [names of methods]}}, got {autowrap_obj_methods!r}")
    for obj, methods in (autowrap_obj_methods or {}).items():
        for method in names(methods, "autowrap_obj_methods[...]"):
            if not callable(getattr(obj, method, None)):
                near = nearest(method, (name for name in dir(obj) if not name.startswith("_")))
                raise ValueError(
                    f"autowrap_obj_methods: {type(obj).__name__} has no method {method!r}; nearest: {near}"
                )
    given = {
        "tracer_cls": tracer_cls, "autowrap_functions": autowrap_functions, "autowrap_modules": autowrap_modules,
        "autowrap_obj_methods": autowrap_obj_methods,
    }  # fmt: skip
    unused = [option for option, value in given.items() if value]
    if unused:
        _warn(
            f"{', '.join(unused)}: no effect, because nothing is traced symbolically: the forward runs once on fake "
            "tensors, and its calls are recorded"
        )


def warn_of_stages_without_parameters(stages: Sequence[int], cuts: Sequence[str]) -> None:
    """Warns of cuts between which a stage has no layer with parameters."""
    if stages:
        _warn(
            f"pipeline_cuts {[*cuts]} leave {'stage' if len(stages) == 1 else 'stages'} "
            f"{', '.join(map(str, stages))} without parameters: an optimizer there has nothing to update, and the "
            'other stages do all work. Cut after other layers, or pass auto_partition="balanced"'
        )


def _warn(message: str) -> None:
    """Warns at the user's line, as `warnings.warn` does: by default once for each line and message."""
    stack = [*frames()]
    caller = next((frame for owner, frame in stack if owner == USER), stack[-1][1])
    registry = caller.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno, registry=registry)


def _is_layer(item: Any) -> bool:
    return isinstance(item, nn.Module) or (isinstance(item, type) and issubclass(item, nn.Module))
