"""Is the rule of a torch function true? Answered with numbers: `verify(function, *args, **kwargs)`.

The call is run on real tensors, and on tensors that are cut in two along each label of its spec; the results must be
the pieces of the whole result, or combine to it as the spec says, or, for fixed labels, must not. Each linear group is
checked for additivity and scaling. Every claim of a rule that one call can show is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from neuronx_dist.rules import RULES, Rule, Spec, operands

__all__ = ["Recorder", "received", "results_of", "shown", "verify"]

PIECES = 2

COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0),
    "mean": lambda pieces: pieces.mean(0),
    "mean_of_valid": lambda pieces: pieces.mean(0),  # where as many targets count in each piece
    "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0),
    "prod": lambda pieces: pieces.prod(0),
    "any": lambda pieces: pieces.any(0),
    "all": lambda pieces: pieces.all(0),
}

DETAILS = ("selected", "looked_up", "weak", "ranges", "at_any_scale", "infinite")
FILE = Path(__file__).parent / "spec_details.txt"
UPDATE = bool(os.environ.get("NXD_UPDATE_RULES"))


@cache
def reviewed_details() -> dict[str, str]:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {call: details for call, _, details in (line.rpartition(": ") for line in lines)}


def shown(value: Any) -> str:
    """An argument: a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, tuple):  # as an index it means something else than a list
        return f"({', '.join(map(shown, value))})"
    return str(value)


def _in_order(value: Any) -> Any:
    return (
        sorted(value.items() if isinstance(value, dict) else value) if isinstance(value, (frozenset, dict)) else value
    )


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Recorder(TorchFunctionMode):
    """Notes what it receives, with copies of the tensors as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, fresh(tuple(args)), fresh(kwargs or {})))
        return function(*args, **(kwargs or {}))


def received(call: Callable[[], Any]) -> list[Callable[..., Any]]:
    """The functions that a mode receives during `call()`."""
    with Recorder() as recorder:
        call()
    return [function for function, _, _ in recorder.calls]


def verify(
    function: Callable[..., Any],
    *args: Any,
    _adapt: Callable[[int, Spec, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None,
    _refusals: bool = True,
    _linear: bool = True,
    _constant: bool = False,
    **kwargs: Any,
) -> Spec | None:
    """Checks the rule of `function` on one call, and returns the call's spec.

    Args:
        function: a torch function or method, or anything that calls exactly one.
        args, kwargs: of the call. Dims of even sizes, all different, show the most; take float64 tensors.
        _adapt: for calls whose other arguments name local sizes (view, expand): `_adapt(label, spec, args, kwargs)`
            gives args and kwargs for the pieces, after their tensors have been cut.
        _refusals: check too that what the rule does not allow is really wrong: fixed labels, calls that are said to be
            affine, functions that are said to be linear in nothing. False where these values happen to agree.
        _linear: check linearity.
        _constant: the results may be the same at all positions, because the function says so (`zeros_like`).

    Raises:
        AssertionError: the rule is wrong about this call.
        KeyError: a function without a rule.
    """
    args, kwargs = fresh(args), fresh(kwargs)
    with Recorder() as recorder:
        function(*args, **kwargs)
    assert len(recorder.calls) == 1, f"{function} is not one torch function: {[call[0] for call in recorder.calls]}"
    target, args, kwargs = recorder.calls[0]
    return _Check(target, RULES[target], args, kwargs, _adapt, _refusals, _linear, _constant).run()


def fresh(value: Any, convert: Callable[[Tensor], Tensor] = lambda x: x.detach().clone()) -> Any:
    """A copy of an argument tree, two lists deep, whose tensors are all objects of their own."""
    if isinstance(value, Tensor):
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)(fresh(item, convert) for item in value)
    if isinstance(value, dict):
        return {key: fresh(item, convert) for key, item in value.items()}
    return value


def results_of(value: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


def cut(tensor: Tensor, dims: tuple[tuple[int, ...], ...], sizes: dict[int, int], label: int, piece: int) -> Tensor:
    """The piece number `piece` of `PIECES` along `label`."""
    for dim, factors in enumerate(dims):
        if label in factors:
            inner = [sizes[factor] for factor in factors]
            shape = [*tensor.shape[:dim], *inner, *tensor.shape[dim + 1 :]]
            share = sizes[label] // PIECES
            split = tensor.reshape(shape).narrow(dim + factors.index(label), piece * share, share)
            tensor = split.reshape([*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]])
    return tensor.clone()


def close(left: Any, right: Any) -> bool:
    return left.shape == right.shape and torch.allclose(
        left.to(right.dtype), right, rtol=1e-6, atol=1e-9, equal_nan=True
    )


def _is_constant(x: Tensor) -> bool:
    return bool((x == x.reshape(-1)[0]).all())


class _Check:
    def __init__(self, target, rule: Rule, args, kwargs, adapt, refusals, linear, constant) -> None:
        self.constant = constant
        self.target, self.rule, self.args, self.kwargs = target, rule, args, kwargs
        self.adapt, self.refusals, self.linear = adapt, refusals, linear
        self.operands = operands(args, kwargs)
        self.whole = self.call(self.operands)

    def run(self) -> Spec | None:
        self.tells_something()
        if self.rule.kind == "decompose":
            self.decomposed()
            return None
        if self.rule.spec is None:
            return None
        self.spec = self.rule.spec(*self.args, **self.kwargs)
        self.reviewed()
        self.shapes()
        self.writes()
        for label, size in self.spec.sizes.items():
            if size % PIECES == 0 and size:
                self.label(label)
        if self.linear:
            self.groups()
        return self.spec

    def reviewed(self) -> None:
        """Compares a spec's claims that values do not show with `spec_details.txt` (NXD_UPDATE_RULES=1 writes it)."""
        details = {field: getattr(self.spec, field) for field in DETAILS}
        text = ", ".join(f"{name}={_in_order(value)}" for name, value in details.items() if value)
        given = [*self.args, *(f"{name}={shown(value)}" for name, value in self.kwargs.items())]
        call = f"{self.rule.name}({', '.join(map(shown, given))})"
        if UPDATE and text:
            reviewed_details()[call] = text
            FILE.write_text("".join(f"{call}: {line}\n" for call, line in sorted(reviewed_details().items())))
        if text != reviewed_details().get(call, ""):
            self.fail(f"{call} says {text or 'nothing'!r}, and {reviewed_details().get(call, '')!r} was reviewed")

    def fail(self, what: str) -> None:
        raise AssertionError(f"rule {self.rule.name!r}: {what}\n{getattr(self, 'spec', '')}")

    def tells_something(self) -> None:
        """Pieces of a result that is NaN, or the same everywhere, agree with it under wrong rules too."""
        for number, x in enumerate(self.whole):
            if x.numel() and bool(x.isnan().all()):
                self.fail(f"result {number} is NaN: choose operands for which the function is defined")
        several = [x for x in self.whole if x.numel() > 1]
        if several and not self.constant and all(_is_constant(x) for x in several):
            self.fail("the result is the same everywhere: choose operands for which it is not, or say `_constant=True`")

    # --- running it ---

    def arguments(self, tensors: list[Tensor]) -> tuple[Any, Any, list[Tensor]]:
        """The arguments with `tensors` as operands: copies, which are returned too, in order."""
        place = {id(operand): number for number, operand in enumerate(self.operands)}
        by_number: dict[int, Tensor] = {}

        def convert(tensor: Tensor) -> Tensor:
            number = place.get(id(tensor))
            if number is None:
                return tensor.clone()
            by_number[number] = tensors[number].clone()
            return by_number[number]

        args, kwargs = fresh(self.args, convert), fresh(self.kwargs, convert)
        return args, kwargs, [by_number[number] for number in range(len(tensors))]

    def call(self, tensors: list[Tensor], label: int | None = None) -> list[Tensor]:
        args, kwargs, _ = self.arguments(tensors)
        if label is not None and self.adapt is not None:
            args, kwargs = self.adapt(label, self.spec, args, kwargs)
        return results_of(self.target(*args, **kwargs))

    # --- structure ---

    def shapes(self) -> None:
        spec, ins = self.spec, self.spec.ins
        if len(ins) != len(self.operands):
            self.fail(f"{len(ins)} operands in the spec, {len(self.operands)} in the call")
        if len(spec.outs) != len(self.whole):
            self.fail(f"{len(spec.outs)} results in the spec, {len(self.whole)} of the call")
        for what, dims, tensor in [
            *(("operand", dims, tensor) for dims, tensor in zip(ins, self.operands) if dims is not None),
            *(("result", dims, tensor) for dims, tensor in zip(spec.outs, self.whole)),
        ]:
            shape = tuple(prod(spec.sizes[label] for label in factors) for factors in dims)
            if shape != tuple(tensor.shape):
                self.fail(f"{what} of shape {tuple(tensor.shape)}, by the spec {shape}")
        used = {label for dims in ins if dims is not None for factors in dims for label in factors}
        for dims in spec.outs:
            labels = {label for factors in dims for label in factors}
            lost = {
                label for label in used - labels - spec.reduced.keys() - spec.fixed.keys() if spec.sizes[label] != 1
            }
            if lost:
                self.fail(f"labels {lost} end, and are neither reduced nor fixed")
        if not (spec.selected | spec.looked_up) <= spec.fixed.keys():
            self.fail("labels that are selected or looked up are fixed too")
        if unknown := set(spec.reduced.values()) - COMBINE.keys():
            self.fail(f"unknown reductions {unknown}")

    def writes(self) -> None:
        args, kwargs, tensors = self.arguments(self.operands)
        results = results_of(self.target(*args, **kwargs))
        where = self.rule.inplace
        if where is not None and not close(tensors[where], results[0]):
            self.fail(f"operand {where} is said to be written, and is not the result")
        for number, (before, after) in enumerate(zip(self.operands, tensors)):
            if number != where and not torch.equal(before.nan_to_num(), after.nan_to_num()):
                self.fail(f"operand {number} was written, and the rule does not say so")
            shared = any(
                result.untyped_storage().data_ptr() == after.untyped_storage().data_ptr() and after.numel()
                for result in results
            )
            if shared and number != where and not (number == 0 and self.rule.aliases):
                self.fail(f"a result shares the memory of operand {number}, and the rule does not say so")

    # --- labels ---

    def label(self, label: int) -> None:
        spec = self.spec
        having = [
            number
            for number, dims in enumerate(spec.ins)
            if dims is not None and any(label in factors for factors in dims)
        ]
        if not having:
            return
        # what is added to a sum comes in once: an operand that is linear together with one that is cut
        added = {
            member
            for group in self.rule.linear
            if set(group) & set(having)
            for member in group
            if member not in having and member < len(self.operands)
        }
        pieces: list[list[Tensor]] = []
        for piece in range(PIECES):
            tensors = [
                cut(tensor, dims, spec.sizes, label, piece) if dims is not None and number in having else tensor
                for number, (tensor, dims) in enumerate(zip(self.operands, spec.ins))
            ]
            if piece and spec.reduced.get(label) == "sum":
                tensors = [x * 0 if number in added else x for number, x in enumerate(tensors)]
            try:
                pieces.append(self.call(tensors, label))
            except (RuntimeError, IndexError, ValueError):
                if label in spec.fixed:
                    return
                raise
        right = all(self.agrees(number, label, pieces) for number in range(len(spec.outs)))
        if label in spec.fixed:
            if right and self.refusals:
                self.fail(f"label {label} is fixed, and cutting it is right")
        elif not right:
            self.fail(f"cutting label {label} is wrong")

    def agrees(self, number: int, label: int, pieces: list[list[Tensor]]) -> bool:
        dims, whole = self.spec.outs[number], self.whole[number]
        if any(label in factors for factors in dims):
            return all(
                close(pieces[piece][number], cut(whole, dims, self.spec.sizes, label, piece)) for piece in range(PIECES)
            )
        got = [piece[number] for piece in pieces]
        if any(part.shape != whole.shape for part in got):
            return False
        if label in self.spec.reduced:
            return close(COMBINE[self.spec.reduced[label]](torch.stack(got)), whole)
        return all(close(part, whole) for part in got)

    # --- linearity ---

    def groups(self) -> None:
        rule, floats = self.rule, [x.is_floating_point() or x.is_complex() for x in self.operands]
        listed = [range(len(floats)) if group == (-1,) else group for group in rule.linear]
        groups = [[number for number in group if number < len(floats)] for group in listed]
        affine = rule.affine is not None and rule.affine(*self.args, **self.kwargs)
        checked = [group for group in groups if group and all(floats[number] for number in group)]
        for group in checked:
            linear = self.is_linear(group)
            if not affine and not linear:
                self.fail(f"it is not linear in operands {group}")
            if affine and linear and self.refusals:
                self.fail(f"it is said to add a constant, and is linear in operands {group}")
        if self.refusals and rule.spec is not None and any(x.is_floating_point() for x in self.whole):
            for number in range(len(floats)):
                untold = floats[number] and [number] not in groups and self.spec.ins[number] is not None
                if untold and self.is_linear([number]):
                    self.fail(f"it is linear in operand {number} alone, and the rule does not say so")

    def is_linear(self, group: list[int]) -> bool:
        generator = torch.Generator().manual_seed(1)
        first = list(self.operands)
        second, total, scaled = list(first), list(first), list(first)
        for number in group:
            x = first[number]
            y = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
            second[number], total[number], scaled[number] = y, x + y, x * -2.5
        for one, two, both, more in zip(self.whole, self.call(second), self.call(total), self.call(scaled)):
            if not (both.is_floating_point() or both.is_complex()):
                return False
            if not (close(one + two, both) and close(one * -2.5, more)):
                return False
        return True

    # --- decompositions ---

    def decomposed(self) -> None:
        assert self.rule.decompose is not None
        args, kwargs, _ = self.arguments(self.operands)
        parts = results_of(self.rule.decompose(*args, **kwargs))
        if len(parts) != len(self.whole) or not all(close(one, two) for one, two in zip(parts, self.whole)):
            self.fail("the decomposition has another value")
