"""Torch functions that are written in Python on top of others, and are typed by running their bodies.

A `TorchFunctionMode` receives `F.multi_head_attention_forward` whole, because its first lines hand the call over.
`body` returns the function without these lines, so that the mode receives the functions that the body calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from .spec import rule

__all__ = ["BODIES", "body"]

BODIES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Functions of torch that are written in python, and their bodies."""

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: Any) -> bool:
    return False


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a Python-level torch function that is not handed to modes; the functions in its body still are.

    Raises:
        TypeError: the function is not written in Python, or does not ask for modes.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"body() takes torch functions that are written in python; {function} is not")
    if not set(_ASKS) & set(function.__code__.co_names):
        raise TypeError(
            f"{function.__name__} does not dispatch to modes: the functions that it calls are intercepted without "
            "body()"
        )
    globals_ = {**function.__globals__, **dict.fromkeys(_ASKS, _never)}
    twin = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _decomposed(*functions: Callable[..., Any]) -> None:
    for function in functions:
        BODIES[function] = body(function)
        rule(function, kind="decompose", decompose=BODIES[function])(None)


_decomposed(
    *(F.multi_head_attention_forward, F.multilabel_soft_margin_loss),
    *(F.triplet_margin_with_distance_loss, F.local_response_norm),
    *(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.max_unpool1d, F.max_unpool2d, F.max_unpool3d),
)
