"""Side effects and cost of a call: the memory that it changes, whether it is random, its number of operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..torch_internals.operators import TorchDispatchMode, attention_operators, schema_of
from ..torch_internals.tensors import pytree, storage_key

__all__ = ["Effects", "flops_of", "has_tensors", "storage_of", "tensors_in"]


# These write the running mean and variance (arguments 3 and 4), which their schemas do not declare.
_BATCH_NORMS = {getattr(torch.ops.aten, f"{backend}_batch_norm").default for backend in ("native", "cudnn", "miopen")}


class Effects(TorchDispatchMode):
    """Collects the side effects and the operation count of all operators that run inside this mode.

    Attributes:
        random: whether an operator drew random numbers.
        writes: storage ids of the memory that operators changed.
        flops: the floating-point operations of matrix products, convolutions and attention, by torch's formulas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.random = False
        self.writes: set[int] = set()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        random, written = _effects_of(func)
        self.random |= random
        for position, name in written:
            value = args[position] if position < len(args) else (kwargs or {}).get(name)
            self.writes |= {storage_of(x) for x in tensors_in(value)}
        if func in _BATCH_NORMS and args[5]:  # training
            self.writes |= {storage_of(x) for x in tensors_in(args[3:5])}
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        return result


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of an operator's call: a matrix product, convolution or attention; else 0."""
    if func.overloadpacket in attention_operators:
        return _attention_flops(*args[:3])
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


@functools.cache
def _effects_of(func: Any) -> tuple[bool, list[tuple[int, str]]]:
    """Returns whether an operator draws random numbers, and (position, name) of each argument that it writes."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return torch.Tag.nondeterministic_seeded in func.tags, written


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """FLOPs of attention's two matrix products, by torch's formula.

    torch has no FLOP count of attention on CPU, and before 2.10 none for shared key/value heads.

    query `[batch, heads, queries, width]`; key and value `[batch, heads or a divisor, keys, width]`
    """
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in containers, slices included."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from tensors_in((leaf.start, leaf.stop, leaf.step))


def has_tensors(x: Any) -> bool:
    return any(True for _ in tensors_in(x))


def storage_of(x: torch.Tensor) -> int:
    """Id of a tensor's storage, equal for a tensor and its views."""
    return int(storage_key(x.untyped_storage())) if x.layout is torch.strided else id(x)
