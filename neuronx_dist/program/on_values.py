"""Evaluation on values of layers and functions that cannot run on fake tensors, to learn the shapes of their results.

A layer of experts, for example, reads which experts have tokens; a kernel may have no fake implementation, or one that
accepts fewer arguments. Weights have their real values where those exist; other weights, and inputs, get arbitrary
values. These suffice, since shapes of results cannot depend on values in a model that is cut into stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .. import accelerator
from ..spmd.random import streams
from ..torch_internals.fake_tensors import FakeTensor
from ..torch_internals.tensors import pytree
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
    """Returns the result, as fake tensors, and the effects; the layer and its inputs stay unchanged.

    Args:
        layer: a module or a function.
        args, kwargs: may hold fake tensors, real ones whose values are known, and other objects.
        originals: the real parameters and buffers by the ids of the layer's fake ones; they may be on meta.
        device: the device to run on.
        fake: makes a fake tensor like a real one.
    """
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of a tensor: the tensor, its stand-in with values

    def value_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in values:
            original = originals.get(id(x), x)
            known = not (isinstance(original, FakeTensor) or original.is_meta)
            value = (original.detach().clone() if known else _made_up(original)).to(device)
            # Not a leaf of autograd, as in the model's forward, so that the layer may change it in place.
            values[id(x)] = (x, value.requires_grad_(x.requires_grad).clone())
        return values[id(x)][1]

    def result_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for original, value in values.values():
            if x is value:
                return original
            if storage_of(x) == storage_of(value):
                return original.as_strided(x.shape, x.stride(), x.storage_offset())
        return fake(x)

    given_args, given_kwargs = pytree.tree_map(value_of, (args, kwargs))
    effects = Effects()
    with _random_state_restored(), effects:
        if isinstance(layer, nn.Module):
            state = {name: value_of(x) for name, x in (*layer.named_parameters(), *layer.named_buffers())}
            result = functional_call(layer, state, given_args, given_kwargs)
        else:
            result = layer(*given_args, **given_kwargs)
    storages = {storage_of(value): storage_of(original) for original, value in values.values()}
    effects.writes = {storages.get(storage, storage) for storage in effects.writes}
    return pytree.tree_map(result_of, result), effects


def _made_up(x: torch.Tensor) -> torch.Tensor:
    """Returns values for a tensor whose values are unknown: normally distributed floats, or zeros."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype)
    some = torch.randn(min(x.numel(), 4099), generator=torch.Generator().manual_seed(0))
    repeated = some.repeat(math.ceil(x.numel() / max(1, some.numel())))[: x.numel()]
    return repeated.reshape(x.shape).to(x.dtype)


@contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restores all random number generators on exit."""
    states = streams().get_states()
    try:
        with accelerator.random_state_restored():
            yield
    finally:
        streams().set_states(states)
