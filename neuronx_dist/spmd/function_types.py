"""Declared types of autograd functions whose bodies the checker does not follow: fused kernels.

Without a declaration the checker follows the body, forward and backward, and proves more. A declared function runs
unchecked, its results get the declared types, and reports list it as trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "DECOMPOSITIONS",
    "LOCAL",
    "hook_of",
    "is_declared",
    "register_autograd_function",
    "register_decomposition",
    "register_local_autograd_function",
    "register_local_backward_hook",
]

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}  # autograd function -> the function in terms of torch
LOCAL: set[Any] = set()  # autograd functions of one rank's values, position by position


def hook_of(cls: Any) -> tuple[str, Callable[..., Any]] | None:
    """Returns the name and the static method by which a class declares its types; None: it declares none."""
    for name in ("spmd_typecheck", "typecheck_forward"):
        hook = getattr(cls, name, None)
        if callable(hook):
            return name, hook
    return None


def is_declared(cls: Any) -> bool:
    """Returns whether the types of an autograd function are declared."""
    return cls in DECOMPOSITIONS or cls in LOCAL or hook_of(cls) is not None


def register_autograd_function(cls: Any) -> Any:
    """Registers an autograd function that declares its types by a static method; returns the class.

    `spmd_typecheck(*, x, weight, group)`: names those arguments of `forward` that it needs, and returns the types
    of the results as tensors, computed by the functions of `spmd.rules`. `spmd_typecheck(outputs, *, x)`: declares the
    types of `outputs` itself, by `assert_type`. `typecheck_forward(*args)`: the older form, which calls `cls.apply`.
    Classes with `spmd_typecheck` need no registration.

    Raises:
        TypeError: the class has none of these, or both.
    """
    names = [name for name in ("spmd_typecheck", "typecheck_forward") if getattr(cls, name, None) is not None]
    if len(names) != 1 or not callable(getattr(cls, names[0])):
        raise TypeError(
            f"register_autograd_function: {cls.__name__} has {' and '.join(names) or 'neither'}: one static method, "
            "spmd_typecheck or typecheck_forward, declares its types; without one its body is checked"
        )
    return cls


def register_local_autograd_function(cls: Any) -> Any:
    """Registers an autograd function that computes position by position, without communication; returns the class.

    R and V give V where any operand varies; I stays I; P is an error. S stays S where all shapes are equal.
    """
    LOCAL.add(cls)
    return cls


def register_decomposition(cls: Any, ref_impl: Callable[..., Any] | None = None) -> Any:
    """Registers a function with the arguments and results of `cls.apply`, from which the types are derived.

    It runs on tensors without values. Without `ref_impl` this is a decorator of it.
    """
    if ref_impl is None:
        return lambda function: register_decomposition(cls, function)
    DECOMPOSITIONS[cls] = ref_impl
    return ref_impl


def register_local_backward_hook(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook: the checker follows the bodies of hooks, so that there is nothing to declare."""
    return fn
