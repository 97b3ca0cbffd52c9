"""Parallel layers, and the operators of `spmd` that they are made of, over ranks outside of a tensor's mesh.

Along such an axis (tp) every rank has a ShardTensor of its own, all in one layout: a layer's function runs on the local
tensors. What it splits or puts together along a dim that is sharded over the mesh, it splits or puts together in every
shard. Weights are Replicate on the mesh, so their gradients are summed over it, those of a layer by one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import comm, spmd
from ...comm import Communicator
from ...parallel_layers.autograd_linear import ColumnLinear, RowLinear, call
from ...parallel_layers.embedding import own_rows
from ...parallel_layers.loss_functions import parallel_cross_entropy
from ...sharded_functions.vocabulary import hide_padding
from ...spmd import SpmdType, no_typecheck
from ...spmd.collectives import operator_dims
from ..handlers import sharded
from ..labels import Labels, inside, planned
from ..placements import Partial, Replicate, Shard
from ..spec import ShardTensorSpec, make_spec
from ..tensor import ShardTensor, in_layout, local_of, wrap

__all__: list[str] = []


# --- operators


@sharded(spmd.all_gather, spmd.all_reduce, spmd.all_to_all, spmd.convert, spmd.reduce_scatter, spmd.reinterpret)
def operator(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, axis = args
    group, name = comm.communicator(axis), func.__name__
    source = _summable(x._spec, group, name)
    stack_dim = kwargs.get("gather_dim", kwargs.get("scatter_dim"))
    src_dim, dst_dim = operator_dims(func, local_of(x), kwargs["src"], kwargs["dst"], stack_dim)
    spec = source
    if name not in ("all_reduce", "reinterpret"):
        spec = _resharded(source, group.size, name, kwargs["src"], src_dim, kwargs["dst"], dst_dim)
    return wrap(func(in_layout(x, source), group, **kwargs), spec)


@planned
def _summable(spec: ShardTensorSpec, group: Communicator, name: str) -> ShardTensorSpec:
    """Returns the layout in which an operator over a group may run on local tensors: without Partial maxima.

    Raises:
        ValueError: the group has other ranks of the tensor's own mesh.
    """
    with no_typecheck():  # of numbers of ranks
        shared = set(group.ranks) & set(spec.mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        raise ValueError(
            f"{name} over {group.axis} of a ShardTensor {list(spec.placements)} on {spec.mesh}: ranks "
            f"{sorted(shared)} belong to both. Operators and parallel layers take ShardTensors whose mesh shares no "
            "ranks with their group: use redistribute() to communicate over the tensor's mesh, or pass to_local()"
        )
    placements = [Replicate() if p == Partial("max") else p for p in spec.placements]
    return make_spec(spec.mesh, placements, spec.shape, spec.sizes)


@planned
def _resharded(
    spec: ShardTensorSpec, size: int, name: str, src: SpmdType, src_dim: int, dst: SpmdType, dst_dim: int
) -> ShardTensorSpec:
    """Returns the layout of an operator's result: S(dim) is joined and split, V stacked and unstacked."""
    if src.letter == dst.letter == "V":
        return _split(_split(spec, 0, size, name), 0, size, name, True)
    if src.letter == "S":
        spec = _split(spec, src_dim, size, name, True)
    if dst.letter == "S":
        spec = _split(spec, dst_dim, size, name)
    if src.letter == "V":
        return _with_dims(spec, [*spec.shape[:src_dim], size, *spec.shape[src_dim:]], lambda d: d + (d >= src_dim))
    if dst.letter == "V":
        if dst_dim in spec.mesh_dim_of:
            raise ValueError(
                f"{name} would unstack dim {dst_dim}, which is sharded in {spec}: redistribute() it to another dim "
                "first"
            )
        return _with_dims(spec, [*spec.shape[:dst_dim], *spec.shape[dst_dim + 1 :]], lambda d: d - (d > dst_dim))
    return spec


def _with_dims(spec: ShardTensorSpec, shape: list[int], new_dim: Callable[[int], int]) -> ShardTensorSpec:
    placements = [Shard(new_dim(p.dim)) if isinstance(p, Shard) else p for p in spec.placements]
    return make_spec(spec.mesh, placements, shape, spec.sizes)


@planned
def _split(spec: ShardTensorSpec, dim: int, size: int, name: str, together: bool = False) -> ShardTensorSpec:
    """Returns the layout of a dim each shard of which `size` ranks split; `together`: of pieces that are joined again.

    Raises:
        ValueError: a shard does not divide, or the dim is the last, of features.
    """
    mesh_dim = spec.mesh_dim_of.get(dim)
    if mesh_dim is not None and dim == len(spec.shape) - 1:  # of pieces of each shard; a weight has those of the whole
        raise ValueError(
            f"{name} over {size} ranks would split or join dim {dim}, the features, which is sharded on mesh dim "
            f"{mesh_dim}: redistribute() to another dim first"
        )
    lengths = [spec.shape[dim]] if mesh_dim is None else list(spec.sizes[mesh_dim] or ())
    if not together and any(length % size for length in lengths):
        raise ValueError(
            f"{name} splits dim {dim} over {size} ranks, but its shards {lengths} on mesh dim {mesh_dim} are not "
            f"multiples of {size}: use redistribute(sizes=..) with multiples"
        )
    lengths = [length * size if together else length // size for length in lengths]
    sizes = [tuple(lengths) if m == mesh_dim else along for m, along in enumerate(spec.sizes)]
    return make_spec(spec.mesh, spec.placements, [*spec.shape[:dim], sum(lengths), *spec.shape[dim + 1 :]], sizes)


# --- layers


def _linears(x: torch.Size, *params: torch.Size | None) -> Labels:
    """Linear layers on one input: weights `[out, in]`, and biases `[out]`."""
    rows, count = tuple(range(len(x) - 1)), sum(shape is not None and len(shape) == 2 for shape in params)
    if any(shape is not None and len(shape) == 2 and shape[1] != x[-1] for shape in params):
        raise ValueError(
            f"an input of shape {list(x)} does not match weights and biases of shapes "
            f"{[list(shape) for shape in params if shape is not None]}"
        )
    out = [f"out {i % count}" for i in range(len(params))]
    operands = [(*rows, "in"), *((out[i], "in") if i < count else (out[i],) for i in range(len(params)))]
    added = frozenset(range(1 + count, 1 + len(params)))
    return Labels(operands, (*rows, out[0]), whole=frozenset(out), added=added)


@sharded(call)
def linears(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    function, x, *rest = args
    if function is ColumnLinear:
        group, dim, reduce_dtype, count, *params = rest
        (local, *used), spec = inside(_linears, (x, *params))
        _summable(spec, group, "ColumnParallelLinear")
        if dim is not None:
            spec = _split(spec, dim % x.dim(), group.size, "ColumnParallelLinear", True)
        outs = func(function, local, group, dim, reduce_dtype, count, *used)
        return tuple(wrap(out, spec.with_shape(torch.Size((*spec.shape[:-1], out.shape[-1])))) for out in outs)
    if function is RowLinear:
        weight, bias, group, dim, reduce_dtype = rest
        locals_, spec = inside(_linears, (x, weight, bias))
        _summable(spec, group, "RowParallelLinear")
        if dim is not None:
            spec = _split(spec, dim % x.dim(), group.size, "RowParallelLinear")
        return wrap(func(function, *locals_, group, dim, reduce_dtype), spec)
    return function.composition(x, *rest)


def _rows_of_table(ids: torch.Size, weight: torch.Size) -> Labels:
    names = tuple(range(len(ids)))
    return Labels([names, ("id", "hidden")], (*names, "hidden"), whole=frozenset(("id", "hidden")))


@sharded(own_rows)
def embedding(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    ids, weight, layer = args
    if layer.max_norm is not None or layer.sparse:
        raise NotImplementedError("ParallelEmbedding of ShardTensors does not support max_norm and sparse")
    locals_, spec = inside(_rows_of_table, (ids, weight))
    _summable(spec, comm.communicator(layer.axis), "ParallelEmbedding")
    return wrap(func(*locals_, layer), spec)


def _losses(logits: torch.Size, labels: torch.Size) -> Labels:
    if logits[:-1] != labels:
        raise ValueError(
            f"parallel_cross_entropy: labels {list(labels)} do not match logits {list(logits)}; expected "
            f"{list(logits[:-1])}"
        )
    rows = tuple(range(len(labels)))
    return Labels([(*rows, "id"), rows], rows, whole=frozenset(("id",)))


@sharded(parallel_cross_entropy)
def cross_entropy(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    logits, labels, *options = args
    locals_, spec = inside(_losses, (logits, labels))
    _summable(spec, comm.communicator(kwargs.get("tensor_model_parallel_group") or "tp"), "parallel_cross_entropy")
    return wrap(func(*locals_, *options, **kwargs), spec)


@sharded(hide_padding)
def padding(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> ShardTensor:
    logits, vocabulary, axis = args
    _summable(logits._spec, comm.communicator(axis), "hide_padding")
    if logits._spec.partial or logits.dim() - 1 in logits._spec.mesh_dim_of:
        raise ValueError(
            f"hide_padding of {logits._spec}: the vocabulary dim must be complete on each rank, and not Partial: "
            "redistribute() it first"
        )
    func(logits._local, vocabulary, axis)
    return logits
