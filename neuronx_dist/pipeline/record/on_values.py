"""Layers and functions that cannot run on fake tensors are run on values, to learn what their results are.

A layer of experts asks which of them has tokens; a kernel may have no fake implementation, or one that takes less. The
values are the layer's own weights where those are real, else made up, and inputs are made up: results have the shapes
that they always have, or the model could not be in a pipeline at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from ...spmd.random import streams
from .effects import Effects, storage_of

__all__ = ["run_on_values"]


def run_on_values(
    layer: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    originals: Mapping[int, torch.Tensor],
    device: torch.device,
    fake: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Any, Effects]:
    """The result, as fake tensors, and what it does beside; nothing of the layer or its inputs changes.

    Args:
        layer: or a function.
        args, kwargs: fake tensors, and real ones of which the values are known, among whatever else.
        originals: of the layer's fake parameters and buffers, by id; those may be on meta.
        device: where it runs.
        fake: makes a fake tensor like a real one.
    """
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor, and what has values in its place

    def value_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in values:
            original = originals.get(id(x), x)
            known = not (isinstance(original, FakeTensor) or original.is_meta)
            value = (original.detach().clone() if known else _made_up(original)).to(device)
            # As the layer would get it: a result of others, which it may change in place.
            values[id(x)] = (x, value.requires_grad_(x.requires_grad).clone())
        return values[id(x)][1]

    def result_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for given, value in values.values():
            if x is value:
                return given
            if storage_of(x) == storage_of(value):
                return given.as_strided(x.shape, x.stride(), x.storage_offset())
        return fake(x)

    given_args, given_kwargs = pytree.tree_map(value_of, (args, kwargs))
    effects = Effects()
    with _random_state_kept(), effects:
        if isinstance(layer, nn.Module):
            state = {name: value_of(x) for name, x in (*layer.named_parameters(), *layer.named_buffers())}
            result = functional_call(layer, state, given_args, given_kwargs)
        else:
            result = layer(*given_args, **given_kwargs)
    storages = {storage_of(value): storage_of(given) for given, value in values.values()}
    effects.writes = {storages.get(storage, storage) for storage in effects.writes}
    return pytree.tree_map(result_of, result), effects


def _made_up(x: torch.Tensor) -> torch.Tensor:
    """Values for a tensor of which only the shape is known: numbers of a normal distribution, or the number 0."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    some = torch.randn(min(x.numel(), 4099), generator=torch.Generator().manual_seed(0))
    repeated = some.repeat(math.ceil(x.numel() / max(1, some.numel())))[: x.numel()]
    return repeated.reshape(x.shape).to(x.dtype)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again outside."""
    states = streams().get_states()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        streams().set_states(states)
