"""Comparison of fused autograd functions with the operators that they fuse.

A function that overlaps or fuses collectives may have a static method `composition(*args)`, with the arguments of
`forward` and its results, which computes the same in plain typed operators. `check` then runs both, once for each
combination of types and shapes, and compares the types of the results and the collectives of forward and backward, in
any order. The body itself is typed too, so that nothing about it is assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....call_site import call_site
from ....comm import context
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import TensorType, note_of
from ....spmd.types import SAME
from ....torch_internals.tensors import DisableTorchFunction
from ..session import Session

__all__ = ["CompositionCheck", "run_node"]


class CompositionCheck:
    """Compares one fused call with its composition; inactive without a composition or outside of checks."""

    def __init__(self, mode: Session, cls: Any, args: Sequence[Any], inputs: Sequence[TensorType | None]) -> None:
        self.mode, self.cls, self.args, self.inputs = mode, cls, args, inputs
        backend = context.current().backend if context.is_initialized() else None
        self.events: list[Any] = getattr(backend, "events", [])
        self.active = False
        if getattr(cls, "composition", None) is None or getattr(backend, "name", "") != "check" or mode.probing:
            return
        arguments = tuple((tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in args)
        key = (cls, tuple(inputs), arguments, torch.is_grad_enabled())
        self.active = key not in mode.compared
        mode.compared.add(key)
        self.begin = len(self.events)

    def compare(self, outputs: Sequence[Any], types: Sequence[TensorType | None]) -> None:
        """Runs the composition, after the forward of the body, and compares the two.

        Raises:
            SpmdTypeError: types or collectives differ; the message lists them.
        """
        mode, name = self.mode, self.cls.__name__
        body = self._issued(self.begin, keep=True)
        with DisableTorchFunction():
            copies = []
            for x, type_ in zip(self.args, self.inputs):
                if isinstance(x, Tensor):
                    x, original = x.detach().requires_grad_(x.requires_grad), x
                    note = note_of(original)
                    if type_ is not None and note is not None:
                        mode.stamp(x, type_, note.origins)
                copies.append(x)
        begin = len(self.events)
        result = self.cls.composition(*copies)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        fused = self._issued(begin)
        for index, (x, type_) in enumerate(zip(results, types)):
            note = note_of(x)
            if note is None or type_ is None:
                continue
            for axis in sorted({*type_.types, *note.type.types}):
                pair = type_.get(axis), note.type.get(axis)
                if not torch.is_grad_enabled() and all(
                    spmd_type is not None and spmd_type.letter in SAME for spmd_type in pair
                ):
                    continue  # equal on all ranks, and nothing flows back
                if pair[0] != pair[1]:
                    raise SpmdTypeError(
                        f"{name} at {call_site()}",
                        f"result {index} is {type_.get(axis)} on {axis} by its body, but by its composition "
                        f"{note.type.get(axis)}",
                        axis=axis,
                        rule="composition",
                    )
        self._same("forward", body, fused)
        if torch.is_grad_enabled():
            self._same("backward", self._body_backward(outputs), self._backward(copies, results))

    def _body_backward(self, outputs: Sequence[Any]) -> Counter[Any]:
        """The collectives of the body's backward, on gradients without values."""
        begin = len(self.events)
        with self.mode.trial():
            run_node(outputs)
        return self._issued(begin)

    def _backward(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[Any]:
        with DisableTorchFunction():
            sources = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            results = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
            seeds = [torch.zeros_like(x) for x in results]
        if not sources or not results:
            return Counter()
        begin = len(self.events)
        with self.mode.trial():
            torch.autograd.grad(results, sources, seeds, allow_unused=True)
        return self._issued(begin)

    def _issued(self, begin: int, keep: bool = False) -> Counter[Any]:
        collectives = Counter(_key(event) for event in self.events[begin:])
        if not keep:
            del self.events[begin:]
        return collectives

    def _same(self, when: str, body: Counter[Any], composition: Counter[Any]) -> None:
        if body == composition:
            return
        missing, extra = composition - body, body - composition
        parts = []
        if missing:
            parts.append("lacks " + _listed(missing))
        if extra:
            parts.append("has " + _listed(extra) + " too many")
        raise SpmdTypeError(
            f"{self.cls.__name__} at {call_site()}",
            f"{when} of its body and of its composition communicate differently: the body {' and '.join(parts)}",
            rule="composition",
        )


def run_node(outputs: Sequence[Any]) -> None:
    """Runs the backward, on zeros, of the function that made `outputs` and of no earlier one."""
    with DisableTorchFunction():
        node = next((x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None), None)
        seeds = [torch.zeros_like(x) if isinstance(x, Tensor) else None for x in outputs]
    if node is not None:
        with torch.no_grad():
            node.apply(*seeds)  # type: ignore[attr-defined]


def _key(event: Any) -> Any:
    """A key that is equal for equal collectives."""
    return event.verb, event.axis, event.op, event.shape, event.dtype


def _listed(collectives: Counter[Any]) -> str:
    return ", ".join(
        f"{verb}{f'({op})' if op else ''} of {list(shape or ())} over {axis}" + (f" x{count}" if count > 1 else "")
        for (verb, axis, op, shape, _), count in collectives.items()
    )
