"""What a call does beside its result: whose memory it changes, whether it is random, how much it computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Effects", "has_tensors", "storage_of", "tensors_in"]


# They write the running mean and variance, arguments 3 and 4, of which their schemas say nothing.
_BATCH_NORMS = {getattr(torch.ops.aten, f"{backend}_batch_norm").default for backend in ("native", "cudnn", "miopen")}
_ATTENTIONS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
}


class Effects(TorchDispatchMode):
    """Collects, of all operators that run inside it, what they do beside their results.

    Attributes:
        random: whether one draws random numbers.
        writes: the memory that they change.
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
        if func.overloadpacket in _ATTENTIONS:
            self.flops += _attention_flops(*args[:3])
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


@functools.cache
def _effects_of(func: Any) -> tuple[bool, list[tuple[int, str]]]:
    """Whether an operator draws random numbers, and the positions and names of the arguments that it writes."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return torch.Tag.nondeterministic_seeded in func.tags, written


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Of the two matrix products, as torch counts it, which has no count for CPU and before 2.10 none for shared heads.

    query `[batch, heads, queries, width]`; key and value `[batch, heads or a divisor, keys, width]`
    """
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """All tensors in containers, slices included."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from tensors_in((leaf.start, leaf.stop, leaf.step))


def has_tensors(x: Any) -> bool:
    return any(True for _ in tensors_in(x))


def storage_of(x: torch.Tensor) -> int:
    """Which memory a tensor lies in: equal for a tensor and its views."""
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)
