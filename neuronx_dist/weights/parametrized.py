"""Parametrizations, norms of weights and pruning by torch, where a rank holds a shard of the weight.

They compute with one rank's tensor in the place of the weight. Elementwise ones are right, and so is `weight_norm`
along the dim that is cut. What needs the other shards is refused by name: other norms, pruning of the smallest
elements, and parametrizations with parameters, as a low-rank adapter is, whose gradients would be one shard's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from .. import comm
from ..torch_internals.weight_norms import OF_WHOLE_WEIGHTS, around_parametrizing
from .shard_spec import _ATTRIBUTE, _TABLE, ShardSpec, _stamp, restamp, spec_of

__all__ = ["stamp_originals", "watch_parametrizations"]


@functools.cache
def watch_parametrizations() -> None:
    """Makes torch refuse, from now on, functions of a weight that read more than this rank's shard of it."""
    around_parametrizing(_checked)


@contextmanager
def _checked(module: nn.Module, name: str, method: Any) -> Iterator[None]:
    if not isinstance(method, (type, nn.Module)) and comm.is_initialized() and comm.size("pp") > 1:
        raise RuntimeError(
            f"torch.nn.utils.prune.{method.__name__} would choose elements of one pipeline stage alone, of "
            f"{comm.size('pp')}: compute the masks of the whole model, and pass each to prune.custom_from_mask"
        )
    param, spec = module._parameters.get(name), module.__dict__.get(_TABLE, {}).get(name, ShardSpec())
    if param is not None:
        spec = spec_of(param)
    if spec.num_partitions > 1:
        _check(module, name, method, spec)
    yield
    restamp(module)


def _check(module: nn.Module, name: str, method: Any, spec: ShardSpec) -> None:
    """Refuses a method that needs the whole parameter.

    Raises:
        RuntimeError: it does; the message says what works.
    """
    function = OF_WHOLE_WEIGHTS.get(method if isinstance(method, type) else type(method), "")
    if not isinstance(method, (type, nn.Module)):
        function = f"prune.{method.__name__}"
    part = f"{name} of a {type(module).__name__} is one of {spec.num_partitions} shards along dim {spec.dim}"
    if function.startswith("prune."):
        raise RuntimeError(
            f"torch.nn.utils.{function}: {part}, and elements would be chosen in this shard alone. Compute the mask of "
            "the whole weight, and pass this rank's part of it to prune.custom_from_mask"
        )
    if function.endswith("weight_norm"):
        is_padded = spec.unpadded_shape != spec.full_shape
        if function == "parametrizations.weight_norm" and method.dim == spec.dim and not is_padded:
            return
        along = f"use torch.nn.utils.parametrizations.weight_norm(module, {name!r}, dim={spec.dim}), or "
        raise RuntimeError(
            f"torch.nn.utils.{function}: {part}, and norms would be those of this shard. Norms along the dim that is "
            f"cut are right: {'' if is_padded else along}leave the layer whole, as an nn.Linear"
        )
    if function:
        raise RuntimeError(
            f"torch.nn.utils.{function}: {part}, and the shard would count as the weight. Leave the layer whole "
            "on all ranks, as an nn.Linear, or train at tensor parallel size 1"
        )
    for key, param in method.named_parameters() if isinstance(method, nn.Module) else ():
        if param.requires_grad and _like(spec, param.shape) is None:
            raise RuntimeError(
                f"{part}, and the gradient of {key} {[*param.shape]} of the parametrization {type(method).__name__} "
                "would be that of this shard alone, so that ranks drift apart. Add a module beside the layer instead: "
                "as a low-rank adapter an nn.Linear and a ColumnParallelLinear, or a RowParallelLinear and an nn.Linear"
            )


def stamp_originals(module: nn.Module) -> None:
    """Writes layouts on the parameters of a module's parametrizations, by those of the module's parameters."""
    specs: dict[str, ShardSpec] = module.__dict__.get(_TABLE, {})
    for name, originals in module.get_submodule("parametrizations").named_children():
        for param in originals.parameters():
            spec = _like(specs[name], param.shape) if name in specs else None
            if spec is not None and getattr(param, _ATTRIBUTE, None) is None:
                _stamp(param, spec)


def _like(spec: ShardSpec, shape: Sequence[int]) -> ShardSpec | None:
    """Layout of a parameter that acts elementwise on one with `spec`: `shape` on this rank, with 1 for dims it has not.

    None: it acts on the shards of several ranks, as a number for all elements does.
    """
    if spec.dim is None:
        return replace(spec, full_shape=tuple(shape))
    local, whole = spec.local_shape, list(shape)
    if len(whole) != len(local) or whole[spec.dim] != local[spec.dim]:
        return None
    if any(size not in (1, local_size) for size, local_size in zip(whole, local)):
        return None
    whole[spec.dim] = spec.full_shape[spec.dim]
    return replace(spec, full_shape=tuple(whole))
