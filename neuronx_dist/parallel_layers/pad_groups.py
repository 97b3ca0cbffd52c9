"""Grouped-query attention padded for a tensor-parallel degree: which heads there are, and how they are sharded then.

The distribution is `model_shape.padded_heads`: key/value heads are padded with their groups, or, where they are fewer
than the ranks, put on several of them and their groups padded, which costs least: 9 query heads over 3 key/value heads
become 12 over 4 at tp 2 and 4, and at tp 8 16 over 4, each on 2 ranks (24 over 8 without replicas).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import comm
from ..model_shape import Heads, padded_heads
from ..weights.shard_spec import ShardSpec, gather_full, set_spec, spec_of
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "UNPADDED_COUNTS",
    "GroupedAttention",
    "grouped_attention",
    "heads_for",
    "keeping_ties",
    "reshard",
    "set_sizes",
]

UNPADDED_COUNTS = "_neuronx_dist_unpadded_counts"  # attribute of a padded module: its counts before
_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups")


class GroupedAttention(NamedTuple):
    """An attention module with fewer key/value heads than query heads, as it is without padding.

    Attributes:
        queries, keys, outputs: its column layers of query heads, of key/value heads, and its row layers.
    """

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    queries: Mapping[str, ColumnParallelLinear]
    keys: Mapping[str, ColumnParallelLinear]
    outputs: Mapping[str, RowParallelLinear]

    def pad(self, padded: Heads) -> None:
        """Changes the layers, and the local numbers of heads that the module has as attributes."""
        group, padded_group = self.heads // self.kv_heads, padded.heads // padded.kv_heads
        groups = (group * self.head_dim, padded_group * self.head_dim) if group != padded_group else None
        tp = comm.size("tp")
        for layer in self.queries.values():
            for parameter in layer.column_parameters:
                reshard(layer, parameter, padded.heads * self.head_dim, group=groups)
            set_sizes(layer, "output_size", padded.heads * self.head_dim, tp)
        for row in self.outputs.values():
            reshard(row, "weight", padded.heads * self.head_dim, group=groups)
            set_sizes(row, "input_size", padded.heads * self.head_dim, tp)
        for layer in self.keys.values():
            for parameter in layer.column_parameters:
                reshard(layer, parameter, padded.kv_heads * self.head_dim, replicas=padded.replicas)
            set_sizes(layer, "output_size", padded.kv_heads * self.head_dim, tp // padded.replicas)
            layer.replicas = padded.replicas
        heads, kv_heads = padded.heads // tp, padded.kv_heads * padded.replicas // tp
        before = self.module.__dict__.setdefault(UNPADDED_COUNTS, {})
        for attribute, count in zip(_COUNTS, (heads, heads, kv_heads, heads // kv_heads)):
            if isinstance(value := getattr(self.module, attribute, None), int):
                before.setdefault(attribute, value)
                setattr(self.module, attribute, count)


def grouped_attention(module: nn.Module, n_heads: int, ratio: Fraction, config: Any) -> GroupedAttention | None:
    """Returns the heads of a module whose own layers are those of grouped-query attention; None: it is none.

    The size of a head is the module's `head_dim`, or its config's or the model's. Without any, `n_heads` is the number
    of query heads if key/value heads cannot grow by the `ratio` of n_heads, padded.
    """
    layers = dict(module.named_children())
    columns = {name: layer for name, layer in layers.items() if isinstance(layer, ColumnParallelLinear)}
    rows = {name: layer for name, layer in layers.items() if isinstance(layer, RowParallelLinear)}
    sizes = {name: spec_of(layer.weight).unpadded_shape[0] for name, layer in columns.items()}
    inputs = {spec_of(layer.weight).unpadded_shape[1] for layer in rows.values()}
    if len(inputs) != 1 or len({*sizes.values()}) != 2 or max(sizes.values()) not in inputs:
        return None
    (size,), smaller = inputs, min(sizes.values())
    head_dim = next(_head_dims(module, config, size), 0)
    if not head_dim and (smaller * ratio).denominator != 1 and size % n_heads == 0:
        head_dim = size // n_heads
    if not head_dim or size % head_dim or smaller % head_dim or size % smaller:
        return None
    queries = {name: layer for name, layer in columns.items() if sizes[name] == size}
    keys = {name: layer for name, layer in columns.items() if sizes[name] == smaller}
    return GroupedAttention(module, size // head_dim, smaller // head_dim, head_dim, queries, keys, rows)


def _head_dims(module: nn.Module, config: Any, size: int) -> Iterator[int]:
    """Yields what is known of the size of a head, the closest first."""
    for holder in (module, getattr(module, "config", None), config):
        head_dim = getattr(holder, "head_dim", None)
        heads = None if isinstance(holder, nn.Module) else getattr(holder, "num_attention_heads", None)
        if isinstance(head_dim, int):
            yield head_dim
        elif isinstance(heads, int) and heads:
            yield size // heads


def heads_for(attention: GroupedAttention, tp_degree: int) -> Heads:
    """Returns the heads after padding for a degree; on a mesh of another degree without replicas."""
    padded = padded_heads(attention.heads, attention.kv_heads, tp_degree)
    if padded.replicas > 1 and comm.size("tp") != tp_degree:
        kv_heads = -(-attention.kv_heads // tp_degree) * tp_degree
        return Heads(kv_heads * (attention.heads // attention.kv_heads), kv_heads, 1)
    return padded


@contextmanager
def keeping_ties(model: nn.Module) -> Iterator[None]:
    """Makes tied parameters that are re-sharded inside one parameter again.

    Raises:
        ValueError: one of them was padded, and another was not.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    tied = [group for group in names.values() if len(group) > 1]
    yield
    for first, *others in tied:
        param = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            if spec_of(other) != spec_of(param):
                raise ValueError(
                    f"padding would untie {first} and {name}, of which one is padded: name the classes of both in "
                    "wrapped_classes, or of neither"
                )
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, param)


@torch.no_grad()
def reshard(
    layer: nn.Module, parameter: str, size: int, *, group: tuple[int, int] | None = None, replicas: int = 1
) -> None:
    """Gives a parameter's sharded dim another padded size; a collective where the layout changes, but for meta."""
    param = getattr(layer, parameter)
    if param is None:
        return
    spec, tp = spec_of(param), comm.size("tp")
    assert spec.dim is not None
    unpadded = spec.unpadded_shape[spec.dim]
    shape = tuple(size if dim == spec.dim else length for dim, length in enumerate(spec.full_shape))
    changes: dict[str, Any] = dict(full_shape=shape, unpadded=unpadded if unpadded != size else None, group=group)
    if replicas > 1 or spec.axis != "tp":
        changes |= dict(axis=f"tp/{replicas}" if replicas > 1 else "tp", num_partitions=tp // replicas)
        for part in (f"tp/{replicas}", f"tp%{replicas}") if replicas > 1 else ():
            comm.communicator(part)  # while all ranks are here
    padded: ShardSpec = replace(spec, **changes)
    if padded == spec:
        return
    if param.is_meta:
        value = param.new_empty(padded.local_shape)
    else:
        value = padded.local_slice(gather_full(param, spec), comm.rank("tp") // replicas).clone()
    setattr(layer, parameter, nn.Parameter(value, requires_grad=param.requires_grad))
    set_spec(layer, parameter, padded)


def set_sizes(layer: nn.Module, attribute: str, size: int, partitions: int) -> None:
    """Sets a layer's whole size, and its local one, where it has these attributes."""
    for name, value in ((attribute, size), (f"{attribute}_per_partition", size // partitions)):
        if hasattr(layer, name):
            setattr(layer, name, value)
