"""Attention heads that tp does not divide: zero heads are added at the end until it does.

A padded head has zero weights in the query, key and value projections (columns) and in the output projection (rows).
So it adds nothing to the output, and its gradient is exactly zero: it stays zero under any optimizer whose step is
zero for a zero gradient and a zero weight, AdamW with weight decay included. The layout (`ShardSpec.unpadded`)
remembers the real size, so that saving strips the padding and counts do not see it.

With grouped-query attention the unit is the group: key/value heads are padded to a multiple of tp, each with its group
of query heads. 9 query heads over 3 key/value heads become 12 over 4 at tp=2. `pad_model` does this, whether `n_heads`
is the number of query heads or of key/value heads; `neuronx_dist.hf.swap(model, pad_heads=True)` pads by itself.

With fewer key/value heads than ranks, m = tp / kv_heads, rank r holds key/value head r // m. The layout of its weight
is `ShardSpec("tp/m", ...)`: sharded over the outer part of tp, replicated on the inner part.
`ColumnParallelLinear(replicas=m)` uses the weight through `reinterpret(I, V)` over `"tp%m"`, whose backward sums the
gradients of the replicas, so that they are complete and equal. (NxD sums dK and dV, `[tokens, head_dim]`, before it
computes dW.) `swap` and `pad_model` then pad query heads at the end of each group (`ShardSpec.group`), which is fewer:
48 query heads over 8 key/value heads become 64 over 8 at tp=32. A padded query head in a real group attends uniformly
to real values: its columns of the output projection are zero and would get a gradient, which `ZerosStay` masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from .. import comm
from ..model_shape import padded_heads
from ..weights.shard_spec import spec_of
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .pad_groups import (
    UNPADDED_COUNTS,
    GroupedAttention,
    grouped_attention,
    heads_for,
    keeping_ties,
    reshard,
    set_sizes,
)

__all__ = [
    "generate_padding_mask",
    "get_number_of_extra_heads",
    "pad_model",
    "padding_heads",
    "pads_heads",
    "unpad_model",
]

# Whether the ranks that hold one key/value head are adjacent there.
_ADJACENT = {"trn1": False, "inf2": False, "trn2": True}


_PADS: ContextVar[bool] = ContextVar("pads_heads", default=False)


@contextmanager
def padding_heads() -> Iterator[None]:
    """Makes `hf.swap` pad heads inside, as by `pad_heads=True`: the trainer's `pad_model=True` around `model_fn`."""
    token = _PADS.set(True)
    try:
        yield
    finally:
        _PADS.reset(token)


def pads_heads() -> bool:
    """Returns whether this is inside of `padding_heads`."""
    return _PADS.get()


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add to `n_head` to make it a multiple of `tp_degree`."""
    return -n_head % tp_degree


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: type[nn.Module] | Sequence[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], Any] | None = None,
) -> nn.Module:
    """Pads the parallel linear layers of a model, in place, as if it had enough heads for `tp_degree`.

    Returns the model.

    With as many key/value heads as query heads, column layers grow in their output (weight and bias), row layers in
    their input, by the ratio padded / n_heads. Attention code computes its number of local heads:
    `(n_heads + get_number_of_extra_heads(n_heads, tp)) / tp`.

    In grouped-query attention, where `n_heads` are the query heads, key/value heads are padded or put on several ranks,
    whichever costs less (`pad_groups.py`), and the module's `num_heads`, `num_attention_heads`, `num_key_value_heads`
    and `num_key_value_groups` become the local numbers; other layers stay. A `n_heads` of key/value heads pads by the
    ratio, as above.

    A model that has values already is re-sharded, one parameter at a time (a collective: all tp ranks call it). What is
    padded as asked for, as by `hf.swap(pad_heads=True)`, stays. Layers of the vocabulary stay too: `pad=True` and
    `hf.swap(pad_vocab=True)` pad them. Saved files and `gather_full` have no padding; `unpad_model` takes it back.

    Args:
        model: built with parallel layers, or swapped by `hf.swap`.
        tp_degree: the tensor-parallel size, or another one for which to pad, which key/value heads then do not share.
            The padded heads must be divisible by both.
        n_heads: heads of the model before padding.
        wrapped_classes: the classes inside which layers are padded, usually the attention; () pads all of the model.
        pad_hook_fn: called as `pad_hook_fn(module, ratio)` for every instance of a wrapped class; with (), for which
            all classes are to be padded, for every module.

    Raises:
        TypeError: wrapped_classes are no classes.
        ValueError: a size does not grow by a whole number, a padded output would be gathered, a layer has replicas
            and no grouped-query attention around it, a number of heads that the attention does not have, padded
            heads that the tensor-parallel size does not divide, one of two tied weights would be padded, or nothing
            in the model is an instance of wrapped_classes.
    """
    classes = _classes(wrapped_classes)
    ratio = Fraction(n_heads + get_number_of_extra_heads(n_heads, tp_degree), n_heads)
    inside = _inside(model, classes)
    attentions = _grouped(model, inside, n_heads, ratio, tp_degree)
    targets = [heads_for(attention, tp_degree) for attention in attentions]
    padded = targets[0].heads if targets else int(n_heads * ratio)
    of_keys = {target.kv_heads * target.replicas for target in targets}
    if any(number % comm.size("tp") for number in {padded, *of_keys}):
        raise ValueError(
            f"pad_model: {n_heads} heads, padded to {padded} for tp_degree {tp_degree}, are not divisible by the "
            f"tensor-parallel size {comm.size('tp')}: pass a multiple of that size as tp_degree"
        )
    with keeping_ties(model):
        if targets:
            for attention, target in zip(attentions, targets):
                attention.pad(target)
        elif ratio > 1:
            vocabulary = _vocabulary_layers(model)
            for name, module in inside.items():
                if name not in vocabulary:
                    _pad_layer_by(ratio, name, module)
    if padded != n_heads and pad_hook_fn is not None:
        for module in inside.values():
            if not classes or isinstance(module, classes):
                pad_hook_fn(module, padded / n_heads)
    return model


def unpad_model(model: nn.Module) -> nn.Module:
    """Takes the padding of linear layers out of a model, in place; the inverse of `pad_model`. Returns the model.

    A collective, where there are values. The model computes the same at a degree that divides its heads.

    Raises:
        ValueError: the tensor-parallel size does not divide an unpadded size.
    """
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and not layer.pad_size:
            spec, tp = spec_of(layer.weight), comm.size("tp")
            if spec.axis not in ("tp", f"tp/{layer.replicas}"):
                continue
            assert spec.dim is not None
            size = spec.unpadded_shape[spec.dim]
            if size % (tp * spec.stride):
                raise ValueError(f"unpad_model: {name} has size {size}, which is not divisible by tp={tp}")
            layers.append((layer, size))
    with keeping_ties(model):
        for layer, size in layers:
            if isinstance(layer, RowParallelLinear):
                reshard(layer, "weight", size)
                set_sizes(layer, "input_size", size, tp)
            else:
                for parameter in ("weight",) if layer.gather_output else layer.column_parameters:
                    reshard(layer, parameter, size)
                set_sizes(layer, "output_size", size, tp)
                layer.replicas = 1
    for module in model.modules():
        for attribute, count in module.__dict__.pop(UNPADDED_COUNTS, {}).items():
            setattr(module, attribute, count)
    return model


def _classes(wrapped_classes: Any) -> tuple[type[nn.Module], ...]:
    classes = (wrapped_classes,) if isinstance(wrapped_classes, (type, str)) else tuple(wrapped_classes)
    if wrong := [value for value in classes if not isinstance(value, type)]:
        raise TypeError(f"pad_model: wrapped_classes={wrapped_classes!r}: pass classes, and not {wrong[0]!r}")
    return classes


def _inside(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Returns the modules to pad: all, or the instances of some classes and what is in them."""
    named = dict(model.named_modules())
    if not classes:
        return named
    roots = [name for name, module in named.items() if isinstance(module, classes)]
    if not roots:
        present = ", ".join(dict.fromkeys(type(module).__name__ for module in named.values()))
        raise ValueError(
            f"pad_model: no module of this {type(model).__name__} is a {' or '.join(cls.__name__ for cls in classes)}, "
            f"so that wrapped_classes leave nothing to pad; its modules are {present}"
        )
    return {
        name: module
        for name, module in named.items()
        if any(name == root or name.startswith(f"{root}.") or not root for root in roots)
    }


_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads", "num_kv_heads")


def _check_number_of_heads(name: str, module: nn.Module, n_heads: int, tp_degree: int) -> None:
    """Raises a ValueError if an attention that says how many heads it has is not one of `n_heads`.

    Its attributes say it: the size of a head, or a number of heads, which may be the local one.
    """
    rows = [layer for layer in module.children() if isinstance(layer, RowParallelLinear)]
    sizes = {spec_of(layer.weight).unpadded_shape[1] for layer in rows}
    counts = {count for attribute in _COUNTS if isinstance(count := getattr(module, attribute, None), int) and count}
    head_dim = getattr(module, "head_dim", None)
    if not sizes or not (counts or head_dim):
        return
    if isinstance(head_dim, int) and head_dim:
        counts |= {size // head_dim for size in sizes if size % head_dim == 0}
    padded = n_heads + get_number_of_extra_heads(n_heads, tp_degree)
    fitting = counts | {count * comm.size("tp") for count in counts}
    if not fitting.isdisjoint((n_heads, padded)) or padded == n_heads and not any(n % tp_degree for n in counts):
        return
    raise ValueError(
        f"pad_model: n_heads={n_heads}, but {name or 'the model'}, a {type(module).__name__}, has "
        f"{' and '.join(map(str, sorted(counts)))} heads: pass its number of query heads before padding"
    )


def _grouped(
    model: nn.Module, inside: dict[str, nn.Module], n_heads: int, ratio: Fraction, tp_degree: int
) -> list[GroupedAttention]:
    """Returns the attention modules of which `n_heads` are the query heads and not the key/value heads.

    Raises:
        ValueError: they are neither.
    """
    result = []
    for name, module in inside.items():
        attention = grouped_attention(module, n_heads, ratio, getattr(model, "config", None))
        if attention is None:
            _check_number_of_heads(name, module, n_heads, tp_degree)
        if attention is None or n_heads == attention.kv_heads:
            continue
        if n_heads != attention.heads:
            raise ValueError(
                f"pad_model: n_heads={n_heads}, but {name or 'the model'} has {attention.heads} query heads over "
                f"{attention.kv_heads} key/value heads"
            )
        result.append(attention)
    return result


def _vocabulary_layers(model: nn.Module) -> set[str]:
    """Returns the names of column layers that have an output for each row of an embedding: they make logits."""
    named = dict(model.named_modules())
    sizes = {module.num_embeddings for module in named.values() if isinstance(module, ParallelEmbedding)}
    return {
        name
        for name, module in named.items()
        if isinstance(module, ColumnParallelLinear) and spec_of(module.weight).unpadded_shape[0] in sizes
    }


def _pad_layer_by(ratio: Fraction, name: str, layer: Any) -> None:
    """Pads a layer in its output (columns) or its input (rows); any other module stays."""
    columns = getattr(layer, "column_parameters", None)
    if columns is None and not isinstance(layer, RowParallelLinear):
        return
    if columns is not None and layer.replicas > 1:
        raise ValueError(
            f"pad_model: {name} has {layer.replicas} replicas of each shard: with replicated key/value heads, pass the "
            "number of query heads; of a GQAQKVColumnParallelLinear choose kv_size_multiplier"
        )
    if columns is not None and layer.gather_output:
        raise ValueError(
            f"pad_model: {name} gathers its output, which would then be padded; name the attention class in "
            "wrapped_classes, or build the layer with gather_output=False"
        )
    attribute = "input_size" if columns is None else "output_size"
    for parameter in columns or ("weight",):
        param = getattr(layer, parameter)
        if param is None:
            continue
        spec = spec_of(param)
        assert spec.dim is not None
        size = spec.unpadded_shape[spec.dim] * ratio
        if size.denominator != 1:
            raise ValueError(
                f"pad_model: the {attribute} {spec.unpadded_shape[spec.dim]} of {name} times {ratio} is not an "
                "integer; with grouped-query attention n_heads is the number of query heads or of key/value heads"
            )
        reshard(layer, parameter, int(size))
        set_sizes(layer, attribute, int(size), spec.num_partitions)


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
