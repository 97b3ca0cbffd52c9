"""Programs that depend on Python's state, a generator of random numbers or `requires_grad`: found by two recordings.

A program from one recording would silently repeat the outcome of one call: a counter's value, one draw of layer drop,
the branch of tensors without gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rules.containers import substituted
from ..torch_internals.tensors import pytree
from .program import Call, Program, Value, surroundings, values_in
from .recording import TracingError

__all__ = ["check_repeated", "first_difference"]


def check_repeated(a: Program, b: Program, name: str) -> None:
    """Raises TracingError if two recordings of the same call of `name`.forward differ."""
    different = first_difference(a, b)
    if different:
        raise TracingError(
            f"{different}: two recordings of {name}.forward differ here, so that it depends on more than its "
            "arguments, parameters and buffers, such as a clock, or a generator of random numbers that is not torch's: "
            "pass such a value as an argument, or draw it by torch"
        )


def first_difference(a: Program, b: Program) -> str:
    """Returns where two programs of one forward differ; "": they compute the same.

    Tensors that depend on no argument, parameter or buffer are compared by value: a table may be computed in the first
    call of forward, and read from an attribute in the second one.
    """
    comparison = _Comparison(_known(a) | _known(b))
    calls = [[call for call in program.calls if comparison.is_live(call)] for program in (a, b)]
    for value, other in zip(a.inputs, b.inputs):
        comparison.numbers[value] = comparison.numbers[other] = value.path
    for program in (a, b):
        comparison.numbers |= {value: value.path for value in (*program.parameters, *program.buffers)}
    for number, (call, other) in enumerate(zip(*calls)):
        same = call.function == other.function and len(call.results) == len(other.results)
        if not same or not comparison.same((call.args, call.kwargs), (other.args, other.kwargs)):
            return " or ".join(dict.fromkeys(map(_shown, (call, other))))
        for index, (result, other_result) in enumerate(zip(call.results, other.results)):
            comparison.numbers[result] = comparison.numbers[other_result] = (number, index)
    if len(calls[0]) != len(calls[1]):
        return _shown(max(calls, key=len)[min(map(len, calls))])
    if a.output_structure != b.output_structure or not comparison.same(tuple(a.outputs), tuple(b.outputs)):
        return "the result of forward"
    return ""


class _Comparison:
    """Compares arguments of calls of two programs.

    Attributes:
        known: the tensor of each value that depends on no argument, parameter or buffer.
        numbers: an equal object for values of the two programs that are equal.
    """

    def __init__(self, known: dict[Value, torch.Tensor]) -> None:
        self.known = known
        self.numbers: dict[Value, Any] = {}

    def is_live(self, call: Call) -> bool:
        return any(result not in self.known for result in call.results) or bool(call.writes)

    def same(self, x: Any, y: Any) -> bool:
        if isinstance(x, Value) and isinstance(y, Value):
            if (x in self.known) != (y in self.known):
                return False
            return _equal(self.known[x], self.known[y]) if x in self.known else self.numbers[x] == self.numbers[y]
        if type(x) is not type(y):
            return False
        if isinstance(x, slice):
            return self.same((x.start, x.stop, x.step), (y.start, y.stop, y.step))
        if isinstance(x, (tuple, list)):
            return len(x) == len(y) and all(map(self.same, x, y))
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(self.same(item, y[key]) for key, item in x.items())
        leaves, structure = pytree.tree_flatten(x)
        if not structure.is_leaf():
            others, other_structure = pytree.tree_flatten(y)
            return structure == other_structure and self.same(leaves, others)
        return _equal(x, y)


def _known(program: Program) -> dict[Value, torch.Tensor]:
    """Returns the tensor of each value of a program that depends on no argument, parameter or buffer."""
    known = {value: value.constant for value in program.constants if value.constant is not None}
    for call in program.calls:
        if call.random or call.writes or not all(value in known for value in values_in((call.args, call.kwargs))):
            continue
        args, kwargs = substituted((call.args, call.kwargs), Value, known.__getitem__)
        with surroundings(call), torch.no_grad():
            result = call.function(*args, **kwargs)
        known |= zip(call.results, result if call.several else [result])
    return known


def _shown(call: Call) -> str:
    return f"{call.where}: {call.source or call.name}"


def _equal(x: Any, y: Any) -> bool:
    """Returns whether two objects are equal: tensors by values and dtype, nan to nan, others as they compare."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        return x.is_meta or bool(((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, (tuple, list)) and type(x) is type(y):
        return len(x) == len(y) and all(map(_equal, x, y))
    same: Any = x == y
    return bool(same.all()) if hasattr(same, "all") else bool(same) or x is y
