"""Rules of the functions that read and write by position: `x[index]`, gather, scatter, embedding, masks, searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .index import indexed
from .spec import Spec, along, derive, elementwise, labels, nonzero, rule
from .views import FIRST, ViewLabels, as_int

__all__ = ["index_sum", "scatter_sum", "write", "write_number"]

WHERE = "its positions say where in the other tensor values go"


@rule(Tensor.__getitem__, linear=FIRST, aliases=True)
def getitem(input: Tensor, index: Any) -> Spec:
    builder = ViewLabels()
    parts = indexed(builder, input.shape, index)
    return builder.spec([parts.x, *parts.tensors], [parts.out])


# --- writing: typed as functions without side effects, in which the value comes before the index ---


def write(x: Tensor, value: Any, index: Any, accumulate: bool = False) -> Tensor:
    """Returns x with `value` (a tensor or a number) at `x[index]`, or added there if `accumulate`."""
    if has_torch_function((x,)):
        return handle_torch_function(write, (x,), x, value, index, accumulate)
    written = x.clone()
    if accumulate:
        return written.index_put_(tuple(index), value, accumulate=True)
    written[index] = value
    return written


def write_number(x: Tensor, value: Any, index: Any, accumulate: bool = False) -> Tensor:
    """Returns x with a number at `x[index]`: not a case of `write`, because it is linear in other operands."""
    if has_torch_function((x,)):
        return handle_torch_function(write_number, (x,), x, value, index, accumulate)
    return write(x, value, index)


def _write(x: Tensor, value: Any, index: Any, accumulate: bool = False) -> Spec:
    builder = ViewLabels()
    parts = indexed(builder, x.shape, index)
    builder.ranges.clear()  # the result is x, not the values at the index
    of_x = {label for dim in parts.x for label in dim}
    small = not isinstance(value, Tensor) or value.numel() == 1
    dims: list[tuple[int, ...]] = []
    if small and parts.masked:  # element by element, like masked_fill
        builder.fixed, builder.selected = {}, set()
        dims = [()] * value.dim() if isinstance(value, Tensor) else []
    elif isinstance(value, Tensor):
        extra = value.dim() - len(parts.out)
        dims = [()] * max(extra, 0)
        for size, dim in zip(value.shape[max(extra, 0) :], parts.out[max(-extra, 0) :]):
            wide = any(builder.sizes[label] != 1 for label in dim)
            dims.append(() if size == 1 and wide else dim)
    ins = [parts.x, dims] if isinstance(value, Tensor) else [parts.x]
    for operand in (*ins[1:], *parts.tensors):
        for dim in operand:
            builder.fixed.update(dict.fromkeys((label for label in dim if label not in of_x), WHERE))
    return builder.spec([*ins, *parts.tensors], [parts.x])


rule(write, linear=((0, 1),), name="index_put")(_write)
rule(write_number, linear=FIRST, name="index_put", affine=lambda x, value, index, accumulate=False: nonzero(value))(
    _write
)


def _written(x: Tensor, index: Any, value: Any) -> Tensor:
    return write(x, value, index) if isinstance(value, Tensor) else write_number(x, value, index)


def _put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    return write(input, values, tuple(indices), accumulate)


rule(Tensor.__setitem__, kind="decompose", decompose=_written, inplace=0)(None)
rule(torch.index_put, Tensor.index_put, kind="decompose", decompose=_put)(None)
rule(torch.index_put_, Tensor.index_put_, kind="decompose", decompose=_put, inplace=0)(None)


# --- gather, scatter ---


def _with_table(builder: ViewLabels, shape: Sequence[int], index: Sequence[int], dim: int) -> tuple[Any, Any]:
    """Returns the dims of a tensor and of an index with as many dims, whose entries are positions along `dim`.

    The index may be shorter in the other dims.
    """
    ins: list[tuple[int, ...]] = []
    table: list[tuple[int, ...]] = []
    for at, (size, many) in enumerate(zip(shape, index)):
        if at == dim:
            ins.append((builder.new(size, TABLE, looked_up=True),))
            table.append((builder.new(many),))
        elif size == many:
            ins.append((builder.new(size),))
            table.append(ins[-1])
        else:
            why = "the index is shorter there, so that only its first positions count"
            ins.append((builder.new(size, why, selected=True),))
            table.append((builder.new(many, why),))
    return ins, table


TABLE = "another tensor indexes it"


@rule(torch.gather, Tensor.gather, linear=FIRST)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Spec:
    builder = ViewLabels()
    ins, table = _with_table(builder, input.shape, index.shape, dim % max(input.ndim, 1))
    return builder.spec([ins, table], [table])


def _scatter(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Spec:
    """Spec of `input` with values at positions along `dim`, where index and values must not be sharded."""
    builder = ViewLabels()
    ins, table = _with_table(builder, input.shape, index.shape, dim % max(input.ndim, 1))
    for label in {label for factors in table for label in factors} - {label for factors in ins for label in factors}:
        builder.fixed.setdefault(label, WHERE)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    rows: list[Any] = []
    for value in values:
        row = []
        for size, many, factors in zip(value.shape, index.shape, table):
            if size != many:  # only its first positions are used
                builder.fixed[factors[0]] = WHERE
                factors = (builder.new(size, WHERE),)
            row.append(factors)
        rows.append(row)
    return builder.spec([ins, table, *rows], [ins])


def _scatter_affine(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Returns True if scatter writes a number or multiplies."""
    if kwargs.get("reduce") == "multiply":
        return True
    return any(nonzero(value) for value in (*args, *kwargs.values()) if isinstance(value, (int, float, complex)))


rule(torch.scatter, Tensor.scatter, linear=((0, 2),), affine=_scatter_affine)(_scatter)
derive(torch.scatter, Tensor.scatter_, inplace=0)
rule(torch.scatter_reduce, Tensor.scatter_reduce)(_scatter)
derive(torch.scatter_reduce, Tensor.scatter_reduce_, inplace=0)


def scatter_sum(src: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns zeros of `shape` with `src` added at the positions `index` along `dim`."""
    if has_torch_function((src,)):
        return handle_torch_function(scatter_sum, (src,), src, dim, index, shape)
    return src.new_zeros(shape).scatter_add(dim, index, src)


@rule(scatter_sum, linear=FIRST, name="scatter_add")
def _scatter_sum(src: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Spec:
    """Spec of `scatter_sum`: sharded along `dim`, each rank adds its positions, and the sums are partial."""
    builder = ViewLabels()
    ins, table = _with_table(builder, shape, index.shape, dim % max(len(shape), 1))
    out = []
    for at, factors in enumerate(ins):
        out.append((builder.new(shape[at]),) if factors != table[at] else factors)
        if factors != table[at]:
            builder.fixed.pop(factors[0], None)
    builder.selected, builder.looked_up = set(), set()
    if table:
        builder.reduced[table[dim % len(shape)][0]] = "sum"
    rows = [
        f if src.shape[at] == index.shape[at] else (builder.new(src.shape[at], WHERE),) for at, f in enumerate(table)
    ]
    return builder.spec([rows, table], [out])


def index_sum(source: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    """Returns zeros of `size` along `dim` with the slices of `source` added at the positions `index`."""
    if has_torch_function((source,)):
        return handle_torch_function(index_sum, (source,), source, dim, index, size)
    shape = [size if at == dim % source.dim() else length for at, length in enumerate(source.shape)]
    return source.new_zeros(shape).index_add(dim, index, source)


@rule(index_sum, linear=FIRST, name="index_add")
def _index_sum(source: Tensor, dim: int, index: Tensor, size: int) -> Spec:
    """Spec of `index_sum`: sharded along `dim`, each rank adds its slices, and the sums are partial."""
    ndim = source.dim()
    dims = labels(ndim)
    dim %= ndim
    sizes = {**dict(enumerate(source.shape)), ndim: size}
    out = (*dims[:dim], (ndim,), *dims[dim + 1 :])
    return Spec((dims, (dims[dim],) * index.dim()), (out,), sizes, {dim: "sum"})


def _scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return torch.add(input, scatter_sum(src, dim, index, tuple(input.shape)))


def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return torch.add(input, index_sum(source, dim, index, input.shape[dim]), alpha=alpha)


rule(torch.scatter_add, Tensor.scatter_add, kind="decompose", decompose=_scatter_add)(None)
rule(Tensor.scatter_add_, kind="decompose", decompose=_scatter_add, inplace=0)(None)
rule(torch.index_add, Tensor.index_add, kind="decompose", decompose=_index_add)(None)
rule(Tensor.index_add_, kind="decompose", decompose=_index_add, inplace=0)(None)


# --- index_select and its relatives: one vector of positions ---


@rule(torch.index_select, Tensor.index_select, linear=FIRST)
def index_select(input: Tensor, dim: int, index: Tensor) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(input.shape)
    at = dim % max(input.ndim, 1)
    picked = [(builder.new(size),) for size in index.shape]
    if not dims:
        return builder.spec([dims, picked], [[]])
    builder.fixed[at], builder.looked_up = TABLE, {at}
    out: tuple[int, ...] = picked[0] if picked else ()
    return builder.spec([dims, picked], [[*dims[:at], out, *dims[at + 1 :]]])


def _index_written(input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Spec:
    builder = ViewLabels()
    dims = builder.dims(input.shape)
    at = dim % max(input.ndim, 1)
    if dims:
        builder.fixed[at], builder.looked_up = TABLE, {at}
    picked = [(builder.new(size, WHERE),) for size in index.shape]
    rows: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            rows.append([*dims[:at], *picked, *dims[at + 1 :]] if value.dim() else [])
    return builder.spec([dims, picked, *rows], [dims])


rule(torch.index_copy, Tensor.index_copy, linear=((0, 2),))(_index_written)
derive(torch.index_copy, Tensor.index_copy_, inplace=0)
rule(torch.index_reduce, Tensor.index_reduce)(_index_written)
derive(torch.index_reduce, Tensor.index_reduce_, inplace=0)
rule(torch.index_fill, Tensor.index_fill, linear=((0, 2),), affine=_scatter_affine)(_index_written)
derive(torch.index_fill, Tensor.index_fill_, inplace=0)


@rule(torch.take, Tensor.take, linear=FIRST)
def take(input: Tensor, index: Tensor) -> Spec:
    builder = ViewLabels()
    dims = [(builder.new(size, "another tensor indexes all of it", looked_up=True),) for size in input.shape]
    table = builder.dims(index.shape)
    return builder.spec([dims, table], [table])


@rule(torch.put, Tensor.put, linear=((0, 2),))
def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Spec:
    builder = ViewLabels()
    dims = [(builder.new(size, "another tensor indexes all of it", looked_up=True),) for size in input.shape]
    table = [(builder.new(size, WHERE),) for size in index.shape]
    rows = table if source.shape == index.shape else [(builder.new(size, WHERE),) for size in source.shape]
    return builder.spec([dims, table, rows], [dims])


derive(torch.put, Tensor.put_, inplace=0)


@rule(torch.take_along_dim, Tensor.take_along_dim, linear=FIRST)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Spec:
    if dim is None:
        return take(input, indices)
    builder = ViewLabels()
    at = dim % input.ndim
    ins: list[tuple[int, ...]] = []
    table: list[tuple[int, ...]] = []
    out: list[tuple[int, ...]] = []
    for number, (size, many) in enumerate(zip(input.shape, indices.shape)):
        if number == at:
            ins.append((builder.new(size, TABLE, looked_up=True),))
            table.append((builder.new(many),))
            out.append(table[-1])
        else:  # these dims broadcast
            wide = (builder.new(max(size, many)),)
            ins.append(wide if size == max(size, many) else ())
            table.append(wide if many == max(size, many) else ())
            out.append(wide)
    return builder.spec([ins, table], [out])


# --- tables of rows ---


@rule(F.embedding, linear=((1,),), affine=lambda *args, **kwargs: _renorms(args, kwargs))
def embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
) -> Spec:
    builder = ViewLabels()
    positions = builder.dims(input.shape)
    why = "the indices count its rows from 0 to the end of the whole table"
    rows = (builder.new(weight.shape[0], why, looked_up=True),)
    scaled = None if max_norm is None else "max_norm needs the norm of the whole row"
    columns = (builder.new(weight.shape[1], scaled),)
    return builder.spec([positions, (rows, columns)], [[*positions, columns]])


def _renorms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None


@rule(torch.embedding, linear=FIRST)
def _embedding(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Spec:
    spec = embedding(indices, weight)
    return spec._replace(ins=spec.ins[::-1])


@rule(torch.embedding_renorm_, inplace=0)
def embedding_renorm(input: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Spec:
    positions, table = embedding(indices, input, None, max_norm).ins
    assert positions is not None and table is not None
    builder = ViewLabels()
    builder.dims((*indices.shape, *input.shape))
    builder.fixed = {label: "the rows that it names are scaled, and every rank has the table" for (label,) in positions}
    builder.fixed.update(embedding(indices, input, None, max_norm).fixed)
    builder.looked_up = {table[0][0]}
    return builder.spec([table, positions], [table])


@rule(F.embedding_bag, linear=((1,),), affine=lambda *args, **kwargs: "max" in (*args, *kwargs.values()))
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: Any = None,
    norm_type: Any = None,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Spec:
    builder = ViewLabels()
    builder.dims((*input.shape, *weight.shape))
    spec = embedding(input, weight, padding_idx, max_norm)  # with the same labels
    builder.fixed, builder.looked_up = dict(spec.fixed), set(spec.looked_up)
    rows, columns = ((input.dim(),), (input.dim() + 1,))
    bags = labels(input.dim())
    ins: list[Any] = [bags, (rows, columns)]
    if input.dim() == 2:
        if padding_idx is not None and mode != "sum":
            builder.fixed[1] = "padding in a bag is left out of its mean or maximum"
        else:
            builder.reduced[1] = mode
        out = bags[0]
    else:
        builder.fixed[0] = "offsets cut it into bags"
        size = offsets.shape[0] - include_last_offset if offsets is not None else 0
        if offsets is not None:
            ins.append([(builder.new(offsets.shape[0], WHERE),)])
        out = (builder.new(size),)
    if per_sample_weights is not None:
        ins.append(bags)
    return builder.spec(ins, [[out, columns]])


@rule(F.one_hot)
def one_hot(input: Tensor, num_classes: int = -1) -> Spec:
    dims = labels(input.ndim + 1)
    return Spec((dims[:-1],), (dims,), dict(enumerate((*input.shape, max(0, as_int(num_classes))))))


# --- results whose number depends on values ---


@rule(torch.masked_select, Tensor.masked_select, linear=FIRST)
def masked_select(input: Tensor, mask: Tensor) -> Spec:
    spec = elementwise(input.shape, mask.shape)
    why = "a mask picks another number of its positions on every rank"
    return spec._replace(
        outs=(((len(spec.sizes),),),),
        sizes={**spec.sizes, len(spec.sizes): 0},
        fixed=dict.fromkeys(spec.sizes, why),
        selected=frozenset(spec.sizes),
    )


@rule(torch.masked_scatter, Tensor.masked_scatter, linear=((0, 2),))
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Spec:
    builder = ViewLabels()
    builder.dims(input.shape)
    spec = elementwise(input.shape, mask.shape)
    why = "masked_scatter counts the positions of the mask"
    builder.fixed = dict.fromkeys(builder.sizes, why)
    return builder.spec([*spec.ins, [(builder.new(size, why),) for size in source.shape]], spec.outs)


derive(torch.masked_scatter, Tensor.masked_scatter_, inplace=0)


@rule(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.nonzero_static, Tensor.nonzero_static)
def nonzeros(input: Tensor, *, as_tuple: bool = False, **kwargs: Any) -> Spec:
    spec = along(input.shape, None, "it gives positions in the shard")
    new = len(spec.sizes)
    sizes = {**spec.sizes, new: as_int(kwargs.get("size", 0)), new + 1: input.ndim}
    outs = (((new,),),) * max(1, input.ndim) if as_tuple else (((new,), (new + 1,)),)
    return spec._replace(outs=outs, sizes=sizes)
