"""Attention heads that tp does not divide: zero heads are added at the end until it does.

A padded head has zero weights in the query, key and value projections (columns) and in the output projection (rows).
So it adds nothing to the output, and its gradient is exactly zero: it stays zero under any optimizer whose step is
zero for a zero gradient and a zero weight, AdamW with weight decay included. The layout (`ShardSpec.unpadded`)
remembers the real size, so that saving strips the padding and counts do not see it.

With grouped-query attention the unit is the group: key/value heads are padded to a multiple of tp, each with its group
of query heads. 9 query heads over 3 key/value heads become 12 over 4 at tp=2. `pad_model` does this when `n_heads` is
the number of key/value heads: every padded size grows by the same ratio, here 4/3.
`neuronx_dist.hf.swap(model, pad_heads=True)` pads by itself.

With fewer key/value heads than ranks, m = tp / kv_heads, rank r holds key/value head r // m. The layout of its weight
is `ShardSpec("tp/m", ...)`: sharded over the outer part of tp, replicated on the inner part.
`ColumnParallelLinear(replicas=m)` uses the weight through `reinterpret(I, V)` over `"tp%m"`, whose backward sums the
gradients of the replicas, so that they are complete and equal. (NxD sums dK and dV, `[tokens, head_dim]`, before it
computes dW.) `swap` then pads query heads at the end of each group (`ShardSpec.group`), which is fewer: 48 query heads
over 8 key/value heads become 64 over 8 at tp=32. A padded query head in a real group attends uniformly to real values:
its columns of the output projection are zero and would get a gradient, which `ZerosStay` masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from .. import comm
from ..model_shape import padded_heads
from ..weights.shard_spec import ShardSpec, gather_full, set_spec, spec_of
from .linear import RowParallelLinear

__all__ = ["generate_padding_mask", "get_number_of_extra_heads", "pad_model", "padded_spec"]

# Whether the ranks that hold one key/value head are adjacent there.
_ADJACENT = {"trn1": False, "inf2": False, "trn2": True}


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add to `n_head` to make it a multiple of `tp_degree`."""
    return -n_head % tp_degree


def padded_spec(spec: ShardSpec, size: int) -> ShardSpec:
    """The layout of a sharded parameter once its sharded dim is padded with zeros to `size`."""
    if spec.dim is None:
        raise ValueError("only a sharded parameter can be padded: this one is replicated")
    unpadded = spec.unpadded_shape[spec.dim]
    shape = tuple(size if dim == spec.dim else length for dim, length in enumerate(spec.full_shape))
    return replace(spec, full_shape=shape, unpadded=unpadded if unpadded != size else None)


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: type[nn.Module] | Sequence[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], Any] | None = None,
) -> nn.Module:
    """Pads the parallel linear layers of a model, in place, as if it had enough heads for `tp_degree`.

    Returns the model.

    Column layers grow in their output (weight and bias), row layers in their input, by the ratio padded / n_heads.
    Padding is at the end of the whole dim, not of each rank's shard, so the padded model computes what the original one
    does; a model that has values already is re-sharded for this, one parameter at a time (a collective: all tp ranks
    call it). Attention code computes its number of local heads:
    `(n_heads + get_number_of_extra_heads(n_heads, tp)) / tp`.

    Args:
        model: built with parallel layers.
        tp_degree: the tensor-parallel size, or another one for which to pad; `n_heads`, padded, must be divisible by
            both.
        n_heads: heads of the model before padding; with grouped-query attention the number of key/value heads.
        wrapped_classes: the classes inside which layers are padded, usually the attention; () pads all of the model.
        pad_hook_fn: called as `pad_hook_fn(module, ratio)` for every instance of a wrapped class; with (), for which
            all classes are to be padded, for every module.

    Raises:
        ValueError: a size does not grow by a whole number, a padded output would be gathered, a layer has replicas
            (whose heads are padded in each group: `replace.LayerPlan.group`), or padded heads that the tensor-parallel
            size does not divide.
    """
    classes = (wrapped_classes,) if isinstance(wrapped_classes, type) else tuple(wrapped_classes)
    padded = n_heads + get_number_of_extra_heads(n_heads, tp_degree)
    if padded % comm.size("tp"):
        raise ValueError(
            f"pad_model: {n_heads} heads, padded to {padded} for tp_degree {tp_degree}, are not divisible by the "
            f"tensor-parallel size {comm.size('tp')}: pass a multiple of that size as tp_degree"
        )
    if padded != n_heads:
        _pad_inside(model, "", Fraction(padded, n_heads), classes, not classes, pad_hook_fn)
    return model


def _pad_inside(
    module: Any,
    name: str,
    ratio: Fraction,
    classes: tuple[type[nn.Module], ...],
    inside: bool,
    hook: Callable[[nn.Module, float], Any] | None,
) -> None:
    inside = inside or isinstance(module, classes)
    if inside:
        columns: Any = getattr(module, "column_parameters", None)
        if columns is not None:
            if module.replicas > 1:
                raise ValueError(
                    f"pad_model: {name} has {module.replicas} replicas of each shard: with replicated key/value "
                    "heads, pad each group of query heads; see LayerPlan.group of parallel_layers.replace, or "
                    "hf.swap"
                )
            if module.gather_output:
                raise ValueError(
                    f"pad_model: {name} gathers its output, which would then be padded; name the attention class in "
                    "wrapped_classes, or build the layer with gather_output=False"
                )
            _pad_layer(module, name, ratio, "output_size", columns)
        elif isinstance(module, RowParallelLinear):
            _pad_layer(module, name, ratio, "input_size", ("weight",))
        if hook is not None and (not classes or isinstance(module, classes)):
            hook(module, float(ratio))
    for child_name, child in module.named_children():
        _pad_inside(child, f"{name}.{child_name}" if name else child_name, ratio, classes, inside, hook)


def _pad_layer(layer: nn.Module, name: str, ratio: Fraction, attribute: str, parameters: tuple[str, ...]) -> None:
    for parameter in parameters:
        param = getattr(layer, parameter)
        if param is None:
            continue
        spec = spec_of(param)
        assert spec.dim is not None
        size = spec.unpadded_shape[spec.dim] * ratio
        if size.denominator != 1:
            raise ValueError(
                f"pad_model: the {attribute} {spec.unpadded_shape[spec.dim]} of {name} times {ratio} is not an "
                "integer; with grouped-query attention n_heads is the number of key/value heads"
            )
        padded = padded_spec(spec, int(size))
        if param.is_meta:
            value = param.new_empty(padded.local_shape)
        else:
            value = padded.local_slice(gather_full(param, spec), comm.rank("tp")).clone()
        setattr(layer, parameter, nn.Parameter(value, requires_grad=param.requires_grad))
        set_spec(layer, parameter, padded)
        for name_of_size, value_of_size in (
            (attribute, size),
            (f"{attribute}_per_partition", size / spec.num_partitions),
        ):
            if hasattr(layer, name_of_size):
                setattr(layer, name_of_size, int(value_of_size))


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int,
    tp_degree: int,
    tp_rank: int,
    hardware_type: Any = None,
) -> torch.Tensor:
    """Mask of a rank's real query heads: bool `[num_heads_with_pad / tp_degree]`, False for padding.

    Zeros are at the end of each key/value head's group of query heads; with a `hardware_type` and several key/value
    heads on a rank, at the end of the rank's heads, as upstream. Where there are more ranks than key/value heads
    (`model_shape.padded_heads`), each of these is on several ranks, which share its group: 48 heads over 8, padded to
    64, at tp 32 are 2 heads on each rank, and those of every fourth rank are padding. Key/value heads that neither
    divide tp nor are divided by it are padded first, by whole groups at the end: 9 over 3 become 12 over 4 at tp 2.

    Args:
        hardware_type: a string or an enum that says which ranks share a key/value head. "trn2", and None for the layers
            of this package: adjacent ranks; "trn1" and "inf2": ranks at a distance of the number of key/value heads.

    Raises:
        ValueError: counts that do not divide, padding that is no equal part of every group.
        RuntimeError: an unknown hardware.

    Source: upstream's `parallel_layers/pad.py`. Its mask for TRN1 counts the query heads of one key/value head on ranks
    that hold several, so that real heads are masked (32 heads over 8 at tp 4: 4 of 8); here the mask is that for TRN2.
    """
    hardware = getattr(hardware_type, "value", hardware_type)
    if hardware is not None and hardware not in _ADJACENT:
        raise RuntimeError(f"Unexpected hardware_type {hardware_type!r}: use None or one of {', '.join(_ADJACENT)}")
    if not 0 <= tp_rank < tp_degree:
        raise ValueError(f"tp_rank {tp_rank} is not a rank of {tp_degree}")
    if num_heads_with_pad % tp_degree:
        raise ValueError(f"{num_heads_with_pad} padded heads are not divisible by tp_degree {tp_degree}")
    if num_heads_with_pad < num_heads:
        raise ValueError(f"{num_heads_with_pad} padded heads are fewer than the {num_heads} real ones")
    _, kv_heads, replicas = padded_heads(num_heads, num_kv_heads, tp_degree)
    group, padded_group = num_heads // num_kv_heads, num_heads_with_pad // kv_heads
    if num_heads % num_kv_heads or num_heads_with_pad % kv_heads or padded_group < group:
        raise ValueError(
            f"{num_heads} heads over {num_kv_heads} key/value heads cannot be padded to {num_heads_with_pad} at "
            f"tp_degree {tp_degree}: {kv_heads} key/value heads need groups of equal size, of {group} or more"
        )
    local = num_heads_with_pad // tp_degree
    if hardware is not None and num_kv_heads % tp_degree == 0:
        return torch.arange(local) < group * num_kv_heads // tp_degree
    position = tp_rank  # of this rank, among all ranks in the order of their heads
    if replicas > 1 and hardware is not None and not _ADJACENT[hardware]:
        position = tp_rank % kv_heads * replicas + tp_rank // kv_heads
    heads = torch.arange(position * local, (position + 1) * local)
    return (heads % padded_group < group) & (heads // padded_group < num_kv_heads)
