"""A mode for fake tensors (shapes without values) that evaluates each distinct call once and caches its result.

A model calls the same functions on the same shapes in each layer, microbatch and optimizer step. torch has such a cache
too, but its keys also cover symbolic sizes and sparse tensors, and computing them takes most of a check's time. This
cache covers calls of torch's own operators on dense tensors of plain sizes; all other calls go to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..torch_internals.fake_tensors import FakeTensor, FakeTensorMode, guard_data_pointer
from ..torch_internals.operators import OpOverload, grouped_mm, schema_of
from ..torch_internals.tensors import DisableTorchFunction, dispatch_keys, make_subclass, storage_key

__all__ = ["QuietFakeMode"]

_DEVICE = torch.ops.prim.device.default
_PROMOTE = torch.ops.aten.promote_types.default
_EMPTY = torch.ops.aten.empty_strided.default  # makes the fakes of weights and inputs
# Classes of arguments that are interchangeable if equal. For numbers the class counts too: 1, 1.0 and True.
_PLAIN = frozenset({str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size})
_NUMBERS = frozenset({int, bool, float, complex})
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_SIZE = 20_000  # calls; then the cache is emptied


class _CachedTensor(NamedTuple):
    """A tensor that a call returns: new memory, a view of an argument's memory, or that argument itself.

    Attributes:
        argument: index of the tensor argument whose memory it has; None: its memory is new.
        same: the tensor is that argument.
        attributes: attributes of the fake tensor, without its mode.
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
        # A copy of FakeTensor's constructor without its checks, whose cost is measurable here.
        fake: Any = make_subclass(FakeTensor, dense, False, dispatch_device=True, device_for_backend_keys=self.device)
        guard_data_pointer(fake, mode)
        fake.__dict__.update(self.attributes, fake_mode=mode)
        return fake


class _CachedResult(NamedTuple):
    """The results of a call, from which equal fake tensors can be made.

    Attributes:
        container: list or tuple; None: one tensor, or nothing if there are no items.
    """

    container: type | None
    items: tuple[_CachedTensor, ...]

    def make(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> Any:
        if self.container is None:
            return self.items[0].make(mode, tensors) if self.items else None
        return self.container([item.make(mode, tensors) for item in self.items])


_known: dict[tuple[Any, ...], _CachedResult | None] = {}  # shared by all modes; None: cannot be cached


class QuietFakeMode(FakeTensorMode):
    """A mode for fake tensors whose internal calls no TorchFunctionMode sees.

    Fake tensors call torch functions internally, which are no part of the program: in backward, where autograd
    computes with fake tensors, a TorchFunctionMode would see those calls.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: the dispatch of `super` already has the wrapper that this would add against Dynamo."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all calls: autograd asks for devices
                return args[0].device
            if func is _PROMOTE:  # takes dtypes, no tensors
                return func(*args)
            tensors: list[torch.Tensor] = []
            key = self._key(func, args, kwargs, tensors)
            if key is None:
                return super().__torch_dispatch__(func, types, args, kwargs or {})
            known = _known.get(key)
            if known is not None:
                return known.make(self, tensors)
            result: Any
            if func is grouped_mm and args[0].dtype is not torch.bfloat16:
                result = _grouped_mm(*args, **(kwargs or {}))
            else:
                result = super().__torch_dispatch__(func, types, args, kwargs or {})
            if key not in _known:
                if len(_known) >= _SIZE:
                    _known.clear()
                _known[key] = self._repeatable(func, tensors, result)
            return result

    def _key(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: list[torch.Tensor]
    ) -> tuple[Any, ...] | None:
        """Returns a key that determines the call's result; None if the call depends on anything else.

        Args:
            tensors: receives the tensors among the arguments.
        """
        items: list[Any] = [*args]
        key: list[Any] = [func, torch.get_default_dtype()]
        if kwargs:
            key += kwargs
            items += kwargs.values()
        for x in items:  # `items` grows: the items of sequences are appended to it
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
        # A call without tensors may depend on the default device, and may make a constant.
        if not tensors and not (func is _EMPTY and _is_definite((kwargs or {}).get("device"))):
            return None
        return None if torch.is_inference_mode_enabled() else tuple(key)

    def _repeatable(self, func: Any, tensors: Sequence[torch.Tensor], result: Any) -> _CachedResult | None:
        """Returns the data to make an equal result again; None if the call must be evaluated by torch each time."""
        if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims") or func in self.lift_fns:
            return None
        if _DEPENDS_ON_VALUES & set(func.tags) or any(argument.is_out for argument in schema_of(func).arguments):
            return None
        container = result.__class__ if result.__class__ in (list, tuple) else None
        results = list(result) if container is not None else [] if result is None else [result]
        if any(x.__class__ is not FakeTensor for x in results):  # such as None for a gradient that nobody needs
            return None
        items: list[_CachedTensor] = []
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
            item = _CachedTensor(x.shape, x.stride(), x.dtype, x.device, offset, argument, bool(same), attributes)
            if not same and _traits(item.make(self, tensors)) != _traits(x):
                return None
            items.append(item)
        return _CachedResult(container, tuple(items))


def _grouped_mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the grouped product's shape, its rows padded to 16 bytes; torch's fake form takes bfloat16 alone."""
    rows, columns = input.shape[-2], mat2.shape[-1]
    groups = [offs.shape[0]] if input.dim() == mat2.dim() == 2 and offs is not None else []
    groups = [input.shape[0]] if input.dim() == mat2.dim() == 3 else groups
    dtype = out_dtype or input.dtype
    aligned = 16 // dtype.itemsize
    padded = -(-columns // aligned) * aligned
    strides = [rows * padded, padded, 1][-len(groups) - 2 :]
    return input.new_empty_strided([*groups, rows, columns], strides, dtype=dtype)


def _is_definite(device: torch.device | None) -> bool:
    """Returns whether the device is the same whatever the current devices are."""
    return isinstance(device, torch.device) and (device.type == "cpu" or device.index is not None)


def _memory(x: torch.Tensor) -> int:
    return int(storage_key(x.untyped_storage()))


def _traits(x: torch.Tensor) -> tuple[Any, ...]:
    """Returns all properties of a fake tensor that a caller can observe."""
    sizes = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    return *sizes, x.dtype, x.device, x.requires_grad, dispatch_keys(x), _attributes(x)


def _attributes(x: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in x.__dict__.items() if name != "fake_mode"}
