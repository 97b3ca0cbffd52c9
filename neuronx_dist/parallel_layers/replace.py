"""The replacement of a model's layers by parallel ones: plans as data, and the one function that applies them.

    apply(model, [
        LayerPlan("mlp.gate", "column", fused_with=("mlp.up",)),
        LayerPlan("mlp.up", "column"),
        LayerPlan("mlp.down", "row"),
        LayerPlan("embed", "embedding"),
    ])

`hf.swap` makes such a list from the plans of transformers; a user can write it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import comm
from ..torch_internals.modules import move_hooks
from ..weights.shard_spec import ShardedModule, set_spec, spec_of
from .embedding import ParallelEmbedding
from .fused_columns import check_fusable, fuse_columns
from .linear import ColumnParallelLinear, RowParallelLinear
from .transposed_linear import ParallelConv1D

__all__ = ["STYLES", "LayerPlan", "Style", "apply", "mark_partial_gradients"]


@dataclass(frozen=True)
class LayerPlan:
    """The replacement of one layer.

    Attributes:
        name: the layer's qualified name in the model.
        style: a key of `STYLES`.
        padded_size: size of the sharded dim (a column's output, a row's input, an embedding's rows), padding included;
            None: no padding. `ShardSpec.unpadded` has the size without padding, so that saving strips the zeros.
        fused_with: names of column layers that are always called on the same tensor: one input gradient for all.
        options: keyword arguments of the parallel layer's class, in addition to sizes, bias, dtype and device;
            for example `replicas`, for a column of key/value heads that are fewer than tp.
        group: with `padded_size`: the sizes of a group of query heads without and with padding, which is at the end of
            each group; None: padding is at the end of the dim.
    """

    name: str
    style: str
    padded_size: int | None = None
    fused_with: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    group: tuple[int, int] | None = None


@dataclass(frozen=True)
class Style:
    """A way to shard a layer.

    Attributes:
        layer_type: the class that it replaces, exactly: a subclass may compute more. None: any module.
        build: `build(layer, sharded size, options)` returns the parallel layer, on meta. None: the layer stays.
        size_attribute: the layer's attribute that holds the size of the sharded dim.
    """

    layer_type: type[nn.Module] | None
    build: Callable[[Any, int, Mapping[str, Any]], ShardedModule] | None
    size_attribute: str = ""


def _column(linear: nn.Linear, size: int, options: Mapping[str, Any]) -> ShardedModule:
    layer_options = {"gather_output": False, **options}
    has_bias, dtype = linear.bias is not None, linear.weight.dtype
    return ColumnParallelLinear(linear.in_features, size, bias=has_bias, dtype=dtype, device="meta", **layer_options)


def _row(linear: nn.Linear, size: int, options: Mapping[str, Any]) -> ShardedModule:
    layer_options = {"input_is_parallel": True, **options}
    has_bias, dtype = linear.bias is not None, linear.weight.dtype
    return RowParallelLinear(size, linear.out_features, bias=has_bias, dtype=dtype, device="meta", **layer_options)


def _embedding(table: nn.Embedding, size: int, options: Mapping[str, Any]) -> ShardedModule:
    dim, padding_idx, dtype = table.embedding_dim, table.padding_idx, table.weight.dtype
    embedding = ParallelEmbedding(size, dim, padding_idx, dtype=dtype, device="meta", **options)
    embedding.num_embeddings = table.num_embeddings  # padding is no id
    return embedding


def _embedding_columns(table: nn.Embedding, size: int, options: Mapping[str, Any]) -> ShardedModule:
    rows, padding_idx, dtype = table.num_embeddings, table.padding_idx, table.weight.dtype
    sharding = {"shard_across_embedding": True, **options}
    return ParallelEmbedding(rows, size, padding_idx, dtype=dtype, device="meta", **sharding)


def _transposed_column(layer: Any, size: int, options: Mapping[str, Any]) -> ShardedModule:
    return ParallelConv1D(layer.nx, size, layer.weight.dtype, row=False, **options)


def _transposed_row(layer: Any, size: int, options: Mapping[str, Any]) -> ShardedModule:
    return ParallelConv1D(size, layer.nf, layer.weight.dtype, row=True, **options)


STYLES = {
    "column": Style(nn.Linear, _column, "out_features"),
    "row": Style(nn.Linear, _row, "in_features"),
    "embedding": Style(nn.Embedding, _embedding, "num_embeddings"),
    "embedding_columns": Style(nn.Embedding, _embedding_columns, "embedding_dim"),
    "transposed_column": Style(None, _transposed_column, "nf"),  # of transformers' Conv1D
    "transposed_row": Style(None, _transposed_row, "nx"),
    # The layer stays whole on every rank, and a rank gets a part of its gradient: the norms of local heads.
    "partial_gradient": Style(None, None),
}


def apply(model: nn.Module, plans: Sequence[LayerPlan]) -> nn.Module:
    """Replaces the layers that `plans` name, in place, by parallel ones over "tp". Returns the model.

    A layer on meta stays there (`materialize` or `load_pretrained` give it values); a real one is sliced. Layers that
    share a weight still share it; `requires_grad`, training mode and hooks are those of the replaced layer.

    Raises:
        ValueError: plans do not fit the model; the message lists all of them, and the model is not changed.
    """
    layers = _checked(model, plans)
    groups = dict.fromkeys(frozenset((plan.name, *plan.fused_with)) for plan in plans if plan.fused_with)
    # Whatever raises does so before the model is changed.
    parallel = {plan.name: _build(plan, layers[plan.name]) for plan in plans if STYLES[plan.style].build is not None}
    for group in groups:
        check_fusable([parallel[name] for name in group])
    tied: dict[int, nn.Parameter] = {}  # id of the whole parameter -> the local one
    for plan in plans:
        if plan.name in parallel:
            real_size = getattr(layers[plan.name], STYLES[plan.style].size_attribute)
            _install(model, plan, parallel[plan.name], real_size, tied)
        else:
            mark_partial_gradients(layers[plan.name])
    _share(model, tied)
    for group in groups:
        fuse_columns([parallel[plan.name] for plan in plans if plan.name in group])
    return model


def _share(model: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    """Puts local parameters in the place of whole ones that other modules share with replaced layers (BERT's bias)."""
    for module in model.modules():
        for name, param in module._parameters.items():
            local = None if param is None else tied.get(id(param))
            if local is not None and local is not param:
                setattr(module, name, local)
                set_spec(module, name, spec_of(local))


def _build(plan: LayerPlan, layer: nn.Module) -> Any:
    """The parallel layer of a plan, on meta.

    Raises:
        ValueError: its class does not take the options.
    """
    style = STYLES[plan.style]
    assert style.build is not None
    try:
        return style.build(layer, plan.padded_size or getattr(layer, style.size_attribute), plan.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot replace {plan.name} with the options {dict(plan.options)}: {error}") from error


def mark_partial_gradients(module: nn.Module) -> None:
    """Marks a module's replicated parameters, whose gradients are partial: they are summed over tp."""
    for name, param in module.named_parameters(recurse=False):
        set_spec(module, name, replace(spec_of(param), sequence_parallel=True))


def _checked(model: nn.Module, plans: Sequence[LayerPlan]) -> dict[str, nn.Module]:
    """The layers that plans name.

    Raises:
        ValueError: plans that do not fit the model.
    """
    tp = comm.size("tp")
    layers = dict(model.named_modules(remove_duplicate=False))
    columns = {plan.name for plan in plans if plan.style == "column"}
    problems = [f"{name} is planned twice" for name, count in Counter(plan.name for plan in plans).items() if count > 1]
    first_name: dict[int, str] = {}
    group_of: dict[str, frozenset[str]] = {}
    for plan in plans:
        style, layer = STYLES.get(plan.style), layers.get(plan.name)
        group = frozenset((plan.name, *plan.fused_with))
        if plan.fused_with and not columns.issuperset(group):
            problems.append(f"{plan.name} is fused with {', '.join(plan.fused_with)}: all must be planned as columns")
        elif plan.fused_with and any(group_of.setdefault(name, group) != group for name in group):
            problems.append(
                f"{plan.name} is fused with {', '.join(plan.fused_with)}, but not all of them declare the same fusion"
            )
        if style is None:
            problems.append(f"{plan.name} has the style {plan.style!r}: use one of {', '.join(STYLES)}")
            continue
        if layer is None:
            problems.append(f"{plan.name} is not a module of this {type(model).__name__}")
            continue
        if first_name.setdefault(id(layer), plan.name) != plan.name:
            problems.append(f"{plan.name} and {first_name[id(layer)]} are the same module: plan it once")
        if style.layer_type is not None and type(layer) is not style.layer_type:
            actual, expected = type(layer).__name__, style.layer_type.__name__
            problems.append(f"{plan.name} is a {actual}, but the style {plan.style!r} replaces torch.nn.{expected}")
        elif style.build is not None:
            size = getattr(layer, style.size_attribute)
            padded = size if plan.padded_size is None else plan.padded_size
            if padded < size:
                problems.append(
                    f"{plan.name} has {style.size_attribute} {size}, which is more than its padded size {padded}"
                )
            elif padded % _partitions(plan, tp):
                problems.append(f"{plan.name} has {style.size_attribute} {padded}, which is not divisible by tp={tp}")
    if problems:
        raise ValueError(f"cannot replace the layers of this {type(model).__name__}: " + "; ".join(problems))
    return layers


def _partitions(plan: LayerPlan, tp: int) -> int:
    """The number of shards; 1 where the layer refuses its replicas with its own message."""
    replicas = plan.options.get("replicas", 1)
    return tp // replicas if isinstance(replicas, int) and 0 < replicas <= tp else 1


def _install(
    model: nn.Module, plan: LayerPlan, parallel: ShardedModule, real_size: int, tied: dict[int, nn.Parameter]
) -> None:
    """Puts `parallel`, built on meta, in the place of a layer, with this rank's slices of the layer's parameters."""
    original = model.get_submodule(plan.name)
    for parameter, full in original.named_parameters(recurse=False):
        spec = spec_of(getattr(parallel, parameter))
        if spec.dim is not None and real_size != spec.full_shape[spec.dim]:
            spec = replace(spec, unpadded=real_size, group=plan.group)  # the layer was built with its padded size
        if id(full) in tied:
            local = tied[id(full)]
        elif spec.axis is None:
            local = full  # the parameter itself, which modules that stay may share
        elif full.is_meta:
            local = nn.Parameter(full.new_empty(spec.local_shape))
        else:
            piece = spec.local_slice(full.detach(), comm.rank(spec.axis))
            local = nn.Parameter(piece.clone(memory_format=torch.contiguous_format))
        local.requires_grad = full.requires_grad
        tied[id(full)] = local
        setattr(parallel, parameter, local)
        set_spec(parallel, parameter, spec)
    parallel.train(original.training)
    move_hooks(original, parallel)
    parent, _, child = plan.name.rpartition(".")
    setattr(model.get_submodule(parent), child, parallel)
