"""Specs of each rule in full, in `specs.txt`: calls of every form that a rule reads, more than verify runs.

A line is a call, and the line below it is what its rule says: the dims of operands and results as in an einsum (a dim
of several factors in brackets, `1` one that broadcasts, `-` an operand of which only the dtype or shape is read), the
sizes, and what becomes of labels; of a function that is taken apart the calls that it is made of. `verify` shows that
rules are true, this that none changes unseen. A new call is a line of the file; NXD_UPDATE_RULES=1 writes the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_dist.rules import RULES, Dims, Rule, Spec, indexing, operands
from tests.rules.verify_rule import Recorder, results_of, shown

FILE = Path(__file__).parent / "specs.txt"
UPDATE = bool(os.environ.get("NXD_UPDATE_RULES"))


def floats(*shape: int) -> Tensor:
    """Made without the recorder's notice."""
    with torch._C.DisableTorchFunction():
        return torch.rand(shape, dtype=torch.float64)


def longs(*shape: int, of: int = 0) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.full(shape, of)


def bools(*shape: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.ones(shape, dtype=torch.bool)


def complexes(*shape: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.ones(shape, dtype=torch.complex128)


NAMES = dict(torch=torch, F=F, Tensor=Tensor, f=floats, k=longs, b=bools, c=complexes, inf=float("inf"))


def called(function: Any, args: Any, kwargs: Any) -> str:
    given = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())]
    rule = RULES.get(function)
    return f"{rule.name if rule else getattr(function, '__name__', function)}({', '.join(given)})"


def in_letters(dims: Dims | None) -> str:
    if dims is None:
        return "-"
    words = ["".join(ascii_letters[label] for label in dim) or "1" for dim in dims]
    return " ".join(f"({word})" if len(word) > 1 else word for word in words) or "[]"


def described(spec: Spec) -> Iterator[str]:
    yield f"{', '.join(map(in_letters, spec.ins))} -> {', '.join(map(in_letters, spec.outs))}"
    if spec.sizes:
        yield " ".join(f"{ascii_letters[label]}={size}" for label, size in sorted(spec.sizes.items()))
    for name in ("selected", "looked_up", "weak"):
        if getattr(spec, name):
            yield f"{name} {' '.join(ascii_letters[label] for label in sorted(getattr(spec, name)))}"
    for name in ("fixed", "reduced", "ranges"):
        by_value: dict[Any, list[str]] = {}
        for label, value in sorted(getattr(spec, name).items()):
            by_value.setdefault(value, []).append(ascii_letters[label])
        yield from (f"{name} {' '.join(letters)}: {value}" for value, letters in by_value.items())
    yield from (name for name in ("at_any_scale", "infinite") if getattr(spec, name))


def said(rule: Rule, args: Any, kwargs: Any) -> Iterator[str]:
    if rule.decompose is not None:
        with Recorder() as recorder:
            rule.decompose(*args, **kwargs)
        for function, its_args, its_kwargs in recorder.calls:
            if RULES[function].kind != "pass":
                yield f"= {called(function, its_args, its_kwargs)}"
            if getattr(function, "__module__", "") == indexing.__name__:  # is reached in no other way
                yield from said(RULES[function], its_args, its_kwargs)
        return
    if rule.spec is not None:
        yield from described(rule.spec(*args, **kwargs))
    if rule.affine is not None:
        yield f"affine {rule.affine(*args, **kwargs)}"
    if callable(rule.random):
        yield f"random {rule.random(*args, **kwargs)}"


def answer(call: str) -> str:
    """Returns the spec of the first torch function that the call reaches, with the shapes that torch gives."""
    with Recorder() as recorder:
        result = eval(call, NAMES)
    function, args, kwargs = recorder.calls[0]
    rule = RULES[function]
    if rule.spec is not None:
        spec = rule.spec(*args, **kwargs)
        pairs = [*zip(spec.ins, operands(args, kwargs), strict=True)]
        if rule.kind == "op" and len(recorder.calls) == 1:
            pairs += zip(spec.outs, results_of(result), strict=True)
        for dims, tensor in pairs:
            if dims is not None:
                for dim, size in zip(dims, tensor.shape, strict=True):  # 0: as many as values say
                    assert prod(spec.sizes[label] for label in dim) in (0, size), (call, spec)
    return "; ".join(said(rule, args, kwargs)).strip()


def is_here(call: str) -> bool:
    """Whether the installed torch has the function of a call."""
    namespace, *path = re.match(r"[\w.]*", call)[0].split(".")
    place = NAMES.get(namespace, torch)
    for word in path:
        place = getattr(place, word, None)
    return place is not None or namespace not in ("torch", "F")


def reviewed() -> dict[str, str]:
    """Returns the reviewed spec of each call whose function this torch has: the line below the call."""
    lines = FILE.read_text().splitlines()
    return {
        call: below.strip() if below.startswith(" ") else ""
        for call, below in zip(lines, [*lines[1:], ""])
        if not call.startswith(" ") and is_here(call)
    }


@pytest.mark.filterwarnings("ignore")
def test_what_rules_say():
    now = {call: answer(call) for call in reviewed()}
    if UPDATE:
        FILE.write_text("".join(f"{call}\n    {answer}\n" for call, answer in now.items()))
    before = reviewed()
    assert {call: answer for call, answer in now.items() if answer != before[call]} == {}
