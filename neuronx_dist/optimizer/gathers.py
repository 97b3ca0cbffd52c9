"""Parameters whose new values are still being gathered while the next forward runs.

    gathers = Gathers()
    gathers.append(params, finish)      # before one of `params` is used, `finish()` is called
    gathers.wait()                      # calls each `finish` that was not called yet

Until then the class of the parameter is `_Awaited`, whose `__torch_function__` intercepts every call with the
parameter: by a layer, `state_dict`, a user's arithmetic. So no code has to name the modules that use it, and every read
has the new value. (torch's uninitialized parameters of lazy modules change their class in the same way.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ..comm.errors import CommError
from ..spmd.watching import no_typecheck
from ..torch_internals.tensors import DisableTorchFunctionSubclass

__all__ = ["Gathers"]


class _Gather:
    """A bucket of parameters under way, until `wait`."""

    def __init__(self, params: Sequence[Tensor], finish: Callable[[], None]) -> None:
        self._params = params
        self._finish: Callable[[], None] | None = finish
        for param in params:
            param.__class__ = _Awaited
            param.awaits = self  # type: ignore[attr-defined]

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            for param in self._params:
                param.__class__ = nn.Parameter
                del param.awaits  # type: ignore[attr-defined]
            with torch.no_grad(), no_typecheck():
                finish()


class Gathers:
    """The gathers of one step, in order."""

    def __init__(self) -> None:
        self._gathers: list[_Gather] = []
        finalize(self, _end, self._gathers)  # at the end of the script too: other ranks need this one's part

    def append(self, params: Sequence[Tensor], finish: Callable[[], None]) -> None:
        """Schedules `finish` for the first use of a parameter; calls it now if one has another subclass."""
        if all(type(param) is nn.Parameter for param in params):
            self._gathers.append(_Gather(params, finish))
        else:
            finish()

    def wait(self) -> None:
        """Awaits all gathers."""
        _wait(self._gathers)


def _wait(gathers: list[_Gather]) -> None:
    for gather in gathers:
        gather.wait()
    gathers.clear()


def _end(gathers: list[_Gather]) -> None:
    """Ends the gather at exit: no code reads the parameters any more, and none could handle an error."""
    with suppress(CommError):
        _wait(gathers)


class _Awaited(nn.Parameter):
    """A parameter of which a gather is under way. It becomes an `nn.Parameter` again when it is used."""

    awaits: _Gather

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ_NO_VALUE:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _awaited((args, kwargs)):
            param.awaits.wait()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        self.awaits.wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.awaits.wait()
        return self.__reduce_ex__(protocol)


# Attributes that may be read between a step and the forward: they are the same before and after the gather.
_GETTERS = (
    "grad",
    "requires_grad",
    "is_leaf",
    "dtype",
    "device",
    "shape",
    "layout",
    "ndim",
    "_post_accumulate_grad_hooks",
)
_GRAD: Any = Tensor.grad
_READ_NO_VALUE = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
    *(_GRAD.__set__, _GRAD.__delete__),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point),
}


def _awaited(value: Any) -> Iterator[_Awaited]:
    """The parameters whose gather is under way, among the arguments of a call."""
    if type(value) is _Awaited:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _awaited(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _awaited(item)
