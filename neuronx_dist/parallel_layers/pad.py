"""Attention heads that tp does not divide: zero heads are added at the end until it does.

A padded head has zero weights in the query, key and value projections (columns) and in the output projection (rows).
So it adds nothing to the output, and its gradient is exactly zero: it stays zero under any optimizer whose step is
zero for a zero gradient and a zero weight, AdamW with weight decay included. The layout (`ShardSpec.unpadded`)
remembers the real size, so that saving strips the padding and counts do not see it.

With grouped-query attention the unit is the group: key/value heads are padded to a multiple of tp and each brings its
group of query heads, 9 query heads over 3 key/value heads become 12 over 4 at tp=2. `pad_model` does this when
`n_heads` is the number of key/value heads: every padded size grows by the same ratio, here 4/3.
`neuronx_dist.hf.swap(model, pad_heads=True)` does it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from .. import comm
from ..weights.shard_spec import ShardSpec, gather_full, set_spec, spec_of
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["generate_padding_mask", "get_number_of_extra_heads", "pad_model", "padded_spec"]


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
    Padding goes at the end of the whole dim, not of each rank's shard, so the padded model computes what the original
    one does; a model that has values already is re-sharded for this, one parameter at a time (a collective: all tp
    ranks call it). The attention code reads its own number of heads: it takes `n_heads +
    get_number_of_extra_heads(n_heads, tp)` over tp.

    Args:
        model: built with parallel layers.
        tp_degree: the tensor-parallel size.
        n_heads: heads of the model before padding; with grouped-query attention the number of key/value heads.
        wrapped_classes: the classes inside which layers are padded, usually the attention; () pads all of the model.
        pad_hook_fn: called as `pad_hook_fn(module, ratio)` for every module inside a wrapped class, itself included.

    Raises:
        ValueError: a size does not grow by a whole number, a padded output would be gathered, or tp_degree is not the
            current one.
    """
    classes = (wrapped_classes,) if isinstance(wrapped_classes, type) else tuple(wrapped_classes)
    if tp_degree != comm.size("tp"):
        raise ValueError(f"pad_model: tp_degree is {tp_degree}, but the tensor-parallel size is {comm.size('tp')}")
    extra = get_number_of_extra_heads(n_heads, tp_degree)
    if extra:
        _pad_inside(model, "", Fraction(n_heads + extra, n_heads), classes, not classes, pad_hook_fn)
    return model


def _pad_inside(
    module: nn.Module,
    name: str,
    ratio: Fraction,
    classes: tuple[type[nn.Module], ...],
    inside: bool,
    hook: Callable[[nn.Module, float], Any] | None,
) -> None:
    inside = inside or isinstance(module, classes)
    if inside:
        if isinstance(module, ColumnParallelLinear):
            if module.gather_output:
                raise ValueError(
                    f"pad_model: {name} gathers its output, which would come out padded; name the attention class in "
                    f"wrapped_classes, or build the layer with gather_output=False"
                )
            _pad_layer(module, name, ratio, "output_size", ("weight", "bias"))
        elif isinstance(module, RowParallelLinear):
            _pad_layer(module, name, ratio, "input_size", ("weight",))
        if hook is not None:
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
                f"pad_model: the {attribute} {spec.unpadded_shape[spec.dim]} of {name} times {ratio} is not whole; "
                f"with grouped-query attention n_heads is the number of key/value heads"
            )
        padded = padded_spec(spec, int(size))
        if param.is_meta:
            value = param.new_empty(padded.local_shape)
        else:
            value = padded.local_slice(gather_full(param, spec), comm.rank("tp")).clone()
        setattr(layer, parameter, nn.Parameter(value, requires_grad=param.requires_grad))
        set_spec(layer, parameter, padded)
        setattr(layer, attribute, int(size))
        if hasattr(layer, f"{attribute}_per_partition"):
            setattr(layer, f"{attribute}_per_partition", int(size) // spec.num_partitions)


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int,
    tp_degree: int,
    tp_rank: int,
    hardware_type: Any = None,
) -> torch.Tensor:
    """Which of a rank's query heads are real: bool `[num_heads_with_pad / tp_degree]`, False for padding.

    `hardware_type` is accepted for compatibility: heads lie in the same order on all hardware, padding last.

    Raises:
        ValueError: counts that do not divide, or padding that would split a group of query heads.
    """
    if not 0 <= tp_rank < tp_degree:
        raise ValueError(f"tp_rank {tp_rank} is not a rank of {tp_degree}")
    if num_heads_with_pad % tp_degree:
        raise ValueError(f"{num_heads_with_pad} padded heads are not divisible by tp_degree {tp_degree}")
    if num_heads_with_pad < num_heads:
        raise ValueError(f"{num_heads_with_pad} padded heads are fewer than the {num_heads} real ones")
    if num_heads % num_kv_heads or num_heads_with_pad % (num_heads // num_kv_heads):
        raise ValueError(
            f"{num_heads} heads over {num_kv_heads} key/value heads cannot be padded to {num_heads_with_pad}: "
            f"whole groups of num_heads / num_kv_heads are added"
        )
    local = num_heads_with_pad // tp_degree
    return torch.arange(tp_rank * local, (tp_rank + 1) * local) < num_heads
