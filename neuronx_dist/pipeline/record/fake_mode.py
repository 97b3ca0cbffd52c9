"""A mode for fake tensors, which have shapes and no values, that runs a call once and repeats its result after that.

A model calls the same functions on the same shapes in each layer, microbatch and optimizer step. torch has such a cache
too, with keys that also hold symbolic sizes and sparse tensors, and takes most of a check's time for them. Here are
calls of torch's own operators on dense tensors of plain sizes; all others go to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["QuietFakeMode"]

_DEVICE = torch.ops.prim.device.default
_PROMOTE = torch.ops.aten.promote_types.default
# Arguments that are equal only if they mean the same; of numbers the class counts too: 1, 1.0 and True.
_PLAIN = frozenset({str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size})
_NUMBERS = frozenset({int, bool, float, complex})
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_SIZE = 20_000  # calls; then all are forgotten


class _Result(NamedTuple):
    """A tensor that a call returns: new, or a view of an argument's memory, or that argument itself.

    Attributes:
        argument: index of the tensor among all that the call was given; None: its memory is new.
        same: it is that argument.
        attributes: of the fake tensor, but for its mode.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    argument: int | None
    same: bool
    attributes: dict[str, Any]

    def make(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.argument is None:
            dense = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        elif self.same:
            return tensors[self.argument]
        else:
            dense = torch.empty(0, dtype=self.dtype, device="meta")
            dense.set_(tensors[self.argument].untyped_storage(), self.offset, self.shape, self.stride)
        # As FakeTensor's constructor, which is called so often that its checks are felt.
        fake: Any = torch.Tensor._make_subclass(
            FakeTensor, dense, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        if mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self.attributes, fake_mode=mode)
        return fake


class _Results(NamedTuple):
    """What a call returns.

    Attributes:
        container: list or tuple; None: one tensor, or nothing if there are no items.
    """

    container: type | None
    items: tuple[_Result, ...]

    def make(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> Any:
        if self.container is None:
            return self.items[0].make(mode, tensors) if self.items else None
        return self.container([item.make(mode, tensors) for item in self.items])


_known: dict[tuple[Any, ...], _Results | None] = {}  # of all modes; None: to be asked of torch each time


class QuietFakeMode(FakeTensorMode):
    """A mode for fake tensors that no TorchFunctionMode sees at work.

    Fake tensors compute with torch functions of their own, which are no part of the program: in backward, where
    autograd asks for them, a TorchFunctionMode would see them.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps each mode's dispatch, so that no compiler looks into it: `super`'s is wrapped, once is enough."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if func is _DEVICE and isinstance(args[0], FakeTensor):  # every other call: autograd asks it of all tensors
                return args[0].device
            if func is _PROMOTE:  # of dtypes, no tensors
                return func(*args)
            tensors: list[torch.Tensor] = []
            key = self._key(func, args, kwargs, tensors)
            if key is None:
                return super().__torch_dispatch__(func, types, args, kwargs or {})
            known = _known.get(key)
            if known is not None:
                return known.make(self, tensors)
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
            if key not in _known:
                if len(_known) >= _SIZE:
                    _known.clear()
                _known[key] = self._repeatable(func, tensors, result)
            return result

    def _key(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: list[torch.Tensor]
    ) -> tuple[Any, ...] | None:
        """What decides about a call's result. None: more than is looked at here.

        Args:
            tensors: is filled with the tensors among the arguments.
        """
        items: list[Any] = [*args]
        key: list[Any] = [func, torch.get_default_dtype()]
        if kwargs:
            key += kwargs
            items += kwargs.values()
        for x in items:  # it grows: what is in sequences comes after all others
            kind = x.__class__
            if kind is FakeTensor:
                if x.fake_mode is not self or x.constant is not None or x.layout is not torch.strided:
                    return None
                if x.dtype.is_complex or x.is_neg() or x.is_inference():
                    return None
                memory = x.untyped_storage().nbytes()  # `as_strided` may not leave it
                key += (x.dtype, x.shape, x.stride(), x.storage_offset(), memory, x.device, x.requires_grad)
                tensors.append(x)
            elif kind in _PLAIN:
                key.append(x)
            elif kind in _NUMBERS:
                key += (kind, x)
            elif kind is list or kind is tuple:
                key += (kind, len(x))
                items += x
            else:
                return None
        # Without a tensor a call may depend on the default device, and may make a constant.
        return tuple(key) if tensors and not torch.is_inference_mode_enabled() else None

    def _repeatable(self, func: Any, tensors: Sequence[torch.Tensor], result: Any) -> _Results | None:
        """How to make the result again, if it is as it will be then. None: ask torch each time."""
        if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims") or func in self.lift_fns:
            return None
        if _DEPENDS_ON_VALUES & set(func.tags) or any(argument.is_out for argument in func._schema.arguments):
            return None
        container = result.__class__ if result.__class__ in (list, tuple) else None
        results = list(result) if container is not None else [] if result is None else [result]
        if any(x.__class__ is not FakeTensor for x in results):  # a gradient that is not asked for is None
            return None
        items: list[_Result] = []
        memory = {_memory(x): index for index, x in reversed([*enumerate(tensors)])}
        for x in results:
            if x.fake_mode is not self or x.constant is not None:
                return None
            if x.layout is not torch.strided or x.dtype.is_complex or x.is_neg():
                return None
            same = [index for index, y in enumerate(tensors) if y is x]
            argument = same[0] if same else memory.get(_memory(x))
            if argument is None and any(_memory(x) == _memory(y) for y in results if y is not x):
                return None
            attributes = {} if same else _attributes(x)
            if any(value is not None for name, value in attributes.items() if name != "_fake_device"):
                return None
            offset = int(x.storage_offset())
            item = _Result(x.shape, x.stride(), x.dtype, x.device, offset, argument, bool(same), attributes)
            if not same and _traits(item.make(self, tensors)) != _traits(x):
                return None
            items.append(item)
        return _Results(container, tuple(items))


def _memory(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _traits(x: torch.Tensor) -> tuple[Any, ...]:
    """All that is asked of a fake tensor."""
    sizes = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    return *sizes, x.dtype, x.device, x.requires_grad, torch._C._dispatch_key_set(x), _attributes(x)


def _attributes(x: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in x.__dict__.items() if name != "fake_mode"}
