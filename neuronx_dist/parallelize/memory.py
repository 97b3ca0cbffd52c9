"""Which values lie in the same memory: what a write to one of them makes of the others.

A recorded forward writes tensors in place; a program does not. A written tensor is a new value from then on, and so is
every view of its memory: a view that is read afterwards is made again, of the new value of what it is a view of. A
write to a view is a write to what it is a view of.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checking.types.rules.indexing import write
from ..pipeline.record.recording import TracingError
from .builder import Builder, Result
from .program import Call, Value

__all__ = ["Memory", "Tensor"]

_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"}
_SWAPS = {"transpose", "swapaxes", "swapdims"}


@dataclass
class Memory:
    """Memory that tensors of the forward lie in.

    Attributes:
        storage: its number in the recording.
        leaf: the input, parameter, buffer or constant that it is of.
        version: number of writes so far.
        lost: why what is in it is not known any more; "" if it is.
    """

    storage: int
    leaf: Value | None = None
    version: int = 0
    lost: str = ""


@dataclass(eq=False)
class Tensor:
    """A tensor of the forward, whose value changes when it or another tensor of its memory is written.

    Attributes:
        value: as of the version.
        call: that made it a view of `base`; index: as which of its results.
        layout: its shape and strides.
    """

    value: Value
    memory: Memory
    version: int = 0
    base: Tensor | None = None
    call: Call | None = None
    index: int = 0
    layout: tuple[Any, ...] = ()

    def read(self, builder: Builder, where: str) -> Value:
        """Its value now."""
        if self.version < self.memory.version:
            if self.memory.lost:
                raise TracingError(f"{where}: {self.memory.lost}")
            if self.base is None:  # a buffer that a call wrote: a name for what is in it now
                like = Call(torch.Tensor.detach, (), {}, where=where, grad=False)
                self.value = builder.compute(like, torch.Tensor.detach, self.value)
            else:
                self.value = self._repeated(builder, where)
            self.version = self.memory.version
        return self.value

    def write(self, value: Value, builder: Builder, like: Call) -> Value:
        """From now on it is `value`; returns the value of what all its memory is of."""
        chain = [self]
        while chain[-1].base is not None:
            chain.append(chain[-1].base)
        before = [tensor.read(builder, like.where) for tensor in chain[1:]]
        self.memory.version += 1
        self.value, self.version = value, self.memory.version
        for view, base, whole in zip(chain, chain[1:], before):
            assert view.call is not None
            written = None
            if view.call.results[view.index].requires_grad or not whole.requires_grad:  # else it is detached
                written = _write_view(builder, like, whole, view, view.layout == base.layout)
            if written is None:
                self.memory.lost = (
                    f"{like.where} wrote a {view.call.name} of this tensor in place (of {view.call.where}), which is "
                    f"read here. Write to it by an index (x[...] = y), or use the function that writes nothing."
                )
                break
            base.value, base.version = written, self.memory.version
        return chain[-1].value

    def _repeated(self, builder: Builder, where: str) -> Value:
        assert self.base is not None and self.call is not None
        base = self.base.read(builder, where)
        old = self.call.args[0] if self.call.args else None
        if not isinstance(old, Value) or old is base:
            raise TracingError(f"{where}: {self.call.where} made a view of a tensor that was written in place since")
        call = replace(self.call, args=(base, *self.call.args[1:]), results=[])
        grad = base.requires_grad and call.grad
        results = [Result(v.shape, v.dtype, v.requires_grad or grad) for v in self.call.results]
        return builder.add(call, results, self.call.several)[self.index]


def _write_view(builder: Builder, like: Call, base: Value, view: Tensor, same: bool) -> Value | None:
    """`base` after its view has been given a value. None: it is not known how."""
    call, value = view.call, view.value
    assert call is not None
    if not call.args or not isinstance(call.args[0], Value):
        return None
    if same:
        return value
    if call.name in _RESHAPES and math.prod(value.shape) == math.prod(base.shape):
        return builder.compute(like, torch.Tensor.reshape, value, base.shape)
    if call.name in _SWAPS:
        return builder.compute(like, torch.Tensor.transpose, value, *call.args[1:], **call.kwargs)
    if call.name == "t" or getattr(call.function, "__self__", None) in (torch.Tensor.T, torch.Tensor.mT):
        return builder.compute(like, torch.Tensor.transpose, value, -2, -1)
    index = _index(call, view.index, base)
    return None if index is None else builder.compute(like, write, base, value, index)


def _index(call: Call, number: int, base: Value) -> Any:
    """The index that takes from `base` what result `number` of the call is; None: there is none."""
    if call.name == "__getitem__":
        return call.args[1]
    if call.name not in _PARTS:
        return None
    options = {"dim": 0, **dict(zip(_PARTS[call.name], call.args[1:])), **call.kwargs}
    dim = options["dim"] % len(base.shape)
    part: Any = number
    if call.name == "select":
        part = options["index"]
    elif call.name == "narrow":
        part = slice(options["start"], options["start"] + options["length"])
    elif call.name != "unbind":
        ends = [0, *itertools.accumulate(result.shape[dim] for result in call.results)]
        part = slice(ends[number], ends[number + 1])
    return (*[slice(None)] * dim, part)


_PARTS = {
    "select": ("dim", "index"),
    "narrow": ("dim", "start", "length"),
    "chunk": ("chunks", "dim"),
    "split": ("split_size", "dim"),
    "unbind": ("dim",),
}
