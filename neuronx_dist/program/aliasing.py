"""Tensors that share memory: the new values of all views after an in-place write to one of them.

A recorded forward writes tensors in place; a program does not. After a write the tensor stands for a new value, and so
does every view of its memory: when a view is read later, the view call is repeated on the new value of its base. A
write to a view is a write to its base.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..rules.indexing import write
from .builder import Builder, ResultSpec
from .program import Call, Value
from .recording import TracingError

__all__ = ["AliasedTensor", "SharedMemory"]

_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"}
_SWAPS = {"transpose", "swapaxes", "swapdims"}


@dataclass
class SharedMemory:
    """A block of memory that one or more tensors of the forward share.

    Attributes:
        storage: its number in the recording.
        leaf: the input, parameter, buffer or constant that owns this memory; None for memory of a call's result.
        version: number of writes so far.
        lost: the reason why its content is unknown; "" while it is known.
    """

    storage: int
    leaf: Value | None = None
    version: int = 0
    lost: str = ""


@dataclass(eq=False)
class AliasedTensor:
    """A tensor of the forward, whose value changes when it or another tensor of its memory is written.

    Attributes:
        value: its value at `version` of the memory.
        call: the call that made it a view of `base`; index: its position among the call's results.
        layout: its shape and strides.
    """

    value: Value
    memory: SharedMemory
    version: int = 0
    base: AliasedTensor | None = None
    call: Call | None = None
    index: int = 0
    layout: tuple[Any, ...] = ()

    def read(self, builder: Builder, where: str) -> Value:
        """Returns the tensor's current value, and repeats view calls if its memory was written since the last read."""
        if self.version < self.memory.version:
            if self.memory.lost:
                raise TracingError(f"{where}: {self.memory.lost}")
            if self.base is None:  # a buffer that a call wrote: a new name for its current content
                like = Call(torch.Tensor.detach, (), {}, where=where, grad=False)
                self.value = builder.compute(like, torch.Tensor.detach, self.value)
            else:
                self.value = self._repeated(builder, where)
            self.version = self.memory.version
        return self.value

    def write(self, value: Value, builder: Builder, like: Call) -> Value:
        """Sets the tensor's value to `value`, updates all bases, and returns the new value of the outermost base."""
        chain = [self]
        while chain[-1].base is not None:
            chain.append(chain[-1].base)
        before = [tensor.read(builder, like.where) for tensor in chain[1:]]
        self.memory.version += 1
        self.value, self.version = value, self.memory.version
        for view, base, base_value in zip(chain, chain[1:], before):
            assert view.call is not None
            written = None
            if view.call.results[view.index].requires_grad or not base_value.requires_grad:  # else it is detached
                written = _write_view(builder, like, base_value, view, view.layout == base.layout)
            if written is None:
                self.memory.lost = (
                    f"{like.where} wrote in place to a {view.call.name} view of this tensor (made at "
                    f"{view.call.where}), and the tensor is read here. Write by an index (x[...] = y), or use a "
                    "function that is not in place."
                )
                break
            base.value, base.version = written, self.memory.version
        return chain[-1].value

    def _repeated(self, builder: Builder, where: str) -> Value:
        assert self.base is not None and self.call is not None
        base = self.base.read(builder, where)
        old = self.call.args[0] if self.call.args else None
        if not isinstance(old, Value) or old is base:
            raise TracingError(
                f"{where}: reads a view made at {self.call.where}, whose tensor was written in place since: make a new "
                "view"
            )
        call = replace(self.call, args=(base, *self.call.args[1:]), results=[])
        grad = base.requires_grad and call.grad
        results = [ResultSpec(v.shape, v.dtype, v.requires_grad or grad) for v in self.call.results]
        return builder.add(call, results, self.call.several)[self.index]


def _write_view(builder: Builder, like: Call, base: Value, view: AliasedTensor, same: bool) -> Value | None:
    """Returns the value of `base` after `view.value` was written to its view; None if that cannot be expressed."""
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
    """Returns the index that selects result `number` of the call from `base`; None if there is none."""
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
