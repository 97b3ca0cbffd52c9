"""The function objects behind a name: a `TorchFunctionMode` receives `torch.add`, `Tensor.add`, `Tensor.add_` as such.

Operators arrive as methods (`x + y` as `Tensor.add`, `2 - x` as `Tensor.__rsub__`), `F.softmax` as the python function
that it is, `F.gelu` as the built-in function of `native_nn`, properties as their getters, `Tensor.real.__get__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals.tensors import native_nn
from .spec import RULES, Rule

__all__ = ["CATS", "getter", "in_place", "out_of_place", "register"]

CATS = ("cat", "concat", "concatenate")

_PLACES = (torch, Tensor, torch.special, F, native_nn)

# Functions of `torch.linalg` that are what is called so elsewhere; `torch.linalg.polar` is none of them, and new ones
# need not be.
_LINALG = frozenset("cholesky det inv matmul matrix_exp matrix_power slogdet vecdot".split())

# The methods of Python's operators; `__r...__` where the order of the operands does not matter.
_OPERATORS = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__",),
    "mul": ("__mul__", "__rmul__"),
    "divide": ("__div__",),
    "div": ("__truediv__",),
    "remainder": ("__mod__",),
    "floor_divide": ("__floordiv__",),
    "pow": ("__pow__",),
    "matmul": ("__matmul__",),
    "neg": ("__neg__",),
    "positive": ("__pos__",),
    "abs": ("__abs__",),
    "eq": ("__eq__",),
    "ne": ("__ne__",),
    "lt": ("__lt__",),
    "le": ("__le__",),
    "gt": ("__gt__",),
    "ge": ("__ge__",),
    "bitwise_left_shift": ("__lshift__",),
    "bitwise_right_shift": ("__rshift__",),
    "bitwise_and": ("__and__", "__rand__"),
    "bitwise_or": ("__or__", "__ror__"),
    "bitwise_xor": ("__xor__", "__rxor__"),
    "bitwise_not": ("__invert__",),
}
_OPERATORS_IN_PLACE = {
    "add": ("__iadd__",),
    "sub": ("__isub__",),
    "mul": ("__imul__",),
    "div": ("__idiv__", "__itruediv__"),
    "remainder": ("__imod__",),
    "floor_divide": ("__ifloordiv__",),
    "pow": ("__ipow__",),
    "bitwise_left_shift": ("__ilshift__",),
    "bitwise_right_shift": ("__irshift__",),
    "bitwise_and": ("__iand__",),
    "bitwise_or": ("__ior__",),
    "bitwise_xor": ("__ixor__",),
}


def _functions_named(name: str, operators: tuple[str, ...]) -> list[Callable[..., Any]]:
    functions = [getattr(namespace, name, None) for namespace in _PLACES]
    if name in _LINALG:
        functions.append(getattr(torch.linalg, name, None))
    functions += [getattr(Tensor, operator, None) for operator in operators]
    return [function for function in functions if callable(function)]


def out_of_place(name: str) -> list[Callable[..., Any]]:
    """Returns every function called `name` in torch, its namespaces and on tensors, and its operators."""
    return _functions_named(name, _OPERATORS.get(name, ()))


def in_place(name: str) -> list[Callable[..., Any]]:
    """Returns every function `name_` that writes its first operand, and its operators: `add_`, `__iadd__`."""
    return _functions_named(f"{name}_", _OPERATORS_IN_PLACE.get(name, ()))


def getter(name: str) -> Callable[..., Any]:
    """Returns the function that a mode receives when property `name` of a tensor is read."""
    return getattr(Tensor, name).__get__


def register(names: str, spec: Callable[..., Any], **fields: Any) -> None:
    """Registers one rule for each of `names` (separated by spaces), in all their forms."""
    for name in names.split():
        functions = out_of_place(name)
        written = in_place(name)
        for function in functions:
            RULES[function] = Rule(**{"name": name, "spec": spec, **fields})
        for function in written:
            RULES[function] = Rule(**{"name": f"{name}_", "spec": spec, **fields, "inplace": 0, "aliases": False})
